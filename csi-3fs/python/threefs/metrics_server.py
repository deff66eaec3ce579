"""Metrics endpoint: bounded connections, bounded time, one rendering for all scrapes of a second.

Every pod of a cluster may be able to connect. A connection uses a thread, so the number of
connections is limited in total and per source address. A connection that exceeds its time limit is
closed, and if all slots are taken the newest connection evicts the oldest. A page is rendered at
most once a second, so that a flood of scrapes adds no load to the collectors.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CONNECTIONS_MAX", "CONNECTIONS_PER_SOURCE_MAX", "HEALTH_PATH", "MetricsServer"]

HEALTH_PATH = "/healthz"
"""Path of the kubelet's probe; it does not run the collectors."""

CONNECTIONS_MAX = 32
CONNECTIONS_PER_SOURCE_MAX = 4
"""Two Prometheus servers behind one address scrape with two connections each at most."""
CONNECTION_SECONDS = 5.0
"""Limit from accept to the last byte; Prometheus' default timeout is 10 s."""
PAGE_SECONDS = 1.0


class MetricsServer(ThreadingHTTPServer):
    """Serves `/metrics` of a registry, and `/healthz`; `start`, then `stop`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        registry: CollectorRegistry,
        port: int,
        address: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._open: dict[socket.socket, tuple[float, str]] = {}
        self._open_lock = threading.Lock()
        self._page = b""
        self._page_time: float | None = None
        self._page_lock = threading.Lock()
        self._registry = registry
        super().__init__((address, port), _handler(self.page))
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)

    def start(self) -> None:
        """Serve in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    def page(self) -> bytes:
        """The metrics, at most a second old."""
        with self._page_lock:
            now = self._clock()
            if self._page_time is None or now - self._page_time >= PAGE_SECONDS:
                self._page = generate_latest(self._registry)
                self._page_time = now
            return self._page

    def connections(self) -> int:
        """Connections that are open."""
        with self._open_lock:
            return len(self._open)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuse a source that has used all its slots; otherwise make room for the newest."""
        source = str(client_address[0])
        with self._open_lock:
            counts = Counter(source for _, source in self._open.values())
            if counts[source] >= CONNECTIONS_PER_SOURCE_MAX:
                return False
            if len(self._open) >= CONNECTIONS_MAX:
                oldest = next(iter(self._open))
                del self._open[oldest]
                _cut(oldest)
            self._open[request] = (self._clock(), source)
        return True

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection and close it."""
        with self._open_lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close what is over its time; called twice a second by `serve_forever`."""
        with self._open_lock:
            now = self._clock()
            for connection, (opened, _) in self._open.items():
                if now - opened >= CONNECTION_SECONDS:
                    _cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that was cut is not worth a traceback."""


def _cut(connection: socket.socket) -> None:
    """End what its thread waits for; the thread closes it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _handler(page: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CONNECTION_SECONDS

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == HEALTH_PATH:
                kind, body = "text/plain; charset=utf-8", b"ok\n"
            elif path == "/metrics":
                kind, body = CONTENT_TYPE_LATEST, page()
            else:
                self.send_error(404, explain="try /metrics")
                return
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Scrapes are not logged."""

    return Handler
