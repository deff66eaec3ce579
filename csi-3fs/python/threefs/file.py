"""File objects over the native client, with the semantics of Python's file objects."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any, cast

from threefs.errors import InvalidArgument

if TYPE_CHECKING:
    from threefs._native import Client as NativeClient

# Python 3.11 has no public name for the buffer protocol.
Buffer = bytes | bytearray | memoryview | Any

__all__ = ["BUFFER_BYTES", "Buffer", "RawFile", "open_file"]

BUFFER_BYTES = 4 << 20
"""Buffer of a buffered file: several chunks, so that they are transferred concurrently."""


def open_file(client: NativeClient, path: str, mode: str, *, encoding: str | None) -> Any:
    """Like the built-in `open`; text mode decodes with `encoding`, by default UTF-8."""
    text = "b" not in mode
    if not text and encoding is not None:
        raise InvalidArgument(f"mode `{mode}` is binary; omit `encoding`", path=path)
    raw = RawFile(client, path, mode.replace("t", "").replace("b", ""))
    buffered: io.BufferedIOBase
    if raw.readable() and raw.writable():
        buffered = io.BufferedRandom(raw, BUFFER_BYTES)
    elif raw.writable():
        buffered = io.BufferedWriter(raw, BUFFER_BYTES)
    else:
        buffered = io.BufferedReader(raw, BUFFER_BYTES)
    if not text:
        return buffered
    return io.TextIOWrapper(cast("Any", buffered), encoding=encoding or "utf-8")


class RawFile(io.RawIOBase):
    """An unbuffered open file. It refers to its inode, also after a rename."""

    def __init__(self, client: NativeClient, path: str, mode: str = "r") -> None:
        super().__init__()
        kind = mode.replace("b", "").replace("+", "")
        if kind not in {"r", "w", "x", "a"} or mode.count("+") > 1:
            raise InvalidArgument(
                f"invalid mode `{mode}`: expected r, w, x or a (with b, t or +)", path=path
            )
        self.name = path
        self.mode = mode
        self._append = kind == "a"
        self._readable = kind == "r" or "+" in mode
        self._writable = kind != "r" or "+" in mode
        self._file = client.open(path) if kind == "r" else client.create(path, kind == "x")
        if kind == "w" and self._file.size() > 0:
            self._file.truncate(0)
        self._position = self._file.size() if self._append else 0

    @property
    def inode(self) -> int:
        """The inode number, as in `Stat`."""
        return self._file.inode

    def readable(self) -> bool:
        """True when the mode allows reading."""
        return self._readable

    def writable(self) -> bool:
        """True when the mode allows writing."""
        return self._writable

    def seekable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Buffer) -> int:
        """Fill `buffer` from the current position; fewer bytes only at the end of the file."""
        self._check(allowed=self._readable, verb="reading")
        count = self._file.read_into(self._position, buffer)
        self._position += count
        return count

    def write(self, data: Buffer) -> int:
        """Write all of `data` at the current position (at the end in mode a); durable on return."""
        self._check(allowed=self._writable, verb="writing")
        if self._append:
            self._position = self._file.size()
        count = self._file.write(self._position, data)
        self._position += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence)
        if base is None:
            base = self._file.size()
        if base + offset < 0:
            raise InvalidArgument(f"`{self.name}`: position {base + offset} is below 0")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def truncate(self, size: int | None = None) -> int:
        """Truncate or extend (with zeros) to `size`, by default the position."""
        self._check(allowed=self._writable, verb="writing")
        new_size = self._position if size is None else size
        self._file.truncate(new_size)
        return new_size

    def _check(self, *, allowed: bool, verb: str) -> None:
        if self.closed:
            raise ValueError(f"`{self.name}` is closed")
        if not allowed:
            raise io.UnsupportedOperation(
                f"`{self.name}` was opened with mode `{self.mode}`, not for {verb}"
            )
