"""The power goes in the middle of writes, again and again: what was durable is there, and nothing is half there.

Rimrock runs inside the guest, on a disk that loses, reorders and tears what was not flushed; the guest's own kernel
writes to two volumes through it. QEMU is killed, and the next guest finds the disk as such a disk would be.
"""

import random

from harness.disk import Disk
from harness.inside import Inside
from harness.paths import ROOT, Skip, check

TITLE = "QEMU killed mid-write, ten times, on a disk that loses what was not flushed: all that was durable is intact"
LIMIT_S = 600
CUTS = 10
DISK_MIB = 512
VOLUMES = ["cached", "through"]
MIB = {"cached": 16, "through": 8}
WRITER = ROOT / "target/release/power-cut-writer"


def run(world):
    if not WRITER.exists():
        raise Skip(f"{WRITER} is missing: run `cargo build --release --workspace`")
    chance = random.Random(world.seed)
    history = History(world)
    with Disk(world.home, DISK_MIB, chance) as disk:
        for cut in range(CUTS + 1):
            with world.guest(disk=disk, programs=[Inside.binary(), WRITER]) as guest:
                rimrock = Inside(guest)
                if cut == 0:
                    rimrock.start(create=True)
                    for volume in VOLUMES:
                        rimrock.create_volume(volume, MIB[volume], write_cache=volume == "cached")
                else:
                    with world.step(f"after cut {cut}"):
                        came_up = rimrock.start()
                        world.note(f"Rimrock serves {came_up:.2f} s after its start")
                        verify(world, guest, rimrock, history)
                if cut == CUTS:
                    rimrock.stop()
                    return
                seconds = chance.uniform(0.5, 5)
                with world.step(f"cut {cut + 1}, {seconds:.2f} s into the writes"):
                    devices = [rimrock.attach(volume) for volume in VOLUMES]
                    history.begin()
                    guest.run_until_cut(
                        f"exec power-cut-writer write {world.seed} {history.run} {rimrock.SOCKET} {' '.join(devices)}",
                        seconds, history.hear)
                    world.note(disk.cut())
                    world.note(history.summary())


def verify(world, guest, rimrock, history):
    """Everything readable is what it must be, and the pool's own books agree."""
    rimrock.healthy()
    devices = [rimrock.attach(volume) for volume in VOLUMES]
    path = history.share("history", history.lines)
    found = guest.run(f"power-cut-writer verify {world.seed} {path} {' '.join(devices)}", limit=120)
    history.lines += [line for line in found.splitlines() if line.startswith("kept ")]
    world.note(f"all blocks are right; {found.count('kept ')} show a write that nothing had made durable yet")

    # Snapshots that were acknowledged are there; of the others one at most, of which nothing was promised.
    there = {node["name"] for node in rimrock.snapshots()}
    known = {f"{volume}@{name}" for name in history.snapshots for volume in VOLUMES}
    check(not (lost := known - there), f"acknowledged snapshots are gone: {' '.join(sorted(lost))}")
    for name, snapshot in list(history.snapshots.items()):
        path = history.share("snapshot", history.lines[:snapshot.lines])
        for number, volume in enumerate(VOLUMES):
            device = rimrock.attach(f"{volume}@{name}")
            guest.run(f"power-cut-writer snapshot {world.seed} {path} {number} {device} {snapshot.done} {snapshot.begun}",
                      limit=120)
    world.note(f"{len(history.snapshots)} snapshots of {len(VOLUMES)} volumes are each of one instant: "
               + " ".join(history.snapshots))
    # The newest stays through the next cut, so that a snapshot is seen to last; the others make room.
    stays = max(history.snapshots, key=history.age, default=None)
    for name in [name for name in history.snapshots if name != stays]:
        del history.snapshots[name]
    keep = {f"{volume}@{stays}" for volume in VOLUMES}
    for name in sorted(there - keep):
        rimrock.delete_snapshot(name)
    rimrock.healthy()


class Snapshot:
    """What the host heard of a group snapshot: its place in the history, and each thread's progress around it."""

    def __init__(self, lines, done, begun):
        self.lines, self.done, self.begun = lines, ",".join(done), ",".join(begun)


class History:
    """What the host heard from the writer: the facts that must hold after a cut (see writer/proof.rs)."""

    def __init__(self, world):
        self.directory = world.share
        self.run = 0
        self.lines = []
        self.snapshots = {}
        self.heard = 0

    def begin(self):
        self.run += 1
        self.heard = 0
        self.lines.append(f"run {self.run}")
        self.start = len(self.lines)

    def hear(self, line):
        kind, *words = line.split() or [""]
        self.heard += 1
        if kind == "snapshot":
            name, *counts = words
            half = len(counts) // 2
            self.snapshots[name] = Snapshot(self.start, counts[:half], counts[half:])
        elif kind == "deleting":
            self.snapshots.pop(words[0], None)
        else:
            check(kind in ("flushed", "through"), f"the writer said: {line}")
            self.lines.append(line)

    def age(self, name):
        return [int(number) for number in name.split("-")]

    def share(self, name, lines):
        """Make lines a file that the guest can read; returns its path there."""
        (self.directory / name).write_text("".join(line + "\n" for line in lines))
        return f"/host/{name}"

    def summary(self):
        flushes = sum(line.startswith("flushed") for line in self.lines[self.start:])
        return (f"the host heard {self.heard} facts, {flushes} flushes among them; "
                f"{len(self.snapshots)} snapshots must be there")
