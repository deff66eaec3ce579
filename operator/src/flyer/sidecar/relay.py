"""Stream to the gateway: reconnects until this process ends.

Sends the newest report after every change and a heartbeat when idle; applies received orders. Any
failure of the gateway costs only a reconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from typing import TYPE_CHECKING, Final

from flyer.job.fields import ProtocolError
from flyer.sidecar.wire import (
    OLDEST_VERSION,
    ORDER_BYTES_MAX,
    VERSION,
    Acknowledgement,
    Beat,
    Hello,
    Order,
    Refusal,
    Welcome,
    encode,
    parse_from_gateway,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from flyer.sidecar.settings import SidecarSettings
    from flyer.sidecar.state import SidecarState

__all__ = ["Relay", "StreamEndedError"]

TOKEN_BYTES_MAX: Final = 8 * 1024
WRITE_SECONDS_MAX: Final = 10.0

log = logging.getLogger(__name__)


class StreamEndedError(Exception):
    """The stream ended: `code` is the gateway's refusal or the local cause."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Relay:
    """Keeps one stream open."""

    def __init__(
        self, settings: SidecarSettings, state: SidecarState, obey: Callable[[Order], None]
    ) -> None:
        self._settings = settings
        self._state = state
        self._obey = obey
        self._context = ssl.create_default_context(cadata=settings.authority)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.connected = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        pause, last_refusal = self._settings.retry_seconds, ""
        while True:
            try:
                await self._stream()
            except (OSError, ProtocolError, StreamEndedError, EOFError) as error:
                code = getattr(error, "code", "") or type(error).__name__
                if code != last_refusal:
                    log.warning("gateway: %s: %s", code, error)
                last_refusal = str(code)
            if self.connected.is_set():
                self.connected.clear()
                pause, last_refusal = self._settings.retry_seconds, ""
            # Jitter, so that the pods of a cluster do not all reconnect at the same time.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311  no secret
            pause = min(pause * 2, self._settings.retry_seconds_max)

    async def _stream(self) -> None:
        """One connection, from its opening to its end."""
        settings = self._settings
        token = await asyncio.to_thread(self._read_token)
        try:
            async with asyncio.timeout(settings.connect_seconds):
                reader, writer = await asyncio.open_connection(
                    settings.host,
                    settings.port,
                    ssl=self._context,
                    server_hostname=settings.server_name or settings.host,
                    limit=ORDER_BYTES_MAX,
                )
        except TimeoutError as error:
            raise StreamEndedError("no_answer", f"no connection to {settings.host}") from error
        try:
            writer.write(encode(Hello(token)))
            welcome = await _read(reader, settings.connect_seconds)
            if not isinstance(welcome, Welcome):
                raise StreamEndedError("bad_reply", f"hello was answered with {welcome!r:.100}")
            if not OLDEST_VERSION <= welcome.version <= VERSION:
                raise StreamEndedError(
                    "bad_version",
                    f"the gateway has version {welcome.version}, this sidecar {OLDEST_VERSION} "
                    f"to {VERSION}",
                )
            self.connected.set()
            log.info("gateway: connected to %s:%d", settings.host, settings.port)
            await self._converse(reader, writer, welcome)
        finally:
            writer.transport.abort()  # unsent data is not needed

    def _read_token(self) -> str:
        """Read the token; kubelet replaces the file before it expires."""
        with self._settings.token_file.open("rb") as file:
            return file.read(TOKEN_BYTES_MAX).decode("ascii", errors="replace").strip()

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, welcome: Welcome
    ) -> None:
        async with contextlib.AsyncExitStack() as stack:
            tasks = [
                asyncio.create_task(self._listen(reader, welcome.silence_seconds)),
                asyncio.create_task(self._speak(writer, welcome.beat_seconds)),
            ]
            stack.push_async_callback(_end_all, tasks)
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()

    async def _listen(self, reader: asyncio.StreamReader, silence_seconds: float) -> None:
        while True:
            match await _read(reader, silence_seconds):
                case Order() as order:
                    self._obey(order)
                case Acknowledgement(revision):
                    self._state.acknowledge(revision)
                case _:
                    pass

    async def _speak(self, writer: asyncio.StreamWriter, beat_seconds: float) -> None:
        state, sent_revision = self._state, 0
        while True:
            state.changed.clear()
            state.urgent.clear()
            if state.report.revision != sent_revision:
                sent_revision = state.report.revision
                writer.write(encode(state.report))
            else:
                writer.write(encode(Beat()))
            async with asyncio.timeout(WRITE_SECONDS_MAX):
                await writer.drain()
            await _wait(state.urgent, self._settings.report_seconds)
            if state.report.revision == sent_revision:
                await _wait(state.changed, beat_seconds)


async def _end_all(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _read(
    reader: asyncio.StreamReader, seconds: float
) -> Welcome | Acknowledgement | Order | Beat:
    try:
        async with asyncio.timeout(seconds):
            line = await reader.readuntil(b"\n")
    except TimeoutError as error:
        raise StreamEndedError("silent", f"the gateway sent nothing for {seconds:g} s") from error
    except asyncio.IncompleteReadError as error:
        raise StreamEndedError("closed", "the gateway closed the connection") from error
    except asyncio.LimitOverrunError as error:
        raise StreamEndedError("bad_line", "the gateway sent a line that is too long") from error
    message = parse_from_gateway(line)
    if isinstance(message, Refusal):
        raise StreamEndedError(message.code, message.message)
    return message
