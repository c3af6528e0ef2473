"""The I/O commands beyond reading and writing, as nvme-cli sends them through the kernel."""

import base64
import json

from harness.paths import check

TITLE = "compare, verify, copy, write zeroes, dataset management and the effects log by nvme-cli"
LIMIT_S = 300
KIB, MIB = 1 << 10, 1 << 20
CSUPP, LBCC = 1, 2
IO_COMMANDS = {0x00: CSUPP, 0x01: CSUPP | LBCC, 0x02: CSUPP, 0x05: CSUPP, 0x08: CSUPP | LBCC, 0x09: CSUPP | LBCC,
               0x0C: CSUPP, 0x19: CSUPP | LBCC}


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
    guest.connect(nqn, rimrock.port)
    device = guest.block_device(uuid)
    controller = device.rsplit("n", 1)[0]
    what_is_said(guest, device, controller, block_size)
    compare_and_verify(guest, device, block_size)
    copies(guest, device, block_size)
    zeroes(rimrock, guest, device, block_size)
    guest.run(f"nvme disconnect -n {nqn}")


def what_is_said(guest, device, controller, block_size):
    log = base64.b64decode(guest.run(f"nvme effects-log {controller} --raw-binary | base64"))
    check(len(log) == 4096, f"the effects log has {len(log)} bytes")
    effects = [int.from_bytes(log[at:at + 4], "little") for at in range(1024, 2048, 4)]
    for opcode, expected in IO_COMMANDS.items():
        check(effects[opcode] == expected, f"opcode {opcode:#x} has the effects {effects[opcode]:#x}")
    check(effects[0x04] == 0, "Write Uncorrectable is said to be there")
    check("Compare" in guest.run(f"nvme effects-log {controller}"), "nvme-cli does not show the effects log")
    id_ctrl = json.loads(guest.run(f"nvme id-ctrl {controller} -o json"))
    check(id_ctrl["oncs"] & 0x18D == 0x18D, f"ONCS is {id_ctrl['oncs']:#x}")
    check(id_ctrl["fuses"] == 1 and id_ctrl["ocfs"] == 3, f"FUSES {id_ctrl['fuses']}, OCFS {id_ctrl['ocfs']}")
    id_ns = json.loads(guest.run(f"nvme id-ns {device} -o json"))
    check(id_ns["mssrl"] == id_ns["mcl"] == MIB // block_size and id_ns["msrc"] == 127, f"copy limits: {id_ns}")


def compare_and_verify(guest, device, block_size):
    blocks = 64 * KIB // block_size
    place = f"--start-block=8 --block-count={blocks - 1}"
    guest.run(f"""
        head -c {64 * KIB} /dev/urandom >/tmp/data && cp /tmp/data /tmp/other
        printf '\\1\\2\\3\\4' | dd of=/tmp/other bs=1 seek={63 * KIB} conv=notrunc 2>/dev/null
        nvme write {device} {place} --data-size={64 * KIB} --data=/tmp/data
        nvme compare {device} {place} --data-size={64 * KIB} --data=/tmp/data
        nvme verify {device} {place} && nvme verify {device} --start-block=0 --block-count=65535
    """)
    status, said = guest.attempt(f"nvme compare {device} {place} --data-size={64 * KIB} --data=/tmp/other")
    check(status != 0 and "ompare" in said and "285" in said, f"compare of other data: {status}, {said}")
    last = (1 << 30) // block_size
    status, said = guest.attempt(f"nvme verify {device} --start-block={last - 1} --block-count=1")
    check(status != 0 and "LBA" in said, f"verify past the end: {status}, {said}")


def copies(guest, device, block_size):
    unit = 4 * KIB // block_size
    for form in [0, 1]:
        # The third 4 KiB of the data, then the first; to an overlapping place too.
        to = (2 * MIB + form * MIB) // block_size
        guest.run(f"""
            dd if=/tmp/data of={device} bs=64k seek=16 oflag=direct 2>/dev/null
            nvme copy {device} --format={form} --sdlba={to} \
                --slbs={256 * unit + 2 * unit},{256 * unit} --blocks={unit - 1},{unit - 1}
            dd if=/tmp/data bs=4k skip=2 count=1 2>/dev/null >/tmp/expected
            dd if=/tmp/data bs=4k count=1 2>/dev/null >>/tmp/expected
            dd if={device} bs=4k skip={512 + form * 256} count=2 iflag=direct 2>/dev/null | cmp - /tmp/expected
            nvme copy {device} --format={form} --sdlba={257 * unit} --slbs={256 * unit} --blocks={8 * unit - 1}
            dd if={device} bs=4k skip=257 count=8 iflag=direct 2>/dev/null >/tmp/back
            head -c {32 * KIB} /tmp/data | cmp - /tmp/back
        """)
    status, said = guest.attempt(
        f"nvme copy {device} --format=0 --sdlba=0 --slbs=1024 --blocks={MIB // block_size}")
    check(status != 0 and "183" in said, f"a copy beyond MSSRL: {status}, {said}")
    status, said = guest.attempt(f"nvme copy {device} --format=2 --sdlba=0 --slbs=1024 --blocks=0")
    check(status != 0, f"a copy with an unknown format: {said}")


def zeroes(rimrock, guest, device, block_size):
    guest.run(f"dd if=/dev/urandom of=/tmp/large bs=1M count=8 2>/dev/null"
              f" && dd if=/tmp/large of={device} bs=1M seek=16 oflag=direct 2>/dev/null && nvme flush {device}")
    allocated = rimrock.allocated()
    at = lambda mib: mib * MIB // block_size
    guest.run(f"""
        nvme write-zeroes {device} --start-block={at(17)} --block-count={at(2) - 1} --deac
        nvme write-zeroes {device} --start-block={at(20)} --block-count={at(1) - 1} --force-unit-access
        nvme dsm {device} --ad --slbs={at(22)} --blocks={at(1)}
        for mib in 1 2 4 6; do dd if=/dev/zero of=/tmp/large bs=1M count=1 seek=$mib conv=notrunc 2>/dev/null; done
        dd if={device} bs=1M skip=16 count=8 iflag=direct 2>/dev/null | cmp - /tmp/large
    """)
    given_back = allocated - rimrock.allocated()
    check(given_back >= 4 * MIB, f"only {given_back} bytes were given back")
