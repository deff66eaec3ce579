"""/metrics, /healthz and /readyz from a thread of their own.

They answer from memory. Health means that the event loop turns: hardware that hangs is a finding,
never a reason to be restarted.
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

__all__ = ["Pulse", "Web"]

STUCK_SECONDS = 30.0
"""An event loop that has not turned for so long is not coming back."""
REQUEST_SECONDS = 5.0
"""From accept to the last byte."""
CONNECTIONS_MAX = 32
PER_SOURCE_MAX = 4
"""The kubelet's probes and a pair of Prometheus servers, with room."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Pulse:
    """Beaten by the event loop, read by the thread."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.ready = False

    def beat(self) -> None:
        """The loop turns."""
        self._last = time.monotonic()

    @property
    def age_seconds(self) -> float:
        """Since it last turned."""
        return time.monotonic() - self._last


class _BoundedServer(ThreadingHTTPServer):
    """At most so many connections in all and from one address; each has its time and no more."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, tuple[float, str]] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuse a source that has all its places; otherwise the oldest connection gives way."""
        source = str(client_address[0])
        with self._lock:
            if sum(one == source for _, one in self._open.values()) >= PER_SOURCE_MAX:
                return False
            if len(self._open) >= CONNECTIONS_MAX:
                oldest = next(iter(self._open))
                del self._open[oldest]
                _cut(oldest)
            self._open[request] = (time.monotonic(), source)
        return True

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection and close it."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut what is over its time; called twice a second."""
        with self._lock:
            for connection, (opened, _) in self._open.items():
                if time.monotonic() - opened >= REQUEST_SECONDS:
                    _cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that was cut is not worth a traceback."""


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Web:
    """The server."""

    def __init__(self, address: str, port: int, page: Callable[[], bytes], pulse: Pulse) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_SECONDS

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._say(200, page())
                elif path == "/healthz":
                    age = pulse.age_seconds
                    text = f"the event loop turned {age:.1f} s ago\n"
                    self._say(200 if age < STUCK_SECONDS else 503, text.encode())
                elif path == "/readyz":
                    text = "registered\n" if pulse.ready else "not registered with the kubelet\n"
                    self._say(200 if pulse.ready else 503, text.encode())
                else:
                    self._say(404, b"try /metrics, /healthz or /readyz\n")

            def _say(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Probes are not news."""

        try:
            self._server = _BoundedServer((address, port), Handler)
        except OSError as error:
            expected = f"an address and port that are free ({error.strerror})"
            raise SettingError("--metrics-port", f"{address}:{port}", expected) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def start(self) -> None:
        """Serves from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Ends."""
        self._server.shutdown()
        self._server.server_close()
