"""Checkpoints in the guest: written as a training job does, verified file by file."""

from . import model
from .paths import Failure


def write(guest, source, directory):
    """Copy the checkpoint /host/`source` over `directory`, then sync."""
    guest.run(f"mkdir -p {directory} && cp /host/{source}/* {directory}/ && sync")


def verify(guest, expected, directory, what):
    """The files in `directory` are exactly those of the checkpoint `expected` (on the host), by SHA-256."""
    # The copy in the guest's page cache proves nothing.
    listing = guest.run(f"sync; echo 3 >/proc/sys/vm/drop_caches; cd {directory} && sha256sum *")
    found = {name: digest for digest, name in (line.split() for line in listing.splitlines())}
    wanted = model.checksums(expected)
    if found != wanted:
        wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        raise Failure(f"{what}: these files differ, are missing or too many: {' '.join(wrong)}")
