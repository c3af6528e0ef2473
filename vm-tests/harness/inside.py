"""A Rimrock inside the guest, on the guest's disk, with the guest's own kernel as its initiator."""

import json
import shlex

from . import rimrock
from .paths import Failure, check

START_LIMIT_S = 60
CONFIGURATION = """\
[reactor]
cores = [0]
[target]
listen = "127.0.0.1:4420"
[[device]]
name = "disk"
uri = "uring:/dev/vda"
[[pool]]
name = "models"
devices = ["disk"]
create = {create}
"""


class Inside:
    SOCKET = "/run/rimrock.sock"

    def __init__(self, guest):
        self.guest = guest

    @staticmethod
    def binary():
        return rimrock.binary()

    def start(self, create=False):
        """Start the daemon; returns the seconds until it answered, with its pool open."""
        configuration = CONFIGURATION.format(create=str(create).lower())
        took = self.guest.run(f"""
            mkdir -p /dev/shm && mount -t tmpfs tmpfs /dev/shm
            echo {shlex.quote(configuration)} >/tmp/rimrock.toml
            began=$(cut -d' ' -f1 /proc/uptime)
            rimrock --socket {self.SOCKET} serve --config /tmp/rimrock.toml >/tmp/rimrock.log 2>&1 &
            echo $! >/tmp/rimrock.pid
            until rimrock --socket {self.SOCKET} -o json rpc spdk_get_version >/dev/null 2>&1; do
                kill -0 $(cat /tmp/rimrock.pid) || {{ cat /tmp/rimrock.log; exit 1; }}
                sleep 0.1
            done
            echo $began $(cut -d' ' -f1 /proc/uptime)
        """, limit=START_LIMIT_S)
        began, ended = (float(word) for word in took.split()[-2:])
        return ended - began

    def command(self, *arguments):
        """Run `rimrock ARGUMENTS` in the guest and return its JSON answer."""
        words = " ".join(shlex.quote(word) for word in arguments)
        status, text = self.guest.attempt(f"rimrock --socket {self.SOCKET} -o json {words}")
        if status != 0:
            log = self.guest.attempt("tail -n 20 /tmp/rimrock.log")[1]
            raise Failure(f"rimrock {words} ended with {status}: {text.strip()}\n{log}")
        return json.loads(text) if text.strip() else None

    def create_volume(self, name, mib, write_cache):
        options = [] if write_cache else ["--no-write-cache"]
        self.command("volume", "create", name, f"{mib}MiB", *options)

    @staticmethod
    def nqn(name):
        # Of a snapshot's name, `@` is not for an NQN.
        return "nqn.2026-01.test.rimrock:" + name.replace("@", ".")

    def attach(self, name):
        """The guest's device for a volume or snapshot; exported and connected at first use."""
        nqn = self.nqn(name)
        kind = "snapshot" if "@" in name else "volume"
        uuid = self.command(kind, "show", name)["uuid"]
        found = self.guest.run(f"grep -lx {uuid} /sys/block/nvme*n*/uuid 2>/dev/null || true").split()
        if not found:
            self.command("volume", "export", name, "--nqn", nqn, "--listen", "127.0.0.1:4420")
            self.guest.run(f"nvme connect -t tcp -a 127.0.0.1 -s 4420 -n {shlex.quote(nqn)} --nr-io-queues=2")
        return self.guest.block_device(uuid)

    def snapshots(self):
        return self.command("snapshot", "list")

    def delete_snapshot(self, name):
        self.guest.run(f"nvme disconnect -n {shlex.quote(self.nqn(name))}")
        if self.command("snapshot", "show", name).get("exports"):
            self.command("volume", "unexport", name)
        self.command("snapshot", "delete", name)

    def healthy(self):
        """The pool found nothing wrong with itself."""
        pool = self.command("pool", "show", "models")
        check(pool["health"] == "ok", f"the pool is {pool['health']}: {pool.get('damage')}")

    def stop(self):
        """As an administrator would; anything but a clean exit fails."""
        self.guest.run("""
            nvme disconnect-all
            kill $(cat /tmp/rimrock.pid)
            for _ in $(seq 200); do kill -0 $(cat /tmp/rimrock.pid) 2>/dev/null || exit 0; sleep 0.1; done
            echo "rimrock does not stop"; cat /tmp/rimrock.log; exit 1
        """)
