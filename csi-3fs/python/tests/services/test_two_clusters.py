"""Two clusters with one etcd prefix: the second one is refused, also when the first one dies."""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TIMERS = ("--ready-timeout", "60", "--node-failure-ms", "2000")
DATA = b"d" * (2 << 20)
OWNER_ROW = "rOWNR"


class Rows:
    """The rows of both services in etcd, without their clients."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def call(self, name: str, kind: str, **fields: str) -> Any:
        key = base64.b64encode(f"/3fs/{kind}:{OWNER_ROW}".encode()).decode()
        url, body = f"{self._endpoint}/v3/kv/{name}", json.dumps({"key": key, **fields}).encode()
        with urllib.request.urlopen(url, body, timeout=60) as reply:
            return json.load(reply)

    def owner(self, kind: str) -> bytes | None:
        rows = self.call("range", kind).get("kvs", [])
        return base64.b64decode(rows[0]["value"]) if rows else None

    def set_owner(self, kind: str, value: bytes) -> None:
        self.call("put", kind, value=base64.b64encode(value).decode())

    def remove_owner(self, kind: str) -> None:
        self.call("deleterange", kind)


def threefs(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "threefs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def rekey(kind: str, cluster: Any, *store: str) -> str:
    options = (kind, "rekey", *store, "--key-file", str(cluster.folder / "key"))
    refused = threefs(*options)
    assert refused.returncode != 0
    assert "nothing was changed" in refused.stderr
    assert "--yes" in refused.stderr
    done = threefs(*options, "--yes")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_cluster_with_the_same_prefix_is_refused_while_services_of_the_first_are_dead(
    start_cluster: Callable[..., Any], etcd: Any
) -> None:
    store = ("--etcd-endpoints", ",".join(etcd.endpoints), *TIMERS)
    first = start_cluster("first", *store, "--restart-after", "15")
    with first.client(90.0) as client:
        client.write_file("/kept", DATA)

        def refused() -> str:
            with pytest.raises(AssertionError, match="is owned by the key") as error:
                start_cluster("second", *store)
            return str(error.value)

        message = refused()
        assert "/3fs/mgmtd" in message
        assert "--etcd-prefix" in message
        assert "rekey --yes" in message
        # The lease of mgmtd is 3 s: a standby would take over before its restart.
        for service in ("mgmtd", "meta"):
            first.kill(service)
        refused()
        assert client.read_file("/kept") == DATA
        assert client.listdir("/") == ["kept"]
    assert len(first.status()["cluster"]["nodes"]) == 3
    first.wait_whole(90.0)
    first.process.kill()
    first.process.wait(60)
    refused()
    again = start_cluster("first", *store)
    with again.client(90.0) as client:
        assert client.read_file("/kept") == DATA
    other = start_cluster("second", *store, "--etcd-prefix", "/second")
    with other.client(90.0) as client:
        assert client.listdir("/") == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_rows_of_an_earlier_version_are_adopted_only_by_their_own_cluster(
    start_cluster: Callable[..., Any], etcd: Any
) -> None:
    store = ("--etcd-endpoints", ",".join(etcd.endpoints), *TIMERS)
    first = start_cluster("first", *store)
    with first.client(90.0) as client:
        client.write_file("/kept", DATA)
    first.stop()
    rows = Rows(etcd.endpoints[0])
    owners = {kind: rows.owner(kind) for kind in ("mgmtd", "meta")}
    assert None not in owners.values()
    for kind in owners:
        rows.remove_owner(kind)
    with pytest.raises(AssertionError, match="was not ready"):
        start_cluster("second", *store, "--ready-timeout", "15")
    logs = first.folder.parent / "second" / "logs"
    assert "waiting for a storage node with data of its cluster" in (logs / "mgmtd.log").read_text()
    assert [rows.owner(kind) for kind in owners] == [None, None]
    first = start_cluster("first", *store)
    with first.client(90.0) as client:
        assert client.read_file("/kept") == DATA
    assert {kind: rows.owner(kind) for kind in owners} == owners


def put_garbage(_cluster: Any, rows: Rows | None) -> None:
    """What no version has written; a folder has no other writer than its service."""
    assert rows is not None
    for kind in ("mgmtd", "meta"):
        rows.set_owner(kind, b"garbage")


def replace_key(cluster: Any, _rows: Rows | None) -> None:
    (cluster.folder / "key").write_text(secrets.token_hex(32) + "\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("where", "damage", "message"),
    [
        ("etcd", put_garbage, "invalid row OWNR"),
        ("etcd", replace_key, "is owned by the key"),
        ("folder", replace_key, "is owned by the key"),
    ],
    ids=["garbage", "key-etcd", "key-folder"],
)
def test_a_store_that_a_stopped_cluster_does_not_own_any_more_needs_rekey(
    start_cluster: Callable[..., Any],
    etcd: Any,
    where: str,
    damage: Callable[[Any, Rows | None], None],
    message: str,
) -> None:
    endpoints = ("--etcd-endpoints", ",".join(etcd.endpoints))
    store = (*(endpoints if where == "etcd" else ()), *TIMERS)
    cluster = start_cluster("first", *store)
    with cluster.client(90.0) as client:
        client.write_file("/kept", DATA)
    cluster.stop()
    damage(cluster, Rows(etcd.endpoints[0]) if where == "etcd" else None)
    with pytest.raises(AssertionError, match=message) as refused:
        start_cluster("first", *store)
    assert "rekey --yes" in str(refused.value)
    for kind in ("mgmtd", "meta"):
        options = endpoints
        if where == "folder":
            data: Path = next(cluster.folder.rglob(f"{kind}/data.mdb")).parent
            options = ("--data", str(data))
        former = "no valid key" if damage is put_garbage else ""
        assert f"before: {former}" in rekey(kind, cluster, *options)
    cluster = start_cluster("first", *store)
    with cluster.client(90.0) as client:
        assert client.read_file("/kept") == DATA
