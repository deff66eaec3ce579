"""Client of the job socket: blocking, one connection, every call with a deadline.

Scripts use `flyer.job.current()`, which is built on this client.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, Self

from flyer.job.protocol import (
    LINE_BYTES_MAX,
    WATCH_SECONDS_MAX,
    Change,
    Checkpoint,
    Done,
    Fail,
    Hello,
    Progress,
    ProtocolError,
    Received,
    Refusal,
    Release,
    Reply,
    Request,
    UserState,
    Watch,
    Welcome,
    encode,
    parse_reply,
)

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["JobClient", "JobSocketError"]

CALL_SECONDS_MAX = 10.0


class JobSocketError(Exception):
    """A failed request: the message names the operation, the socket and the cause.

    `final`: a retry would be refused, too.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class JobClient:
    """One connection to the job socket, after the handshake. Not thread-safe: one per thread.

    A `JobSocketError` leaves the connection unusable; create a new one.
    """

    def __init__(self, path: str, rank: int, *, timeout_seconds: float = CALL_SECONDS_MAX) -> None:
        self._path = path
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._buffer = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_seconds)
            self._socket.connect(path)
            welcome = self._call(Hello(rank))
        except OSError as error:
            self._socket.close()
            raise JobSocketError(f"rank {rank}: no job socket at {path}: {error}") from error
        except JobSocketError:
            self._socket.close()
            raise
        if not isinstance(welcome, Welcome):
            self._socket.close()
            raise JobSocketError(f"rank {rank}: {path} answered hello with `{welcome.kind}`")
        self.welcome = welcome

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Wakes a `watch` in another thread."""
        with contextlib.suppress(OSError):  # the server closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def watch(self, revision: int = 0, timeout_seconds: float = WATCH_SECONDS_MAX) -> Change:
        """Wait for a revision other than `revision`; returns the same one after the timeout."""
        request = Watch(revision, timeout_seconds)
        reply = self._call(request, timeout_seconds + self._timeout_seconds)
        if not isinstance(reply, Change):
            raise JobSocketError(f"rank {self._rank}: `watch` was answered with `{reply.kind}`")
        return reply

    def received(self) -> None:
        """Acknowledge the suspension."""
        self._notify(Received())

    def progress(self, step: int, metrics: dict[str, float] | None = None) -> None:
        """Report a finished step."""
        self._notify(Progress(step, metrics or {}))

    def checkpoint(self, step: int, path: str, *, durable: bool) -> None:
        """Report a checkpoint."""
        self._notify(Checkpoint(step, path, durable))

    def release(self, step: int | None = None) -> None:
        """Release the nodes of the whole job now."""
        self._notify(Release(step))

    def fail(self, reason: str) -> None:
        """Fail the job without a restart."""
        self._notify(Fail(reason))

    def user_state(self, state: int) -> None:
        """Store the user's 32-bit state for all attempts."""
        self._notify(UserState(state))

    def _notify(self, request: Request) -> None:
        reply = self._call(request)
        if not isinstance(reply, Done):
            raise JobSocketError(
                f"rank {self._rank}: `{request.op}` was answered with `{reply.kind}`"
            )

    def _call(self, request: Request, timeout_seconds: float | None = None) -> Reply:
        limit_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            self._socket.settimeout(self._timeout_seconds)
            self._socket.sendall(encode(request))
            reply = parse_reply(self._read_line(time.monotonic() + limit_seconds))
        except (OSError, ProtocolError) as error:
            raise JobSocketError(
                f"rank {self._rank}: `{request.op}` at {self._path}: {error}",
                final=isinstance(error, ProtocolError),
            ) from error
        if isinstance(reply, Refusal):
            raise JobSocketError(
                f"rank {self._rank}: `{request.op}` refused ({reply.code}): {reply.message}",
                final=reply.code.startswith("bad_"),
            )
        return reply

    def _read_line(self, deadline: float) -> bytes:
        while b"\n" not in self._buffer:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                raise TimeoutError("no answer in time")
            self._socket.settimeout(left_seconds)
            received = self._socket.recv(65536)
            if not received:
                raise ConnectionResetError("the server closed the connection")
            self._buffer += received
            if len(self._buffer) > 2 * LINE_BYTES_MAX:
                raise ProtocolError("bad_line", f"the answer exceeds {LINE_BYTES_MAX} bytes")
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        return line
