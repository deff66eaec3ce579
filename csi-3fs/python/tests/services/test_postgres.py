"""mgmtd and meta keep their rows in real PostgreSQL servers, whose primary is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Longer than a failover, so that nodes stay alive during one.
TIMERS = ("--ready-timeout", "120", "--node-failure-ms", "5000")


def report(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "threefs", *arguments, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    output: dict[str, Any] = json.loads(done.stdout)
    return output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_files_outlive_the_primary_services_and_the_cluster(
    start_cluster: Callable[..., Any], postgres: Any
) -> None:
    options = ("data", "--postgres-url", postgres.url, "--metas", "2", *TIMERS)
    cluster = start_cluster(*options)
    assert not (cluster.folder / "data" / "meta").exists(), "its rows are in PostgreSQL"
    with cluster.client(120.0) as client:
        written = {}
        for number in range(20):
            path, data = f"/file-{number}", bytes([number]) * 300_000
            client.write_file(path, data)
            written[path] = data
            if number == 8:
                postgres.fail_over()
        for service in ("meta", "mgmtd"):
            cluster.kill(service)
        for path, data in written.items():
            assert client.read_file(path) == data
        client.write_file("/after", b"after")
    cluster.stop()
    checked = report("fsck", "--postgres-url", postgres.url)
    assert checked["findings_total"] == 0
    again = start_cluster(*options)
    with again.client(120.0) as client:
        assert client.read_file("/after") == b"after"
        assert client.read_file("/file-19") == written["/file-19"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_is_converted_to_postgres_and_back(
    start_cluster: Callable[..., Any], postgres: Any, tmp_path: Path
) -> None:
    cluster = start_cluster("data", *TIMERS)
    folders = {kind: cluster.folder / "data" / kind for kind in ("meta", "mgmtd")}
    shared = ["--postgres-url", postgres.url]

    def convert(kind: str, source: list[str], target: list[str], file: Path) -> None:
        dumped = report(kind, "dump", *source, "--file", str(file))
        assert report(kind, "verify", "--file", str(file)) == dumped
        assert report(kind, "load", *target, "--file", str(file)) == dumped

    with cluster.client(120.0) as client:
        client.write_file("/kept", b"k" * 300_000)
        client.mkdir("/limited")
        client.set_quota("/limited", inodes_max=1)
        client.write_file("/limited/a", b"a" * 70_000)
    cluster.stop()
    for kind, folder in folders.items():
        convert(kind, ["--data", str(folder)], shared, tmp_path / f"{kind}.dump")
        folder.rename(tmp_path / f"{kind}.embedded")
    cluster = start_cluster("data", *shared, *TIMERS)
    with cluster.client(120.0) as client:
        assert client.read_file("/kept") == b"k" * 300_000
        client.write_file("/later", b"l")
    cluster.stop()
    assert not any(folder.exists() for folder in folders.values())
    for kind, folder in folders.items():
        convert(kind, shared, ["--data", str(folder)], tmp_path / f"{kind}.postgres")
    cluster = start_cluster("data", *TIMERS)
    with cluster.client(120.0) as client:
        assert client.read_file("/later") == b"l"
        quota = client.quota("/limited")
        assert quota is not None
        assert (quota.bytes_used, quota.inodes_max, quota.inodes_used) == (70_000, 1, 1)
