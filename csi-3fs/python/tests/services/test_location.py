"""Zone and rack from the labels of a Kubernetes node."""

from __future__ import annotations

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest
from threefs.errors import InvalidArgument, Unavailable
from threefs.services.location import api_server, labels_of, read_location, write_location
from threefs.services.settings import location_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ZONE, RACK = "topology.kubernetes.io/zone", "example.com/rack"
LABELS = {ZONE: "A", RACK: "r1", "other": "x"}


@pytest.fixture
def serve() -> Iterator[Callable[[int, bytes], http.client.HTTPConnection]]:
    """Connections to an API server with one answer, to the token of `account` only."""
    servers: list[HTTPServer] = []

    def start(status: int, content: bytes) -> http.client.HTTPConnection:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                permitted = self.headers["Authorization"] == "Bearer secret"
                node = self.path == "/api/v1/nodes/node%2F1"
                self.send_response(status if permitted and node else 403)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_arguments: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("secret\n")
    return tmp_path


def test_labels_become_a_location(
    serve: Callable[[int, bytes], http.client.HTTPConnection], account: Path, tmp_path: Path
) -> None:
    content = json.dumps({"metadata": {"labels": LABELS}}).encode()
    labels = labels_of("node/1", serve(200, content), account)
    assert labels == LABELS
    file = tmp_path / "location.json"
    for zone_label, rack_label, location in [
        (ZONE, RACK, ("A", "r1")),
        (ZONE, "", ("A", "")),
        ("", "absent", ("", "")),
    ]:
        write_location(file, labels, zone_label, rack_label)
        assert read_location(file) == location


@pytest.mark.parametrize(
    ("status", "content"),
    [(403, b"{}"), (200, b"garbage"), (200, b"[]"), (200, b"{}"), (200, b'{"metadata": 1}'),
     (200, b'{"metadata": {"labels": [1]}}'), (500, b"")],
)  # fmt: skip
def test_a_node_that_cannot_be_read_is_named(
    serve: Callable[[int, bytes], http.client.HTTPConnection],
    account: Path,
    status: int,
    content: bytes,
) -> None:
    with pytest.raises(Unavailable, match="labels of node `node/1` cannot be read"):
        labels_of("node/1", serve(status, content), account)


def test_a_missing_token_is_named(
    serve: Callable[[int, bytes], http.client.HTTPConnection], tmp_path: Path
) -> None:
    with pytest.raises(Unavailable, match="token"):
        labels_of("node/1", serve(200, b"{}"), tmp_path)


def test_outside_of_a_pod_it_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="KUBERNETES_SERVICE_HOST is not set"):
        api_server({})


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"zone": "A"}'])
def test_an_invalid_file_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "location.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidArgument, match="--location-file"):
        read_location(file)


def test_the_parts_of_a_location_are_checked() -> None:
    assert location_of("", "", "") == ""
    assert location_of("A", "", "node-1.example.com") == "A//node-1.example.com"
    for zone, rack, host, option in [
        ("a/b", "", "", "--zone"),
        ("", "r 1", "", "--rack"),
        ("", "r" * 64, "", "--rack"),
        ("", "", "h\n", "--host"),
        ("", "", "h" * 254, "--host"),
    ]:
        with pytest.raises(InvalidArgument, match=option):
            location_of(zone, rack, host)
