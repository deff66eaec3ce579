"""Console of a container: merges the output of ranks into one stream, each line with its rank.

    rank 3 | a whole line, or the last piece of one
    rank 3 ~ a piece of an unfinished line: the same rank's next piece continues it

Lines of different ranks never mix. Output without a newline for a second, or longer than a piece,
is written as a piece, so that progress bars and prompts appear. Nothing here blocks: when the
reader of the container's output is slow, the pipes fill up and block the ranks, not the launcher.
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

PIECE_BYTES_MAX: Final = 8 * 1024  # below the length at which container runtimes split lines
PIECE_SECONDS: Final = 1.0
UNSENT_BYTES_MAX: Final = 1024 * 1024
READ_BYTES: Final = 64 * 1024
PIPE_BYTES: Final = 1024 * 1024


@dataclass(slots=True)
class _Stream:
    rank: int
    buffer: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    """The end of the rank's output, for the traceback in it."""
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
        with contextlib.suppress(OSError):  # the kernel limits a user's pipe pages
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        stream = _Stream(rank)
        self._streams[read_end] = stream
        self._tails[rank] = stream.tail
        return write_end

    def write_line(self, text: str) -> None:
        """Write a line of the launcher, without a rank."""
        self._unsent += text.encode(errors="replace")
        if not text.endswith("\n"):
            self._unsent += b"\n"
        self._send()

    def tail(self, rank: int) -> str:
        """The end of a rank's output."""
        return self._tails.get(rank, bytearray()).decode(errors="replace")

    def events(self) -> dict[int, int]:
        """The descriptors to poll, with their events."""
        masks = {self._descriptor: select.POLLOUT} if self._unsent else {}
        if len(self._unsent) < UNSENT_BYTES_MAX:
            masks |= dict.fromkeys(self._streams, select.POLLIN)
        return masks

    def due(self) -> float | None:
        """When to write the next unfinished line, in `time.monotonic()`."""
        waiting = [value.waiting_since for value in self._streams.values() if value.buffer]
        return min(waiting) + PIECE_SECONDS if waiting else None

    def take(self, ready: dict[int, int]) -> None:
        """Read and write without blocking; `ready` is the result of `poll`."""
        for descriptor in ready.keys() & self._streams.keys():
            self._read(descriptor)
        now = time.monotonic()
        for stream in self._streams.values():
            if stream.buffer and now >= stream.waiting_since + PIECE_SECONDS:
                self._emit(stream.rank, bytes(stream.buffer), whole=False)
                stream.buffer.clear()
        self._send()

    def drain(self, seconds: float) -> None:
        """Drain the ranks' pipes, then write everything unsent, within a time limit."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (self._streams or self._unsent):
            before = self.bytes_read, len(self._unsent)
            for descriptor in list(self._streams):
                if len(self._unsent) < UNSENT_BYTES_MAX:
                    self._read(descriptor)
            self._send()
            if (self.bytes_read, len(self._unsent)) == before:
                if not self._unsent:
                    break  # the remaining writer is not a rank
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
            self._unsent.clear()  # the reader has exited; the ranks continue
