"""Stream: one connection of a sidecar, with limits on lines in both directions.

Reads and writes are two tasks that share nothing but this object. What is written is the newest
order, not a queue of them, so a slow reader costs one buffer and is disconnected at its timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from flyer.job.fields import ProtocolError
from flyer.sidecar.wire import (
    REPORT_BYTES_MAX,
    VERSION,
    Acknowledgement,
    Beat,
    Hello,
    Order,
    Refusal,
    Report,
    Welcome,
    encode,
    parse_from_sidecar,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from flyer.kube.gateway.metrics import GatewayMetrics
    from flyer.kube.gateway.settings import GatewaySettings

__all__ = ["RefusedError", "Stream"]

REFUSAL_SECONDS_MAX = 1.0


class RefusedError(Exception):
    """Ends the stream. `code` is one of `REFUSAL_REASONS`; empty: the sidecar disconnected."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Stream:
    """A stream after its TLS handshake."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
    ) -> None:
        self._metrics = metrics
        self._reader = reader
        self._writer = writer
        self._settings = settings
        self._wake = asyncio.Event()
        self._taken: int | None = None
        self._ending: RefusedError | None = None
        self._tokens = float(settings.lines_burst)
        self._tokens_at = self.heard_at = asyncio.get_running_loop().time()

    def wake(self) -> None:
        """Check whether there is a new order to send."""
        self._wake.set()

    def end(self, error: RefusedError) -> None:
        """End the stream for this reason."""
        if self._ending is None:
            self._ending = error
        self._wake.set()

    async def hello(self) -> Hello:
        """Read the first line."""
        try:
            message = await self._read(self._settings.hello_seconds)
        except ProtocolError as error:
            raise RefusedError(
                "bad_handshake", f"first message is not a valid `hello`: {error}"
            ) from error
        if not isinstance(message, Hello):
            raise RefusedError(
                "bad_handshake", f"first message is `{message.kind}`, expected `hello`"
            )
        return message

    async def serve(
        self,
        take: Callable[[Report], None],
        order: Callable[[], Order],
        version: Callable[[], int],
        stored: Callable[[], bool] = lambda: True,
        protocol_version: int = VERSION,
    ) -> None:
        """Serve until one side ends the stream. Raises `RefusedError`, or OSError of the network.

        A report is acknowledged once `stored` returns true; `wake` has it called again.
        """
        settings = self._settings
        welcome = Welcome(
            settings.sidecars_beat_seconds, settings.silence_seconds, protocol_version
        )
        self._writer.write(encode(welcome))
        tasks = [
            asyncio.create_task(self._listen(take)),
            asyncio.create_task(self._speak(order, version, stored)),
        ]
        try:
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def refuse(self, error: RefusedError) -> None:
        """Send the reason, if the peer still reads, and close the connection."""
        if error.code:
            with contextlib.suppress(OSError, TimeoutError):
                self._writer.write(encode(Refusal(error.code, str(error))))
                async with asyncio.timeout(REFUSAL_SECONDS_MAX):
                    await self._writer.drain()
                    self._writer.close()
                    await self._writer.wait_closed()

    def abort(self) -> None:
        """Close the connection immediately, without sending the rest."""
        self._writer.transport.abort()

    async def _listen(self, take: Callable[[Report], None]) -> None:
        while True:
            try:
                message = await self._read(self._settings.silence_seconds)
                if isinstance(message, Hello):
                    raise RefusedError("bad_handshake", "`hello` is said once")
                if isinstance(message, Report):
                    take(message)
                    self._taken = message.revision
                    self._wake.set()
            except ProtocolError as error:
                raise RefusedError(error.code, str(error)) from error

    async def _speak(
        self, order: Callable[[], Order], version: Callable[[], int], stored: Callable[[], bool]
    ) -> None:
        sent_version = 0
        while True:
            self._wake.clear()
            if self._ending is not None:
                raise self._ending
            lines = []
            if self._taken is not None and stored():
                lines.append(encode(Acknowledgement(self._taken)))
                self._taken = None
            if version() != sent_version:
                sent_version = version()
                lines.append(encode(order()))
            self._writer.write(b"".join(lines) or encode(Beat()))
            try:
                async with asyncio.timeout(self._settings.write_seconds):
                    await self._writer.drain()
            except TimeoutError as error:
                seconds = self._settings.write_seconds
                raise RefusedError("slow", f"the sidecar read nothing for {seconds:g} s") from error
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.beat_seconds):
                    await self._wake.wait()

    async def _read(self, seconds: float) -> Hello | Report | Beat:
        try:
            async with asyncio.timeout(seconds):
                line = await self._reader.readuntil(b"\n")
        except TimeoutError as error:
            raise RefusedError("silent", f"no complete message within {seconds:g} s") from error
        except asyncio.IncompleteReadError as error:
            raise RefusedError("", "the sidecar closed the connection") from error
        except asyncio.LimitOverrunError as error:
            raise ProtocolError("bad_line", f"a line exceeds {REPORT_BYTES_MAX} bytes") from error
        self.heard_at = asyncio.get_running_loop().time()
        self._spend()
        message = parse_from_sidecar(line)
        self._metrics.messages.labels(message.kind).inc()
        return message

    def _spend(self) -> None:
        """Take one token per line from a bucket that refills over time."""
        now = asyncio.get_running_loop().time()
        earned = (now - self._tokens_at) * self._settings.lines_per_second
        self._tokens = min(self._tokens + earned, float(self._settings.lines_burst)) - 1
        self._tokens_at = now
        if self._tokens < 0:
            limit = self._settings.lines_per_second
            raise RefusedError("flood", f"more than {limit:g} lines a second")
