"""kill -9 in the middle of a guest's writes: the guest goes on by itself and nothing it had fsynced is lost."""

import random
import time

from harness.filesystem import ALL
from harness.paths import check

TITLE = "kill -9 during a guest's writes; it reconnects, the filesystem is clean, every fsynced file is intact"
LIMIT_S = 420
KILLS = 2
FILES_BEFORE_KILL = 12
FILES_AFTER = 12

# Writes files in a ring of names, so that some are rewritten, and prints name and SHA-256 once fsync has returned.
# The content is fresh randomness, summed before it goes to the filesystem. The file during which the kill comes is
# large: some of its writes have been acknowledged by then, and only a flush after the restart will cover them.
WRITER = """
mkdir -p /mnt/live/files
for i in $(seq {count}); do
    name=file-$((({start} + i) % 30))
    size=$((1 + i % 16)); [ $i = {strike} ] && size=256
    dd if=/dev/urandom of=/tmp/new bs=64k count=$size 2>/dev/null
    sum=$(sha256sum </tmp/new)
    echo "begin $name"
    dd if=/tmp/new of=/mnt/live/files/$name bs=64k conv=fsync 2>/tmp/dd.log || {{ cat /tmp/dd.log; exit 1; }}
    echo "fsynced $name ${{sum%% *}}"
done
"""


def run(world):
    chance = random.Random(world.seed)
    with world.rimrock(gib=8) as rimrock:
        with world.guest() as guest:
            for filesystem in ALL.values():
                with world.step(filesystem.name):
                    one_filesystem(world, rimrock, guest, filesystem, chance)
        rimrock.stop()


def one_filesystem(world, rimrock, guest, filesystem, chance):
    volume = f"scratch-{filesystem.name}"
    rimrock.create_volume(volume, gib=2)
    device = guest.attach(rimrock, volume)
    guest.run(f"{filesystem.make} {device} && mkdir -p /mnt/live && mount {device} /mnt/live")

    fsynced = {}
    for number in range(KILLS):
        strike = chance.randint(3, FILES_BEFORE_KILL)
        events = {"begun": 0, "after": 0, "killed": False}

        def on_line(line):
            kind, name, *digest = line.split()
            if kind == "begin":
                # From here until its fsync is reported, the file may hold the old bytes or the new ones.
                fsynced.pop(name, None)
                events["begun"] += 1
                if events["begun"] == strike:
                    time.sleep(chance.uniform(0, 0.8))
                    rimrock.kill()
                    events["killed"] = True
                    rimrock.start()
            elif kind == "fsynced":
                fsynced[name] = digest[0]
                events["after"] += events["killed"]

        with world.step(f"kill -9 while writing file {strike}"):
            script = WRITER.format(count=strike + FILES_AFTER, strike=strike, start=chance.randrange(30))
            guest.run(script, limit=150, on_line=on_line)
            check(events["after"] >= FILES_AFTER, "the guest did not go on writing after the restart")
            guest.run("umount /mnt/live")
            guest.run(f"{filesystem.check} {device} 2>&1")
            guest.run(f"mount {device} /mnt/live")
            intact(guest, fsynced)
    guest.run(f"umount /mnt/live && nvme disconnect-all")


def intact(guest, fsynced):
    listing = guest.run("echo 3 >/proc/sys/vm/drop_caches; cd /mnt/live/files && sha256sum *")
    found = {name: digest for digest, name in (line.split() for line in listing.splitlines())}
    lost = sorted(name for name, digest in fsynced.items() if found.get(name) != digest)
    check(not lost, f"{len(lost)} of {len(fsynced)} fsynced files are not intact: {' '.join(lost)}")
