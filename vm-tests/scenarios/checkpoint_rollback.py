"""Checkpoints go in by way of XFS and ext4, a bad one is rolled back, a clone of the good one is read beside it."""

from harness import checkpoint, model
from harness.filesystem import ALL
from harness.paths import check

TITLE = "checkpoints, snapshots, a rollback and a read-only clone, on XFS and ext4"
LIMIT_S = 420


def run(world):
    model.write_base(world.share / "base")
    model.write_variant(world.share / "tuned", world.share / "base", "tuned", model.FINE_TUNED, model.SHARDS)
    model.write_variant(world.share / "bad", world.share / "tuned", "bad", model.RUINED, model.SHARDS[3:])
    (world.share / "bad/optimizer.bin").write_bytes(b"not part of a checkpoint\n")
    with world.rimrock(gib=16) as rimrock:
        with world.guest() as guest:
            for filesystem in ALL.values():
                with world.step(filesystem.name):
                    one_filesystem(world, rimrock, guest, filesystem)
        rimrock.stop()


def one_filesystem(world, rimrock, guest, filesystem):
    volume = f"model-{filesystem.name}"
    rimrock.create_volume(volume, gib=4)
    device = guest.attach(rimrock, volume)
    guest.run(f"{filesystem.make} {device} && mkdir -p /mnt/live /mnt/copy && mount {device} /mnt/live")

    with world.step("base checkpoint, synced, snapshot"):
        checkpoint.write(guest, "base", "/mnt/live/checkpoint")
        rimrock.snapshot(volume, "base")
    with world.step("fine-tuned over it, frozen, snapshot"):
        checkpoint.write(guest, "tuned", "/mnt/live/checkpoint")
        # After a sync the newest metadata may be in the filesystem's log alone, and a read-only copy cannot
        # replay that. A freeze brings it to its place.
        guest.run("fsfreeze --freeze /mnt/live")
        rimrock.snapshot(volume, "tuned")
        guest.run("fsfreeze --unfreeze /mnt/live")
    with world.step("bad checkpoint over it"):
        checkpoint.write(guest, "bad", "/mnt/live/checkpoint")
        checkpoint.verify(guest, world.share / "bad", "/mnt/live/checkpoint", "the bad checkpoint as written")

    for snapshot in ["base", "tuned"]:
        with world.step(f"rollback to {snapshot}"):
            guest.run("umount /mnt/live")
            rimrock.rollback(volume, snapshot)
            guest.run(f"mount {device} /mnt/live")
            checkpoint.verify(guest, world.share / snapshot, "/mnt/live/checkpoint", f"after rollback to {snapshot}")

    with world.step("read-only clone of the fine-tuned one beside it"):
        rimrock.clone(volume, "tuned", f"{volume}-serving")
        copy = guest.attach(rimrock, f"{volume}-serving", read_only=True)
        guest.run(f"mount -o {filesystem.read_only_options} {copy} /mnt/copy")
        checkpoint.verify(guest, world.share / "tuned", "/mnt/copy/checkpoint", "the read-only clone")
        checkpoint.verify(guest, world.share / "tuned", "/mnt/live/checkpoint", "the volume beside its clone")
        guest.run("umount /mnt/copy")
        refuses_writes(guest, copy)
    guest.run(f"umount /mnt/live && {filesystem.check} {device} && nvme disconnect-all")


def refuses_writes(guest, device):
    """The target refuses a write to `device` even when the guest's kernel is made to send one."""
    check(guest.run(f"blockdev --getro {device}").strip() == "1", f"{device} does not show itself read-only")
    before = guest.run(f"head -c 4096 {device} | sha256sum")
    status, output = guest.attempt(f"dd if=/dev/zero of={device} bs=4096 count=1 conv=fsync")
    check(status != 0, f"a write to the read-only {device} went through: {output}")
    # Past the block layer, straight to the target.
    status, output = guest.attempt(f"head -c 4096 /dev/zero >/tmp/zeros; nvme write {device} --start-block=0"
                                   " --block-count=0 --data-size=4096 --data=/tmp/zeros")
    check(status != 0, f"the target took a write to a read-only namespace: {output}")
    check(guest.run(f"echo 3 >/proc/sys/vm/drop_caches; head -c 4096 {device} | sha256sum") == before,
          f"{device} changed")
