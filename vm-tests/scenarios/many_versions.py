"""Ten versions of one model cost one version plus what changed."""

from harness import checkpoint, model
from harness.filesystem import XFS
from harness.paths import check

TITLE = "ten versions by snapshot take less than 1.05 times one version plus what changed"
LIMIT_S = 300
VERSIONS = 10
OVERHEAD = 1.05


def run(world):
    directories = [world.share / f"v{number}" for number in range(1, VERSIONS + 1)]
    model.write_base(directories[0])
    changed = [[]]
    for number in range(1, VERSIONS):
        # Each step trains one encoder layer further and the pooler with it.
        shards = [model.SHARDS[1 + number % 6], model.SHARDS[-1]]
        model.write_variant(directories[number], directories[number - 1], f"v{number + 1}", model.FINE_TUNED, shards)
        changed.append(shards)

    with world.rimrock(gib=16) as rimrock, world.guest() as guest:
        empty = rimrock.allocated()
        rimrock.create_volume("encoder", gib=4)
        device = guest.attach(rimrock, "encoder")
        guest.run(f"{XFS.make} {device} && mkdir -p /mnt/live /mnt/copy && mount {device} /mnt/live")

        ideal = 0
        for number, shards in enumerate(changed, start=1):
            directory = directories[number - 1]
            with world.step(f"version {number}"):
                files = " ".join(f"/host/v{number}/{name}" for name in shards or ["*"])
                guest.run(f"mkdir -p /mnt/live/model && cp {files} /mnt/live/model/ && fsfreeze --freeze /mnt/live")
                rimrock.snapshot("encoder", f"v{number}")
                guest.run("fsfreeze --unfreeze /mnt/live")
                ideal += sum((directory / name).stat().st_size for name in shards) or model.size(directory)
                used = rimrock.allocated() - empty
                world.note(f"{used / 1e6:.1f} MB used, {ideal / 1e6:.1f} MB written, {used / ideal:.3f} x")
        check(used < OVERHEAD * ideal,
              f"ten versions take {used} bytes, {used / ideal:.3f} times the {ideal} of one version plus what changed")

        for number in [1, VERSIONS // 2, VERSIONS]:
            with world.step(f"version {number} read back"):
                name = f"encoder-v{number}"
                rimrock.clone("encoder", f"v{number}", name)
                copy = guest.attach(rimrock, name, read_only=True)
                guest.run(f"mount -o {XFS.read_only_options} {copy} /mnt/copy")
                checkpoint.verify(guest, directories[number - 1], "/mnt/copy/model", f"version {number}")
                guest.run("umount /mnt/copy")
        guest.run(f"umount /mnt/live && {XFS.check} {device}")
        rimrock.stop()
