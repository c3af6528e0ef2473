"""Two ways to one volume: the kernel's own multipath goes from one to the other under writes, and no byte is lost."""

import json
import random

from harness.guest import HOST_ADDRESS
from harness.paths import check
from harness.rimrock import ADDRESS, free_port

TITLE = "native multipath over two listeners: access states flip and a listener goes and comes back under verified writes"
LIMIT_S = 420
ROUNDS = 12
MIB = 1 << 20

# Writes a file of random data over and over at places that move on, and reads each back past the page cache. Any error
# ends it. It prints a line per round, and stops when /host/stop is there.
WRITER = """
round=0
while [ ! -e /host/stop ]; do
    place=$((round % 60))
    dd if=/dev/urandom of=/tmp/data.$place bs=64k count=16 2>/dev/null
    dd if=/tmp/data.$place of={device} bs=64k seek=$((place * 16)) oflag=direct 2>/tmp/dd.log || {{ cat /tmp/dd.log; exit 1; }}
    dd if={device} bs=64k skip=$((place * 16)) count=16 iflag=direct of=/tmp/back 2>/tmp/dd.log || {{ cat /tmp/dd.log; exit 1; }}
    cmp /tmp/data.$place /tmp/back || exit 1
    round=$((round + 1))
    echo "round $round"
done
"""

VERIFY = """
for place in $(seq 0 59); do
    [ -e /tmp/data.$place ] || continue
    dd if={device} bs=64k skip=$((place * 16)) count=16 iflag=direct of=/tmp/back 2>/dev/null
    cmp /tmp/data.$place /tmp/back || exit 1
done
"""


class Paths:
    """A subsystem that reports access states, on two ports."""

    def __init__(self, rimrock):
        self.rimrock = rimrock
        self.nqn = "nqn.2026-01.test.rimrock:failover"
        self.ports = [rimrock.port, free_port()]
        rimrock.create_volume("disk", gib=1)
        self.rpc("nvmf_create_subsystem", nqn=self.nqn, allow_any_host=True, ana_reporting=True)
        self.uuid = rimrock.add_namespace(self.nqn, "disk")
        for port in self.ports:
            self.listen(port)

    def rpc(self, method, **parameters):
        return self.rimrock.command("rpc", method, json.dumps(parameters))

    def address(self, port):
        return {"trtype": "TCP", "traddr": ADDRESS, "trsvcid": str(port)}

    def listen(self, port):
        self.rpc("nvmf_subsystem_add_listener", nqn=self.nqn, listen_address=self.address(port))

    def close(self, port):
        self.rpc("nvmf_subsystem_remove_listener", nqn=self.nqn, listen_address=self.address(port))

    def set(self, port, state):
        self.rpc("nvmf_subsystem_listener_set_ana_state", nqn=self.nqn, listen_address=self.address(port),
                 ana_state=state)


def run(world):
    chance = random.Random(world.seed)
    with world.rimrock(gib=4) as rimrock, world.guest() as guest:
        paths = Paths(rimrock)
        first, second = paths.ports
        found = guest.run(f"nvme discover -t tcp -a {HOST_ADDRESS} -s {first}")
        # It names the address on this side of QEMU's network, twice with different ports.
        check(found.count(f"subnqn:  {paths.nqn}\n") == 2, f"discovery does not show both ways:\n{found}")
        for port in paths.ports:
            guest.connect(paths.nqn, port)
        device = guest.block_device(paths.uuid)
        check(guest.run("cat /sys/module/nvme_core/parameters/multipath").strip() == "Y", "no native multipath")
        await_states(guest, ["optimized", "optimized"])
        controller = guest.run("ls -d /dev/nvme[0-9] | head -1").strip()
        log = guest.run(f"nvme ana-log {controller} -o json")
        check(len(json.loads(log)["ANA DESC LIST "]) == 1, f"the log has not one group: {log}")

        events = {"rounds": 0, "step": 0}

        def on_line(line):
            if not line.startswith("round "):
                return
            events["rounds"] += 1
            if events["rounds"] % 2 or events["step"] > ROUNDS:
                return
            step, events["step"] = events["step"], events["step"] + 1
            closed, open_ = (first, second) if step % 2 else (second, first)
            if step == ROUNDS:
                for port in paths.ports:
                    paths.set(port, "optimized")
                (world.share / "stop").touch()
            elif step % 6 == 4:
                # A listener goes altogether. Its address is there again some rounds later, and the kernel finds it.
                paths.set(open_, "optimized")
                paths.close(closed)
            elif step % 6 == 5:
                paths.listen(open_)
                paths.set(closed, "non_optimized")
            else:
                state = chance.choice(["inaccessible", "change", "non_optimized"])
                world.note(f"port {closed}: {state}")
                paths.set(open_, "optimized")
                paths.set(closed, state)

        with world.step("states flip and a listener goes and comes back under verified writes"):
            guest.run(WRITER.format(device=device), limit=240, on_line=on_line)
        check(events["step"] > ROUNDS, f"the guest ended after {events['step']} changes")
        with world.step("every byte, by each way alone"):
            await_states(guest, ["optimized", "optimized"])
            for closed in [None, first, second]:
                for port in paths.ports:
                    paths.set(port, "inaccessible" if port == closed else "optimized")
                guest.run(VERIFY.format(device=device))
        errors = guest.run("dmesg | grep -i 'I/O error' || true")
        check(not errors.strip(), f"the guest's kernel saw errors: {errors}")
        guest.run(f"nvme disconnect -n {paths.nqn}")
        rimrock.stop()


def await_states(guest, wanted):
    guest.run(f"""
        for _ in $(seq 150); do
            [ "$(cat /sys/block/nvme*c*n*/ana_state 2>/dev/null | sort | tr '\\n' ' ')" = "{' '.join(wanted)} " ] && exit 0
            sleep 0.2
        done
        grep . /sys/block/nvme*c*n*/ana_state /sys/class/nvme/nvme*/state /sys/class/nvme/nvme*/address
        exit 1
    """)
