"""Console of a container: merges the output of ranks into one stream, each line with its rank.

    rank 3 | a line, or the last piece of one
    rank 3 ~ a piece of a line that has no end yet: the same rank's next piece continues it

Lines of different ranks never mix. What has no newline for a second, or is longer than a piece may
be, is written as a piece, so that a progress bar or a question is seen. Nothing here blocks: when
the reader of our output is slow, the ranks' pipes fill up, and the ranks wait, not the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import time
from dataclasses import dataclass, field
from typing import Final

from flyer.job.failure import TAIL_BYTES_MAX

__all__ = ["Console"]

PIECE_BYTES_MAX: Final = 8 * 1024  # below the piece that container runtimes cut lines into
PIECE_SECONDS: Final = 1.0
UNSENT_BYTES_MAX: Final = 1024 * 1024
READ_BYTES: Final = 64 * 1024
PIPE_BYTES: Final = 1024 * 1024


@dataclass(slots=True)
class _Stream:
    rank: int
    buffer: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    """The end of all that it wrote, for the traceback in it."""
    waiting_since: float = 0.0


class Console:
    """Collects the ranks' pipes and writes to one descriptor."""

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor
        self._streams: dict[int, _Stream] = {}
        self._tails: dict[int, bytearray] = {}
        self._unsent = bytearray()
        self.bytes_read = 0
        os.set_blocking(descriptor, False)

    def open(self, rank: int) -> int:
        """The writing end of a pipe for the rank; close it here once the rank has it."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_end, False)
        with contextlib.suppress(OSError):  # a user may own only so many pages of pipes
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        stream = _Stream(rank)
        self._streams[read_end] = stream
        self._tails[rank] = stream.tail
        return write_end

    def say(self, text: str) -> None:
        """A line of the launcher's own, without a rank."""
        self._unsent += text.encode(errors="replace")
        if not text.endswith("\n"):
            self._unsent += b"\n"
        self._send()

    def tail(self, rank: int) -> str:
        """The end of what a rank wrote."""
        return self._tails.get(rank, bytearray()).decode(errors="replace")

    def events(self) -> dict[int, int]:
        """What to poll for."""
        wanted = {self._descriptor: select.POLLOUT} if self._unsent else {}
        if len(self._unsent) < UNSENT_BYTES_MAX:
            wanted |= dict.fromkeys(self._streams, select.POLLIN)
        return wanted

    def due(self) -> float | None:
        """When a piece has waited long enough, in `time.monotonic()`."""
        waiting = [value.waiting_since for value in self._streams.values() if value.buffer]
        return min(waiting) + PIECE_SECONDS if waiting else None

    def take(self, ready: dict[int, int]) -> None:
        """Move what is there; `ready` as `poll` gave it."""
        for descriptor in ready.keys() & self._streams.keys():
            self._read(descriptor)
        now = time.monotonic()
        for stream in self._streams.values():
            if stream.buffer and now >= stream.waiting_since + PIECE_SECONDS:
                self._emit(stream.rank, bytes(stream.buffer), whole=False)
                stream.buffer.clear()
        self._send()

    def drain(self, seconds: float) -> None:
        """What the ranks left in their pipes, then all that is unsent; bounded in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (self._streams or self._unsent):
            before = self.bytes_read, len(self._unsent)
            for descriptor in list(self._streams):
                if len(self._unsent) < UNSENT_BYTES_MAX:
                    self._read(descriptor)
            self._send()
            if (self.bytes_read, len(self._unsent)) == before:
                if not self._unsent:
                    break  # a process that still holds a pipe is not a rank
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll(100)
        for stream in self._streams.values():
            if stream.buffer:
                self._emit(stream.rank, bytes(stream.buffer), whole=True)
                stream.buffer.clear()
        self._send()

    def _read(self, descriptor: int) -> None:
        stream = self._streams[descriptor]
        try:
            received = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            del self._streams[descriptor]
            os.close(descriptor)
            if stream.buffer:
                self._emit(stream.rank, bytes(stream.buffer), whole=True)
            return
        self.bytes_read += len(received)
        stream.tail += received
        del stream.tail[:-TAIL_BYTES_MAX]
        *lines, rest = bytes(stream.buffer + received).split(b"\n")
        for line in lines:
            self._emit(stream.rank, line, whole=True)
        while len(rest) >= PIECE_BYTES_MAX:
            self._emit(stream.rank, rest[:PIECE_BYTES_MAX], whole=False)
            rest = rest[PIECE_BYTES_MAX:]
        if rest and (lines or not stream.buffer):
            stream.waiting_since = time.monotonic()
        stream.buffer[:] = rest

    def _emit(self, rank: int, text: bytes, *, whole: bool) -> None:
        while len(text) > PIECE_BYTES_MAX:
            self._unsent += b"rank %d ~ %b\n" % (rank, text[:PIECE_BYTES_MAX])
            text = text[PIECE_BYTES_MAX:]
        self._unsent += b"rank %d %b %b\n" % (rank, b"|" if whole else b"~", text)

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._descriptor, self._unsent[:READ_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the reader is gone; the ranks continue
