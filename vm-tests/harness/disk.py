"""A disk that forgets: an NBD server for QEMU whose write cache is lost at a power cut.

What the guest wrote and did not flush lies in the cache. `cut()` decides by chance what of it had reached the medium:
any of those writes, in any order, and of a write any of its sectors. What was flushed is there. A write may also be
answered late, after younger ones: a flush that was asked for before that answer does not cover it.

    guest ── virtio-blk ── QEMU ── NBD ──▶ view (what reads see)
                                           cache: answered, not flushed   ── flush, or chance at a cut ──▶ medium
"""

import os
import mmap
import select
import socket
import struct
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from .paths import Failure

SECTOR = 512
EXPORT_FLAGS = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6  # flags present, FLUSH, FUA, TRIM, WRITE_ZEROES
READ, WRITE, DISCONNECT, FLUSH, TRIM, WRITE_ZEROES = 0, 1, 2, 3, 4, 6
COMMAND_FUA = 1
OPTION_EXPORT_NAME, OPTION_ABORT, OPTION_GO = 1, 2, 7
OPTION_MAGIC, OPTION_REPLY_MAGIC = 0x49484156454F5054, 0x3E889045565A9
REQUEST_MAGIC, REPLY_MAGIC = 0x25609513, 0x67446698
LATE = 0.1  # of the writes, how many are answered late


@dataclass
class Write:
    offset: int
    data: bytes

    def overlaps(self, other):
        return self.offset < other.offset + len(other.data) and other.offset < self.offset + len(self.data)


class Disk:
    """A disk of `mib` MiB whose medium is a sparse file in `home`. Use as a context manager."""

    def __init__(self, home, mib, chance):
        self.size = mib << 20
        self.chance = chance
        self.medium_file = Path(home) / "medium.img"
        self.medium = sparse(self.medium_file, self.size)
        self.view = sparse(Path(home) / "view.img", self.size)
        self.cache = []
        self.late = []
        self.runtime = tempfile.mkdtemp(prefix="rimrock-vm-")
        self.address = self.runtime + "/disk"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.address)
        self.listener.listen(1)
        self.error = None
        self.flushes = 0
        self.thread = None
        self.serve()

    def serve(self):
        """Wait for the next QEMU."""
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def cut(self):
        """QEMU was killed: lose what a disk may lose. Returns a line about it."""
        self.thread.join(10)
        if self.thread.is_alive():
            raise Failure("the disk's server still has a connection")
        if self.error:
            raise Failure(f"the disk's server stopped: {self.error}")
        unflushed = self.cache + [write for _, write in self.late]
        self.cache, self.late = [], []
        kept = self._lose(unflushed)
        for write in unflushed:
            place = slice(write.offset, write.offset + len(write.data))
            self.view[place] = self.medium[place]
        flushes, self.flushes = self.flushes, 0
        self.serve()
        return f"{flushes} flushes before; of {len(unflushed)} unflushed writes {kept}"

    def _lose(self, writes):
        mood = self.chance.choice(["nothing stays", "all stays", "the oldest stay", "some stay", "most stay"])
        if mood == "the oldest stay":
            length = self.chance.randint(0, len(writes))
            writes, torn, share = writes[:length], writes[length:length + 1], 1
        else:
            torn = []
            share = {"nothing stays": 0, "all stays": 1, "some stay": 0.3, "most stay": 0.9}[mood]
        tear = 0 if mood in ["nothing stays", "all stays"] else 0.2
        for write in writes:
            if self.chance.random() < share:
                self._apply(write, torn=self.chance.random() < tear)
        for write in torn:
            self._apply(write, torn=True)
        return mood

    def _apply(self, write, torn=False):
        """Bring a write to the medium; a torn one only some sectors of."""
        if not torn:
            self.medium[write.offset:write.offset + len(write.data)] = write.data
            return
        # Whole blocks or single sectors are lost: both are seen.
        unit = self.chance.choice([SECTOR, 8 * SECTOR])
        for at in range(0, len(write.data), unit):
            if self.chance.random() < 0.5:
                part = write.data[at:at + unit]
                self.medium[write.offset + at:write.offset + at + len(part)] = part

    def _serve(self):
        try:
            link, _ = self.listener.accept()
            with link:
                self._negotiate(link)
                while self._request(link):
                    pass
        except (ConnectionError, EOFError):
            pass  # QEMU was killed
        except Exception as error:
            self.error = repr(error)

    def _negotiate(self, link):
        # Fixed newstyle; no zeroes after the export's flags.
        link.sendall(b"NBDMAGIC" + struct.pack(">QH", OPTION_MAGIC, 3))
        receive(link, 4)
        while True:
            magic, option, length = struct.unpack(">QII", receive(link, 16))
            data = receive(link, length)
            if magic != OPTION_MAGIC:
                raise ValueError("not an NBD client")
            export = struct.pack(">QH", self.size, EXPORT_FLAGS)
            if option == OPTION_EXPORT_NAME:
                link.sendall(export)
                return
            if option == OPTION_GO:
                reply(link, option, 3, struct.pack(">H", 0) + export)
                # Block sizes: smallest, preferred, largest.
                reply(link, option, 3, struct.pack(">HIII", 3, SECTOR, 4096, 32 << 20))
                reply(link, option, 1)
                return
            if option == OPTION_ABORT:
                reply(link, option, 1)
                raise EOFError
            reply(link, option, 1 << 31 | 1, data[:0])  # unsupported

    def _request(self, link):
        # An idle guest waits for its late answers.
        if self.late and not select.select([link], [], [], 0.001)[0]:
            self._answer_late(link)
        magic, flags, command, handle, offset, length = struct.unpack(">IHHQQI", receive(link, 28))
        data = receive(link, length) if command == WRITE else b""
        if magic != REQUEST_MAGIC:
            raise ValueError("a request without magic")
        if command == DISCONNECT:
            return False
        if command not in (READ, WRITE, FLUSH, TRIM, WRITE_ZEROES) or offset + length > self.size:
            answer(link, handle, error=22)
            return True
        if command == READ:
            answer(link, handle, self.view[offset:offset + length])
        elif command == FLUSH:
            self.flushes += 1
            self._flush()
            answer(link, handle)
        else:
            write = Write(offset, data if command == WRITE else bytes(length))
            if any(write.overlaps(other) for _, other in self.late):
                # Two writes of one place at a time have no order, but what reads see and the medium agree.
                self._answer_late(link)
            self.view[offset:offset + length] = write.data
            if flags & COMMAND_FUA:
                self.cache.append(write)
                self._flush()
                answer(link, handle)
            elif self.chance.random() < LATE:
                self.late.append((handle, write))
            else:
                self.cache.append(write)
                answer(link, handle)
        if self.late and self.chance.random() < 0.3:
            self._answer_late(link)
        return True

    def _flush(self):
        for write in self.cache:
            self._apply(write)
        self.cache = []

    def _answer_late(self, link):
        self.chance.shuffle(self.late)
        for handle, write in self.late:
            self.cache.append(write)
            answer(link, handle)
        self.late = []

    def close(self):
        self.listener.close()
        Path(self.address).unlink()
        os.rmdir(self.runtime)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def sparse(path, size):
    with open(path, "w+b") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)


def receive(link, length):
    data = bytearray()
    while len(data) < length:
        part = link.recv(length - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def reply(link, option, kind, data=b""):
    link.sendall(struct.pack(">QIII", OPTION_REPLY_MAGIC, option, kind, len(data)) + data)


def answer(link, handle, data=b"", error=0):
    link.sendall(struct.pack(">IIQ", REPLY_MAGIC, error, handle) + data)
