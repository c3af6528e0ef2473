"""The two filesystems of the scenarios: how each is made, mounted from a snapshot, and checked."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Filesystem:
    name: str
    make: str
    check: str  # changes nothing; non-zero unless the filesystem is clean
    # Mounting a copy that cannot be written: no log recovery and, for XFS, no complaint about a UUID seen twice.
    read_only_options: str


XFS = Filesystem("xfs", "mkfs.xfs -q -f", "xfs_repair -n", "ro,norecovery,nouuid")
EXT4 = Filesystem("ext4", "mkfs.ext4 -q -F", "e2fsck -f -n", "ro,noload")
ALL = {"xfs": XFS, "ext4": EXT4}
