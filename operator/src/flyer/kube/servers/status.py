"""Separate process that serves probes and metrics, so that no client shares the scheduler's loop.

`python -m flyer.kube.servers.status HOST PORT`: pages arrive on standard input, requests for fresh
metrics go to standard output. The process exits when standard input ends, with its parent.

A frame on standard input is one JSON line, `{"pages": {"/healthz": [200, "ok"], …}, "metrics": n,
"type": "text/plain"}`, followed by n bytes of the metrics page (absent: unchanged). Without a frame
for `STALE_SECONDS`, `/healthz` returns 503: the parent's event loop is stuck, which the parent
cannot report itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Final

from aiohttp import web

from flyer.kube.servers.web import WebServer, WebSettings

__all__ = ["FRAME_BYTES_MAX", "STALE_SECONDS", "StatusServer", "main"]

STALE_SECONDS: Final = 30.0
"""A scheduler step takes at most seconds."""
METRICS_SECONDS: Final = 2.0
"""Time that a scrape waits for a new page, before it gets the cached one."""
METRICS_AGE_SECONDS_MAX: Final = 1.0
"""A younger page is served from the cache: scrapes cost the parent at most one page per second."""
FRAME_BYTES_MAX: Final = 1024 * 1024
NICENESS: Final = 5
EXIT_NO_PORT: Final = 3


class StatusServer:
    """Serves the pages that the parent sent last."""

    def __init__(self, ask: asyncio.StreamWriter | None = None) -> None:
        self._pages: dict[str, tuple[int, str]] = {}
        self._metrics = b""
        self._metrics_type = "text/plain"
        self._metrics_at = 0.0
        self._fresh = asyncio.Event()
        self._heard_at = time.monotonic()
        self._ask = ask

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Read frames until the parent exits."""
        while line := await reader.readline():
            frame = json.loads(line)
            self._pages = {path: (int(code), text) for path, (code, text) in frame["pages"].items()}
            self._heard_at = time.monotonic()
            if "metrics" in frame:
                self._metrics = await reader.readexactly(frame["metrics"])
                self._metrics_type = frame["type"]
                self._metrics_at = time.monotonic()
                self._fresh.set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve GET of a known page."""
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405)
        if request.path == "/metrics":
            return await self._metrics_page()
        age = time.monotonic() - self._heard_at
        if request.path == "/healthz" and age > STALE_SECONDS:
            text = f"the event loop has been stuck for {age:.0f} s\n"
            return web.Response(status=503, text=text)
        page = self._pages.get(request.path)
        if page is None:
            is_probe = request.path in ("/healthz", "/readyz", "/leaderz")
            return web.Response(status=503 if is_probe else 404, text="not available yet\n")
        return web.Response(status=page[0], text=f"{page[1]}\n")

    async def _metrics_page(self) -> web.Response:
        if time.monotonic() - self._metrics_at > METRICS_AGE_SECONDS_MAX and self._ask is not None:
            if self._fresh.is_set() or not self._metrics_at:
                self._fresh.clear()
                self._ask.write(b"metrics\n")
            try:
                async with asyncio.timeout(METRICS_SECONDS):
                    await self._fresh.wait()
            except TimeoutError:
                self._fresh.set()  # the next scrape repeats the request
        if not self._metrics_at:
            return web.Response(status=503, text="no metrics yet\n")
        return web.Response(body=self._metrics, headers={"Content-Type": self._metrics_type})


async def _serve(host: str, port: int) -> int:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=FRAME_BYTES_MAX)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, sys.stdout
    )
    status = StatusServer(asyncio.StreamWriter(transport, protocol, None, loop))
    server = WebServer(status.handle, WebSettings())
    try:
        server.open(host, port)
    except OSError as error:
        sys.stderr.write(f"flyer-operator: probes and metrics: port {port}: {error}\n")
        return EXIT_NO_PORT
    serving = asyncio.create_task(server.run())
    try:
        await status.read(reader)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Serve until standard input ends."""
    host, port = sys.argv[1:] if arguments is None else arguments
    os.nice(NICENESS)
    return asyncio.run(_serve(host, int(port)))


if __name__ == "__main__":
    sys.exit(main())
