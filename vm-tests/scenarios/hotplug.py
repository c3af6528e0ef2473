"""Namespaces come, go and grow under a host's I/O; then connects, disconnects and resets by the dozen."""

import json

from harness.paths import check

TITLE = "add, remove and resize under I/O, 100 rounds of connect and disconnect, a storm of resets"
LIMIT_S = 540
CHANGES = 8
CONNECTS = 100
RESETS = 30

# Writes and reads back until /host/stop is there; any error ends it.
WORKER = """
round=0
while [ ! -e /host/{stop} ]; do
    dd if=/dev/urandom of=/tmp/data bs=64k count=16 2>/dev/null
    dd if=/tmp/data of={device} bs=64k seek=$((round % 30 * 16)) oflag=direct 2>/tmp/dd.log || {{ cat /tmp/dd.log; exit 1; }}
    dd if={device} bs=64k skip=$((round % 30 * 16)) count=16 iflag=direct of=/tmp/back 2>/tmp/dd.log || {{ cat /tmp/dd.log; exit 1; }}
    cmp /tmp/data /tmp/back || exit 1
    round=$((round + 1))
    echo "round $round"
done
"""


def run(world):
    with world.rimrock(gib=4) as rimrock, world.guest() as guest:
        rimrock.create_volume("steady", gib=1)
        nqn, uuid = rimrock.export("steady")
        guest.connect(nqn, rimrock.port)
        device = guest.block_device(uuid)
        with world.step("namespaces come, go and grow beside one that is written to"):
            come_and_go(world, rimrock, guest, nqn, device)
        with world.step(f"{RESETS} resets under writes"):
            controller = device.rsplit("n", 1)[0]
            guest.run(f"""
                head -c {32 << 20} /dev/urandom >/tmp/data
                ( dd if=/tmp/data of={device} bs=64k oflag=direct 2>/tmp/dd.log; echo $? >/tmp/status ) &
                for _ in $(seq {RESETS}); do nvme reset {controller} || exit 1; done
                wait
                [ "$(cat /tmp/status)" = 0 ] || {{ cat /tmp/dd.log; exit 1; }}
                dd if={device} bs=1M count=32 iflag=direct of=/tmp/back 2>/dev/null && cmp /tmp/data /tmp/back
            """, limit=240)
        guest.run(f"nvme disconnect -n {nqn}")
        with world.step(f"{CONNECTS} rounds of connect and disconnect"):
            guest.run(f"""
                for _ in $(seq {CONNECTS}); do
                    nvme connect -t tcp -a 10.0.2.2 -s {rimrock.port} -n {nqn} --nr-io-queues=2 || exit 1
                    nvme disconnect -n {nqn} >/dev/null || exit 1
                done
            """, limit=300)
            left = rimrock.command("rpc", "nvmf_subsystem_get_controllers", json.dumps({"nqn": nqn}))
            check(left == [], f"controllers are left: {left}")
        rimrock.stop()


def come_and_go(world, rimrock, guest, nqn, device):
    state = {"rounds": 0, "change": 0, "nsid": None, "gib": 1}

    def on_line(line):
        if not line.startswith("round "):
            return
        state["rounds"] += 1
        if state["rounds"] % 2:
            return
        state["change"] += 1
        if state["change"] > CHANGES:
            (world.share / "stop-hotplug").touch()
        elif state["nsid"] is None:
            name = f"extra-{state['change']}"
            rimrock.create_volume(name, gib=1)
            state["nsid"] = rimrock.command("rpc", "nvmf_subsystem_add_ns", json.dumps(
                {"nqn": nqn, "namespace": {"bdev_name": rimrock.uuid(name)}}))
        else:
            rimrock.command("rpc", "nvmf_subsystem_remove_ns", json.dumps({"nqn": nqn, "nsid": state["nsid"]}))
            state["nsid"] = None
            state["gib"] += 1
            rimrock.resize("steady", gib=state["gib"])

    guest.run(WORKER.format(device=device, stop="stop-hotplug"), limit=240, on_line=on_line)
    check(state["change"] > CHANGES, f"the guest ended after {state['change']} changes")
    guest.run(f"""
        for _ in $(seq 50); do
            [ $(blockdev --getsize64 {device}) = {state["gib"] << 30} ] && [ $(ls /sys/block | grep -c '^nvme[0-9]*n') = 1 ] && exit 0
            sleep 0.2
        done
        blockdev --getsize64 {device}; ls /sys/block; exit 1
    """)
