"""Zone and rack from the labels of a Kubernetes node."""

from __future__ import annotations

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest
from threefs import _native
from threefs.cli.app import fuse
from threefs.errors import InvalidArgument, Unavailable
from threefs.location import location_of, own_location, read_location
from threefs.services.location import api_server, labels_of, write_location

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


def test_a_client_uses_the_variables_of_storage_services(tmp_path: Path) -> None:
    assert own_location({}) == ""
    variables = {"THREEFS_ZONE": "A", "THREEFS_RACK": "r1", "THREEFS_HOST": "h1"}
    assert own_location(variables) == "A/r1/h1"
    file = tmp_path / "location.json"
    file.write_text('{"zone": "B", "rack": ""}')
    assert own_location({**variables, "THREEFS_LOCATION_FILE": str(file)}) == "B//h1"
    with pytest.raises(InvalidArgument, match="THREEFS_HOST"):
        own_location({"THREEFS_HOST": "a b"})


def test_a_mount_reads_near_its_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configs: list[dict[str, object]] = []
    monkeypatch.setattr(_native, "run_fuse", lambda text: configs.append(json.loads(text)))
    cluster = tmp_path / "cluster.json"
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    addresses = {"mgmtd": ["h:1"], "meta": "h:2", "key_file": str(key)}
    cluster.write_text(json.dumps(addresses))
    for name, value in (("ZONE", "A"), ("RACK", ""), ("HOST", "h7")):
        monkeypatch.setenv(f"THREEFS_{name}", value)
    fuse(fd=3, cluster=cluster, state=tmp_path / "state")
    assert configs[0]["location"] == "A//h7"
