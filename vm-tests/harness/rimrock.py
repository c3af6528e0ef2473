"""A Rimrock on this host: the daemon as a process, everything else through its command line.

All that the scenarios know of Rimrock's commands and their JSON stands in this file.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from . import process
from .paths import ROOT, Failure, Skip

START_LIMIT_S = 20
STOP_LIMIT_S = 20
ADDRESS = "127.0.0.1"
POOL = "models"

CONFIGURATION = """\
[reactor]
cores = [0]

[control]
socket = "{socket}"

[[device]]
name = "disk"
uri = "uring:{pool_file}?size={gib}GiB"

[[pool]]
name = "{pool}"
devices = ["disk"]
create = true
"""


def binary():
    """The program under test: RIMROCK_BIN, or the release build."""
    path = Path(os.environ.get("RIMROCK_BIN", ROOT / "target/release/rimrock"))
    if not path.exists():
        raise Skip(f"{path} is missing: run `cargo build --release`")
    return path


def free_port():
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return probe.getsockname()[1]


class Rimrock:
    """A daemon with one pool of `gib` GiB, a sparse file in `home`. Use as a context manager."""

    def __init__(self, home, gib):
        self.binary = binary()
        self.log = home / "rimrock.log"
        # A socket's path must be short, so it does not lie with the rest.
        self.runtime = tempfile.mkdtemp(prefix="rimrock-vm-")
        self.socket = self.runtime + "/rimrock.sock"
        self.port = free_port()
        self.process = None
        self.configuration = home / "rimrock.toml"
        self.configuration.write_text(CONFIGURATION.format(
            socket=self.socket, pool_file=home / "pool.img", gib=gib, pool=POOL))

    def start(self):
        """Start the daemon, at first or again, and return when it answers."""
        self.process = process.spawn([self.binary, "serve", "--config", self.configuration], self.log)
        deadline = time.monotonic() + START_LIMIT_S
        while self._run("rpc", "spdk_get_version").returncode != 0:
            if self.process.poll() is not None:
                raise Failure(f"rimrock serve ended with {self.process.returncode} at start")
            if time.monotonic() > deadline:
                raise Failure(f"rimrock serve does not answer within {START_LIMIT_S} s")
            time.sleep(0.05)

    def kill(self):
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        """Stop the daemon as an administrator would; anything but a clean exit fails."""
        status = process.end(self.process, grace=STOP_LIMIT_S)
        if status != 0:
            raise Failure(f"rimrock serve ended with {status} when asked to stop")

    def _run(self, *arguments):
        return subprocess.run([self.binary, "--socket", self.socket, "-o", "json", *arguments],
                              capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)

    def command(self, *arguments):
        """Run `rimrock ARGUMENTS` and return its JSON answer."""
        result = self._run(*arguments)
        with open(self.log, "a") as log:
            log.write(f"$ rimrock {' '.join(arguments)}\n{result.stdout}{result.stderr}")
        if result.returncode != 0:
            raise Failure(f"rimrock {' '.join(arguments)} ended with {result.returncode}: {result.stderr.strip()}")
        return json.loads(result.stdout) if result.stdout.strip() else None

    def create_volume(self, name, gib, block_size=4096):
        self.command("volume", "create", name, f"{gib}GiB", "--block-size", str(block_size))

    def resize(self, volume, gib):
        self.command("volume", "resize", volume, f"{gib}GiB")

    def export(self, name, read_only=False):
        """Export a volume or snapshot in a subsystem of its own on our port; returns (NQN, UUID)."""
        nqn = f"nqn.2026-01.test.rimrock:{name}"
        options = ["--read-only"] if read_only else []
        self.command("volume", "export", name, "--nqn", nqn, "--listen", f"{ADDRESS}:{self.port}", *options)
        return nqn, self.uuid(name)

    def uuid(self, name):
        return self.command("snapshot" if "@" in name else "volume", "show", name)["uuid"]

    def add_namespace(self, nqn, name):
        """Show a volume or snapshot as one more namespace of a subsystem; returns its UUID."""
        uuid = self.uuid(name)
        self.command("rpc", "nvmf_subsystem_add_ns", json.dumps({"nqn": nqn, "namespace": {"bdev_name": uuid}}))
        return uuid

    def snapshot(self, volume, name):
        self.command("snapshot", "create", f"{volume}@{name}")

    def rollback(self, volume, snapshot):
        self.command("volume", "rollback", volume, snapshot)

    def clone(self, volume, snapshot, name):
        self.command("clone", "create", f"{volume}@{snapshot}", name)

    def allocated(self):
        """Bytes of the pool in use."""
        return self.command("pool", "show", POOL)["allocated"]

    def close(self):
        if self.process:
            process.end(self.process)
        shutil.rmtree(self.runtime, ignore_errors=True)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.close()
