"""What a Linux host does with a namespace, one thing after another, in both block sizes."""

from harness.guest import HOST_ADDRESS
from harness.paths import check

TITLE = "discovery, identify, log pages, data, discard, write zeroes, flush, reset and resize by the kernel's initiator"
LIMIT_S = 300
MIB = 1 << 20


def run(world):
    with world.rimrock(gib=4) as rimrock, world.guest() as guest:
        for block_size in [4096, 512]:
            with world.step(f"blocks of {block_size} bytes"):
                one_format(rimrock, guest, block_size)
        rimrock.stop()


def one_format(rimrock, guest, block_size):
    volume = f"disk-{block_size}"
    rimrock.create_volume(volume, gib=1, block_size=block_size)
    nqn, uuid = rimrock.export(volume)
    found = guest.run(f"nvme discover -t tcp -a {HOST_ADDRESS} -s {rimrock.port}")
    check(f"subnqn:  {nqn}\n" in found, f"discovery does not show {nqn}:\n{found}")

    guest.connect(nqn, rimrock.port)
    device = guest.block_device(uuid)
    controller = device.rsplit("n", 1)[0]
    geometry = guest.run(f"blockdev --getss {device}; blockdev --getsize64 {device}").split()
    check(geometry == [str(block_size), str(1 << 30)], f"{device} has block size and size {geometry}")
    # Each ends with the status of the command.
    for command in ["id-ctrl", "smart-log", "error-log", "fw-log", "effects-log", "changed-ns-list-log"]:
        guest.run(f"nvme {command} {controller}")
    for command in ["id-ns", "ns-descs", "flush", "list-subsys"]:
        guest.run(f"nvme {command} {device}")
    guest.run(f"nvme list-ns {controller} && nvme get-feature {controller} --feature-id=7")

    # Data at an offset that is aligned to nothing but the block, in commands of many sizes.
    guest.run(f"""
        head -c {8 * MIB} /dev/urandom >/tmp/data
        for blocks in 1 3 8 100 1000 2047; do
            dd if=/tmp/data of={device} bs={block_size} count=$blocks seek=$((blocks * 3)) oflag=direct conv=fsync
            dd if={device} bs={block_size} count=$blocks skip=$((blocks * 3)) iflag=direct of=/tmp/back
            head -c $((blocks * {block_size})) /tmp/data | cmp - /tmp/back || exit 1
        done 2>/tmp/dd.log || {{ cat /tmp/dd.log; exit 1; }}
        dd if=/tmp/data of={device} bs=1M count=8 oflag=direct && dd if={device} bs=1M count=8 iflag=direct of=/tmp/back
        cmp /tmp/data /tmp/back
    """)
    # Discard and write zeroes in the middle; their neighbours stay.
    allocated = rimrock.allocated()
    for command in [f"blkdiscard -o {2 * MIB} -l {MIB}", f"blkdiscard -z -o {4 * MIB} -l {MIB}"]:
        guest.run(f"/usr/sbin/{command} {device}")
    check(rimrock.allocated() < allocated, "discard and write zeroes gave no space back")
    guest.run(f"""
        dd if=/dev/zero of=/tmp/data bs=1M count=1 seek=2 conv=notrunc 2>/dev/null
        dd if=/dev/zero of=/tmp/data bs=1M count=1 seek=4 conv=notrunc 2>/dev/null
        dd if={device} bs=1M count=8 iflag=direct of=/tmp/back 2>/dev/null && cmp /tmp/data /tmp/back
    """)
    # A reset under load: the kernel sends again what was in flight.
    guest.run(f"""
        dd if=/tmp/data of={device} bs=64k seek=1024 oflag=direct 2>/tmp/dd.log & writer=$!
        nvme reset {controller} && wait $writer || {{ cat /tmp/dd.log; exit 1; }}
        dd if={device} bs=64k skip=1024 count=128 iflag=direct of=/tmp/back 2>/dev/null && cmp /tmp/data /tmp/back
    """)
    # The kernel hears of a new size through an asynchronous event.
    rimrock.resize(volume, gib=2)
    guest.run(f"""
        for _ in $(seq 50); do [ $(blockdev --getsize64 {device}) = {2 << 30} ] && exit 0; sleep 0.1; done
        echo "the new size did not arrive"; exit 1
    """)
    # And of a new namespace likewise: a snapshot, which cannot be written.
    rimrock.snapshot(volume, "now")
    snapshot = guest.block_device(rimrock.add_namespace(nqn, f"{volume}@now"))
    guest.run(f"cmp -n {8 * MIB} {device} {snapshot} && [ $(blockdev --getro {snapshot}) = 1 ]")
    guest.run(f"nvme disconnect -n {nqn}")
