"""Server of the job socket: serves the ranks of one attempt of one job.

The local driver and the sidecar run it with a `JobHandler` that carries out the ranks' requests.
A rank that sends an invalid message gets an error and is disconnected; others are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flyer.job.protocol import (
    LINE_BYTES_MAX,
    VERSION,
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
    SuspendCode,
    UserState,
    Watch,
    Welcome,
    encode,
    parse_request,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["JobHandler", "JobServer"]

HELLO_SECONDS_MAX = 10.0  # time from the connection to the hello
WRITE_SECONDS_MAX = 10.0  # time for a rank to read an answer
HANDLER_SECONDS_MAX = 30.0
CONNECTIONS_MAX = 4096
SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un, less its final NUL

_log = logging.getLogger(__name__)


class JobHandler(Protocol):
    """Carries out requests, in the event loop; an exception is answered as `internal`."""

    async def received(self, rank: int) -> None:
        """The job acknowledges the suspension; it will save and release."""

    async def progress(self, rank: int, step: int, metrics: dict[str, float]) -> None:
        """The job finished a step."""

    async def checkpoint(self, rank: int, step: int, path: str, durable: bool) -> None:  # noqa: FBT001
        """The job wrote a checkpoint; a restart may use a durable one."""

    async def release(self, rank: int, step: int | None) -> None:
        """The job releases all its nodes."""

    async def fail(self, rank: int, reason: str) -> None:
        """The job fails without a restart."""

    async def user_state(self, rank: int, state: int) -> None:
        """Store the user's 32-bit state for all attempts."""


class JobServer:
    """Serves `path` until closed. `signal()` starts or extends a suspension.

    `mode` is the mode of the socket: in a pod the ranks may have another user than the sidecar.
    `greeted` is called after every hello.
    """

    def __init__(
        self,
        path: str | Path,
        welcome: Welcome,
        handler: JobHandler,
        *,
        mode: int = 0o600,
        greeted: Callable[[int], None] | None = None,
    ) -> None:
        self._path = Path(path)
        self._welcome = welcome
        self._handler = handler
        self._mode = mode
        self._greeted = greeted
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._wakers: set[asyncio.Task[None]] = set()
        self._revision = 1
        self._suspend_code = SuspendCode.NONE
        self._deadline: float | None = None  # in the event loop's time
        self._reason = ""
        self._user_state = welcome.user_state
        self.ranks_seen: set[int] = set()
        """Ranks that have ever connected. Without any, a suspension uses SIGTERM."""

    @property
    def suspend_code(self) -> SuspendCode:
        """Progress of the suspension."""
        return self._suspend_code

    async def start(self) -> None:
        """Bind and serve. Replaces the socket file of a dead server."""
        if len(bytes(self._path)) > SOCKET_PATH_BYTES_MAX:
            raise ValueError(
                f"the socket path {self._path} is longer than the {SOCKET_PATH_BYTES_MAX} bytes "
                "that the kernel accepts: choose a shorter state folder"
            )
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._server = await asyncio.start_unix_server(
            self._accept, path=str(self._path), limit=LINE_BYTES_MAX
        )
        self._path.chmod(self._mode)

    async def close(self) -> None:
        """Close every connection and remove the socket file."""
        if self._server is not None:
            self._server.close()
        for connection in [*self._connections, *self._wakers]:
            connection.cancel()
        await asyncio.gather(*self._connections, *self._wakers, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def signal(
        self, seconds_left: float, reason: str, code: SuspendCode = SuspendCode.SENT
    ) -> None:
        """Ask the job to suspend within this time; a further call sets a new deadline.

        After a restart of the server, `code` is the progress that the previous one recorded.
        """
        self._deadline = asyncio.get_running_loop().time() + seconds_left
        self._reason = reason
        self._advance(code)

    def _advance(self, code: SuspendCode) -> None:
        self._suspend_code = max(self._suspend_code, code)
        self._revision += 1
        waker = asyncio.get_running_loop().create_task(self._wake())
        self._wakers.add(waker)
        waker.add_done_callback(self._wakers.discard)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _change(self) -> Change:
        remaining = None
        if self._deadline is not None:
            remaining = max(self._deadline - asyncio.get_running_loop().time(), 0.0)
        return Change(self._revision, self._suspend_code, remaining, self._reason)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._connections) >= CONNECTIONS_MAX:
            writer.close()
            return
        self._connections.add(task)
        try:
            await self._converse(reader, writer)
        except (ConnectionError, TimeoutError) as error:
            _log.debug("a rank's connection ended: %r", error)
        except asyncio.CancelledError:
            pass  # the server closes; nothing awaits this task
        finally:
            self._connections.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: int | None = None
        while True:
            try:
                async with asyncio.timeout(HELLO_SECONDS_MAX if rank is None else None):
                    line = await _read_line(reader)
                if not line:
                    return
                request = parse_request(line)
                if isinstance(request, Hello):
                    rank = self._greet(request)
                elif rank is None:
                    raise ProtocolError("bad_handshake", "send `hello` first")  # noqa: TRY301
            except ProtocolError as error:
                _log.warning("%s: rank %s: %s", self._welcome.job, rank, error)
                await _write(writer, Refusal(error.code, str(error)))
                return
            if isinstance(request, Watch):
                reply: Reply = await self._watch(request)
            else:
                reply = await self._act(rank, request)
            await _write(writer, reply)

    def _greet(self, hello: Hello) -> int:
        if hello.version != VERSION:
            raise ProtocolError(
                "bad_version", f"version {hello.version} is not supported, only {VERSION}"
            )
        self.ranks_seen.add(hello.rank)
        if self._greeted is not None:
            self._greeted(hello.rank)
        return hello.rank

    async def _watch(self, watch: Watch) -> Change:
        """The state, once it differs from the rank's revision or the rank's timeout expired."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(watch.timeout_seconds), self._changed:
                await self._changed.wait_for(lambda: self._revision != watch.revision)
        return self._change()

    async def _act(self, rank: int, request: Request) -> Reply:
        try:
            async with asyncio.timeout(HANDLER_SECONDS_MAX):
                return await self._dispatch(rank, request)
        except Exception:  # noqa: BLE001  whatever the handler raises is that request's alone
            _log.exception("%s: rank %d: `%s` failed", self._welcome.job, rank, request.op)
            return Refusal("internal", f"`{request.op}` could not be carried out; send it again")

    async def _dispatch(self, rank: int, request: Request) -> Reply:
        match request:
            case Hello():
                return Welcome(
                    self._welcome.job,
                    self._welcome.chain,
                    self._welcome.attempt,
                    self._user_state,
                    self._welcome.restore_step,
                    self._welcome.restore_path,
                )
            case Received():
                await self._handler.received(rank)
                if self._suspend_code is SuspendCode.SENT:
                    self._advance(SuspendCode.RECEIVED)
            case Progress(step, metrics):
                await self._handler.progress(rank, step, metrics)
            case Checkpoint(step, path, durable):
                await self._handler.checkpoint(rank, step, path, durable)
            case Release(step):
                await self._handler.release(rank, step)
                self._advance(SuspendCode.MAY_SUSPEND)
            case Fail(reason):
                await self._handler.fail(rank, reason)
            case UserState(state):
                await self._handler.user_state(rank, state)
                self._user_state = state
            case Watch():
                return self._change()
        return Done()


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """One line, or nothing at EOF; an incomplete last line is invalid."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        raise ProtocolError("bad_line", f"a line exceeds {LINE_BYTES_MAX} bytes") from error


async def _write(writer: asyncio.StreamWriter, reply: Reply) -> None:
    writer.write(encode(reply))
    async with asyncio.timeout(WRITE_SECONDS_MAX):
        await writer.drain()
