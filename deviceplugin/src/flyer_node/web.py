"""/metrics, /healthz and /readyz from a thread of their own.

They answer from memory. Health means that the event loop turns: hardware that hangs is a finding,
never a reason to be restarted.
"""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from flyer_node.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Pulse", "Web"]

STUCK_SECONDS = 30.0
"""An event loop that has not turned for so long is not coming back."""
REQUEST_SECONDS = 5.0
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
            self._server = ThreadingHTTPServer((address, port), Handler)
        except OSError as error:
            expected = f"an address and port that are free ({error.strerror})"
            raise SettingError("--metrics-port", f"{address}:{port}", expected) from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def start(self) -> None:
        """Serves from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Ends."""
        self._server.shutdown()
        self._server.server_close()
