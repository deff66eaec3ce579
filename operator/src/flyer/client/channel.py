"""The control socket's frames: one JSON object a line, both ways, with bounds and deadlines.

A request is `{"version": 1, "op": NAME, …arguments}`. An answer is `{"ok": true, "result": …}` or
`{"ok": false, "error": {code, message, hint, exitStatus}}`. The op `watch` answers with many lines:
a first `ok`, then items `{"kind": …}` until the driver ends. This module is the blocking side.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any, Self

from flyer.errors import FlyerError, error_from_json

__all__ = ["PROTOCOL_VERSION", "REQUEST_BYTES_MAX", "Channel"]

PROTOCOL_VERSION = 1
REQUEST_BYTES_MAX = 1 << 20  # a manifest is some kilobytes; a mebibyte is a mistake
ANSWER_BYTES_MAX = 64 << 20  # ten thousand jobs at a few kilobytes each
CONNECT_TIMEOUT_SECONDS = 5.0
READ_BYTES = 1 << 16


class Channel:
    """One connection to a driver. Not for concurrent use by threads."""

    def __init__(self, path: str, timeout_seconds: float = 30.0) -> None:
        """Connect, or raise FlyerError (Unreachable)."""
        self._timeout_seconds = timeout_seconds
        self._buffer = bytearray()
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(CONNECT_TIMEOUT_SECONDS)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise FlyerError.unreachable(
                f"no driver answers at `{path}` ({error.strerror or error})",
                "start it with `flyer run` (with --cluster for a new cluster); "
                "it continues every unfinished job",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection; safe to call twice, and from another thread to end a wait."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def call(self, op: str, **arguments: Any) -> Any:
        """Send one request and return its result, or raise the driver's error."""
        self.send(op, **arguments)
        return self.answer()

    def send(self, op: str, **arguments: Any) -> None:
        """Send one request."""
        request = {"version": PROTOCOL_VERSION, "op": op, **arguments}
        line = json.dumps(request, separators=(",", ":")).encode() + b"\n"
        if len(line) > REQUEST_BYTES_MAX:
            raise FlyerError.usage(
                f"the request `{op}` takes {len(line)} bytes, more than {REQUEST_BYTES_MAX}",
                "make the manifest smaller (keep data in files, not in env or args)",
            )
        self._socket.settimeout(self._timeout_seconds)
        try:
            self._socket.sendall(line)
        except OSError as error:
            raise self._closed_error(error) from error

    def answer(self) -> Any:
        """Read the answer to the last request."""
        message = self.next(self._timeout_seconds)
        if message is None:
            raise FlyerError.timeout(
                f"the driver did not answer within {self._timeout_seconds:g} s",
                "see whether its process is stopped or overloaded",
            )
        if message.get("ok") is True:
            return message.get("result")
        raise error_from_json(message.get("error"))

    def next(self, timeout_seconds: float | None) -> dict[str, Any] | None:
        """The next line, or None when none arrived in time. EOF raises Unreachable."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            end = self._buffer.find(b"\n")
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                return self._parse(line)
            if len(self._buffer) > ANSWER_BYTES_MAX:
                raise FlyerError.unreachable("the driver's answer has no end of line")
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            # settimeout(0) would mean non-blocking with another exception for the same thing
            self._socket.settimeout(None if remaining is None else max(remaining, 0.001))
            try:
                data = self._socket.recv(READ_BYTES)
            except TimeoutError:
                return None
            except OSError as error:
                raise self._closed_error(error) from error
            if not data:
                raise self._closed_error(None)
            self._buffer += data

    @staticmethod
    def _parse(line: bytes) -> dict[str, Any]:
        try:
            message = json.loads(line)
        except ValueError as error:
            raise FlyerError.unreachable(
                f"the driver sent a line that is not JSON: {line[:80]!r}"
            ) from error
        if not isinstance(message, dict):
            raise FlyerError.unreachable(f"the driver sent {line[:80]!r} instead of an object")
        return message

    @staticmethod
    def _closed_error(error: OSError | None) -> FlyerError:
        detail = f" ({error.strerror or error})" if error else ""
        return FlyerError.unreachable(
            f"the driver closed the connection{detail}",
            "if it has ended, `flyer run` starts it again and continues every unfinished job",
        )
