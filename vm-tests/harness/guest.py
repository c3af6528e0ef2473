"""One QEMU guest, driven from the host.

A scenario is a story told on the host: `guest.run("mkfs.xfs …")`, then a snapshot, then the guest again. The
agent in the guest runs one script at a time; its output streams back over a virtio serial port, so a line printed
after an fsync has reached the host's memory before the next one is written. The console goes to a file of its own.
"""

import base64
import contextlib
import re
import shlex
import shutil
import socket
import tempfile
import time
from pathlib import Path

from . import image, process
from .paths import Failure

MEMORY_MIB = 1024
BOOT_LIMIT_S = 120
SCRIPT_LIMIT_S = 60
HOST_ADDRESS = "10.0.2.2"
TROUBLE = re.compile(r"BUG:|Oops|Call Trace|WARNING: CPU|Kernel panic|blocked for more than")


class Unanswered(Failure):
    """The guest is there, and silent."""


class Guest:
    """A running guest whose /host is `share`, read-only. Use as a context manager.

    `disk` is a disk of the harness, seen as /dev/vda; `programs` are copied to its /bin.
    """

    def __init__(self, series, share, logs, disk=None, programs=()):
        self.console = Path(logs) / "console.log"
        self.transcript = open(Path(logs) / "guest.log", "a", buffering=1)
        # A socket's path must be short, so it does not lie with the logs.
        self.runtime = tempfile.mkdtemp(prefix="rimrock-vm-")
        self.requests = 0
        self.pending = b""
        self.link = None
        home = image.kernel(series)
        initramfs = image.initramfs(home)
        if programs:
            initramfs = image.with_programs(initramfs, programs, Path(self.runtime) / "initramfs.cpio")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.runtime + "/agent")
        self.listener.listen(1)
        self.process = process.spawn([
            image.which("qemu-system-x86_64"), "-nodefaults", "-no-reboot", "-display", "none",
            "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(MEMORY_MIB),
            "-kernel", str(image.vmlinuz(home)), "-initrd", str(initramfs),
            "-append", "console=ttyS0 panic=-1 mitigations=off nokaslr no_timer_check tsc=reliable"
                       " random.trust_cpu=on loglevel=5",
            "-serial", f"file:{self.console}",
            "-device", "virtio-rng-pci",
            "-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile=",
            "-fsdev", f"local,id=share,path={share},security_model=none,readonly=on",
            "-device", "virtio-9p-pci,fsdev=share,mount_tag=host",
            "-device", "virtio-serial-pci", "-chardev", f"socket,id=agent,path={self.runtime}/agent",
            "-device", "virtserialport,chardev=agent,name=agent",
            *(disk_options(disk) if disk else []),
        ], log=Path(logs) / "qemu.log")
        try:
            self._meet_agent()
        except BaseException:
            self.close()
            raise

    def _meet_agent(self):
        deadline = time.monotonic() + BOOT_LIMIT_S
        self.listener.settimeout(BOOT_LIMIT_S)
        self.link, _ = self.listener.accept()
        while self._read_line(deadline) != "\x1ehello":
            pass

    def run(self, script, limit=120, on_line=None):
        """Run a shell script in the guest and return its output; a non-zero exit or `limit` seconds fail.

        `on_line` is called with each line as it arrives.
        """
        status, output = self.attempt(script, limit, on_line)
        if status != 0:
            first, *_ = script.strip().splitlines()
            raise Failure(f"in the guest, `{first}` ended with {status}: " + " | ".join(output.splitlines()[-3:]))
        return output

    def attempt(self, script, limit=120, on_line=None):
        """Like `run`, for what may fail: returns (exit status, output)."""
        self.requests += 1
        self.transcript.write(f"# {script.strip()}\n")
        self.link.sendall(b"%d %s\n" % (self.requests, base64.b64encode(script.encode())))
        lines = []
        deadline = time.monotonic() + limit
        while True:
            line = self._read_line(deadline)
            self.transcript.write(line.lstrip("\x1e") + "\n")
            # The marker follows a partial last line directly.
            text, marker, ending = line.partition("\x1e")
            if text or not marker:
                lines.append(text)
                if on_line:
                    on_line(text)
            if marker:
                number, status = ending.split()
                if int(number) == self.requests:
                    return int(status), "\n".join(lines)

    def _read_line(self, deadline):
        while b"\n" not in self.pending:
            self.link.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                received = self.link.recv(65536)
            except TimeoutError:
                raise Unanswered("the guest did not answer in time") from None
            if not received:
                raise Failure("the guest is gone (see its console)")
            self.pending += received
        line, self.pending = self.pending.split(b"\n", 1)
        return line.decode(errors="replace").rstrip("\r")

    def connect(self, nqn, port):
        """Connect the guest's kernel to `nqn` at the host. It reconnects every second for two minutes."""
        self.run(f"nvme connect -t tcp -a {HOST_ADDRESS} -s {port} -n {shlex.quote(nqn)}"
                 " --nr-io-queues=2 --reconnect-delay=1 --ctrl-loss-tmo=120 --keep-alive-tmo=5")

    def attach(self, rimrock, name, read_only=False):
        """Export `name` of `rimrock`, connect to it and return its device."""
        nqn, uuid = rimrock.export(name, read_only)
        self.connect(nqn, rimrock.port)
        return self.block_device(uuid)

    def block_device(self, uuid):
        """Wait for the namespace with this UUID and return its device, such as /dev/nvme0n1."""
        return self.run(f"find-namespace {uuid}").strip()

    def run_until_cut(self, script, seconds, on_line):
        """Run a script that never ends, kill QEMU `seconds` after its first line, and give every line that came out."""
        self.requests += 1
        self.transcript.write(f"# {script.strip()}\n")
        self.link.sendall(b"%d %s\n" % (self.requests, base64.b64encode(script.encode())))
        on_line(self._read_line(time.monotonic() + SCRIPT_LIMIT_S))
        end = time.monotonic() + seconds
        try:
            while (now := time.monotonic()) < end:
                self.link.settimeout(end - now)
                try:
                    on_line(self._read_line(end))
                except Unanswered:
                    break
        finally:
            self.process.kill()
            self.process.wait()
        # What it sent before it died was heard.
        self.link.settimeout(1)
        with contextlib.suppress(OSError):
            while received := self.link.recv(65536):
                self.pending += received
        *lines, _ = self.pending.split(b"\n")
        for line in lines:
            on_line(line.decode(errors="replace").rstrip("\r"))

    def trouble(self):
        """Console lines that show the guest's kernel in trouble."""
        text = self.console.read_text(errors="replace") if self.console.exists() else ""
        return [line for line in text.splitlines() if TROUBLE.search(line)]

    def close(self):
        process.end(self.process)
        for thing in (self.link, self.listener, self.transcript):
            if thing:
                thing.close()
        shutil.rmtree(self.runtime, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def disk_options(disk):
    """QEMU's options for a disk of the harness: nothing between the guest's driver and the disk caches anything."""
    return ["-blockdev", f"driver=nbd,node-name=disk,server.type=unix,server.path={disk.address},"
                         "discard=unmap,cache.direct=on,cache.no-flush=off",
            "-device", "virtio-blk-pci,drive=disk,write-cache=on,discard=on,write-zeroes=on,serial=forgets"]
