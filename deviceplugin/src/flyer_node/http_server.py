"""HTTP server for /metrics, /healthz and /readyz, in a separate thread.

All responses come from memory. /healthz fails only if the event loop is stuck: hardware that hangs
is reported as a finding and must not restart the agent.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from flyer_node.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Heartbeat", "HttpServer"]

STUCK_SECONDS = 30.0
"""Time without an event loop iteration after which /healthz fails."""
REQUEST_SECONDS = 5.0
"""Time limit of a connection."""
CONNECTIONS_MAX = 32
PER_SOURCE_MAX = 4
"""The kubelet's probes and a pair of Prometheus servers, with room."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Heartbeat:
    """Heartbeat of the event loop, read by the server thread."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.ready = False

    def beat(self) -> None:
        """Records an iteration of the event loop."""
        self._last = time.monotonic()

    @property
    def age_seconds(self) -> float:
        """Time since the last iteration."""
        return time.monotonic() - self._last


class _BoundedServer(ThreadingHTTPServer):
    """HTTP server with limits on connections, connections per source and time per connection."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, tuple[float, str]] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuses sources over PER_SOURCE_MAX; over CONNECTIONS_MAX, closes the oldest."""
        source = str(client_address[0])
        with self._lock:
            if sum(peer == source for _, peer in self._open.values()) >= PER_SOURCE_MAX:
                return False
            if len(self._open) >= CONNECTIONS_MAX:
                oldest = next(iter(self._open))
                del self._open[oldest]
                _shutdown(oldest)
            self._open[request] = (time.monotonic(), source)
        return True

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Closes connections past their deadline; called twice a second."""
        with self._lock:
            for connection, (opened, _) in self._open.items():
                if time.monotonic() - opened >= REQUEST_SECONDS:
                    _shutdown(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Suppresses the traceback of a closed connection."""


def _shutdown(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class HttpServer:
    """The agent's HTTP server."""

    def __init__(
        self, address: str, port: int, metrics: Callable[[], bytes], heartbeat: Heartbeat
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_SECONDS

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._respond(200, metrics())
                elif path == "/healthz":
                    age = heartbeat.age_seconds
                    text = f"last event loop iteration {age:.1f} s ago\n"
                    self._respond(200 if age < STUCK_SECONDS else 503, text.encode())
                elif path == "/readyz":
                    text = (
                        "registered\n" if heartbeat.ready else "not registered with the kubelet\n"
                    )
                    self._respond(200 if heartbeat.ready else 503, text.encode())
                else:
                    self._respond(404, b"not found: use /metrics, /healthz or /readyz\n")

            def _respond(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Suppresses access logs: probes and scrapes are frequent."""

        try:
            self._server = _BoundedServer((address, port), Handler)
        except OSError as error:
            expected = f"a free address and port ({error.strerror})"
            raise SettingError("--metrics-port", f"{address}:{port}", expected) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def start(self) -> None:
        """Starts the server thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the server."""
        self._server.shutdown()
        self._server.server_close()
