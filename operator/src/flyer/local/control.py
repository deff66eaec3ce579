"""Server of the control socket, for requests of clients (frames: flyer.client.channel).

The server reads one bounded line per request and calls the handler of its op. A line that is too
long, is not JSON, has another version or names an unknown op is answered with an error; after a
malformed line the connection is closed. An invalid, slow or dead client never affects another
connection: every subscription has a bounded queue, and a client that does not read in time is
disconnected with a message (`lagged`) and may connect again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from typing import TYPE_CHECKING, Any, Final, Protocol

from flyer.errors import ExitStatus, FlyerError, error_to_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

__all__ = ["ControlHandler", "ControlServer", "Subscription"]

PROTOCOL_VERSION: Final = 1
REQUEST_BYTES_MAX: Final = 1 << 20
CONNECTIONS_MAX: Final = 256
WRITE_TIMEOUT_SECONDS: Final = 10.0
# A subscriber that falls this many items behind has stopped reading.
SUBSCRIPTION_ITEMS_MAX: Final = 10_000

log = logging.getLogger(__name__)


class Subscription:
    """One watcher's bounded queue of items; `None` ends it."""

    def __init__(self, pid: int | None = None) -> None:
        self.pid = pid
        self._items: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(SUBSCRIPTION_ITEMS_MAX)
        self.lagged = False

    def offer(self, item: dict[str, Any] | None) -> None:
        """Queue an item, or mark the watcher as lagging when its queue is full."""
        try:
            self._items.put_nowait(item)
        except asyncio.QueueFull:
            self.lagged = True

    async def items(self) -> AsyncIterator[dict[str, Any]]:
        """Yield items until the end or until the watcher lags."""
        while True:
            item = await self._items.get()
            if item is None:
                return
            yield item
            if self.lagged:
                yield {"kind": "lagged"}
                return


class ControlHandler(Protocol):
    """The driver's methods. Each returns JSON or raises FlyerError."""

    async def call(self, op: str, arguments: dict[str, Any]) -> Any:
        """Answer one request."""

    def subscribe(self, arguments: dict[str, Any]) -> Subscription:
        """Open a stream of events and status changes."""

    def unsubscribe(self, subscription: Subscription) -> None:
        """Remove a watcher."""


class ControlServer:
    """Serves the control socket until closed."""

    def __init__(self, path: Path, handler: ControlHandler) -> None:
        self._path = path
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. The caller holds the cluster's lock, so an existing socket file is stale."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._server = await asyncio.start_unix_server(
            self._connected, str(self._path), limit=REQUEST_BYTES_MAX
        )
        self._path.chmod(0o600)

    async def close(self) -> None:
        """Stop listening and close every connection; watchers were notified before."""
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        if self._connections:
            # watchers get their last items; a stuck one is disconnected
            _, pending = await asyncio.wait(self._connections, timeout=1.0)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) > CONNECTIONS_MAX:
                error = FlyerError(
                    f"more than {CONNECTIONS_MAX} connections to the driver",
                    exit_status=ExitStatus.UNREACHABLE,
                    code="TooManyConnections",
                    hint="end some of the clients that watch it",
                )
                await _write(writer, {"ok": False, "error": error_to_json(error)})
                return
            await self._serve(reader, writer)
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass  # the client disconnected, or the driver ends
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError:
                return
            except asyncio.LimitOverrunError:
                error = FlyerError.usage(
                    f"a request line is longer than {REQUEST_BYTES_MAX} bytes",
                    "keep data in files, not in the manifest",
                )
                await _write(writer, {"ok": False, "error": error_to_json(error)})
                return
            try:
                request = _parsed(line)
            except FlyerError as error:
                log.warning("control socket: %s", error.message)
                await _write(writer, {"ok": False, "error": error_to_json(error)})
                return
            op = request.pop("op")
            if op == "watch":
                await self._stream(request, reader, writer)
                return
            await _write(writer, await self._respond(op, request))

    async def _respond(self, op: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": True, "result": await self._handler.call(op, arguments)}
        except FlyerError as error:
            return {"ok": False, "error": error_to_json(error)}
        except (KeyError, TypeError, ValueError) as error:
            log.exception("control socket: op %s with %s", op, sorted(arguments))
            bad = FlyerError.usage(
                f"the request `{op}` has a bad argument: {type(error).__name__}: {error}"
            )
            return {"ok": False, "error": error_to_json(bad)}

    async def _stream(
        self,
        arguments: dict[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        try:
            subscription = self._handler.subscribe(arguments)
        except FlyerError as error:
            await _write(writer, {"ok": False, "error": error_to_json(error)})
            return
        sender = asyncio.create_task(_send_all(writer, subscription))
        # A watcher sends nothing more: any input from it, usually EOF, ends the stream.
        hangup = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({sender, hangup}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._handler.unsubscribe(subscription)
            for task in (sender, hangup):
                task.cancel()
            await asyncio.gather(sender, hangup, return_exceptions=True)


async def _send_all(writer: asyncio.StreamWriter, subscription: Subscription) -> None:
    await _write(writer, {"ok": True, "result": {}})
    async for item in subscription.items():
        await _write(writer, item)


async def _write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
    async with asyncio.timeout(WRITE_TIMEOUT_SECONDS):
        await writer.drain()


def _parsed(line: bytes) -> dict[str, Any]:
    excerpt = os.fsdecode(line[:80].strip()).encode(errors="replace").decode()
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FlyerError.usage(f"a request line is not JSON: `{excerpt}`") from error
    if not isinstance(request, dict) or not isinstance(request.get("op"), str):
        raise FlyerError.usage(f"a request is not an object with an `op`: `{excerpt}`")
    version = request.pop("version", None)
    if version != PROTOCOL_VERSION:
        raise FlyerError.usage(
            f"the request has version {version!r}, this driver has {PROTOCOL_VERSION}",
            "use the `flyer` of the driver's version",
        )
    return request
