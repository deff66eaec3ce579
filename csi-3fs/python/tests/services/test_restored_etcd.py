"""etcd is restored from an older backup: services refuse it, and both ways out keep the files."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TIMERS = ("--ready-timeout", "60", "--node-failure-ms", "5000")
DATA = b"d" * (2 << 20)


def serves(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"{endpoint}/health", timeout=5) as reply:
            return bool(json.load(reply)["health"] == "true")
    except OSError:
        return False


def change_recorded_cluster(endpoint: str, prefix: str) -> None:
    """What `etcdutl snapshot restore` does: the members have another id than the recorded one."""
    key = base64.b64encode(f"{prefix}:i/identity".encode()).decode()

    def call(name: str, **fields: str) -> Any:
        url, body = f"{endpoint}/v3/kv/{name}", json.dumps({"key": key, **fields}).encode()
        with urllib.request.urlopen(url, body, timeout=60) as reply:
            return json.load(reply)

    # Format, id and raft index; a bit of the id is inverted.
    identity = bytearray(base64.b64decode(call("range")["kvs"][0]["value"]))
    identity[1] ^= 1
    call("put", value=base64.b64encode(identity).decode())


def threefs(*arguments: str) -> None:
    command = [sys.executable, "-m", "threefs", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("accepted", [False, True], ids=["newer-dump", "accepted"])
def test_a_restored_etcd_is_refused_until_a_newer_dump_is_loaded_or_the_loss_is_accepted(
    start_cluster: Callable[..., Any], etcd: Any, tmp_path: Path, *, accepted: bool
) -> None:
    endpoints = ("--etcd-endpoints", ",".join(etcd.endpoints))
    cluster = start_cluster("data", *endpoints, *TIMERS)
    with cluster.client(60.0) as client:
        client.write_file("/early", DATA)
    cluster.stop()
    etcd.end()
    shutil.copytree(etcd.folder, tmp_path / "backup")
    etcd.start_all()
    cluster = start_cluster("data", *endpoints, *TIMERS)
    with cluster.client(60.0) as client:
        client.write_file("/late", DATA)
    for kind in ("mgmtd", "meta"):
        threefs(kind, "dump", *endpoints, "--file", str(tmp_path / kind))
    cluster.stop()
    etcd.end()
    shutil.rmtree(etcd.folder)
    shutil.copytree(tmp_path / "backup", etcd.folder)
    etcd.start_all()
    cluster.wait_for(lambda: serves(etcd.endpoints[0]), 60, "leader")
    for kind in ("mgmtd", "meta"):
        change_recorded_cluster(etcd.endpoints[0], f"/3fs/{kind}")

    with pytest.raises(AssertionError, match="restored from an older backup") as refused:
        start_cluster("data", *endpoints, "--ready-timeout", "20")
    assert "--etcd-accept-restored" in str(refused.value)

    if accepted:
        cluster = start_cluster("data", *endpoints, "--etcd-accept-restored", *TIMERS)
    else:
        # A dump that is newer than the backup, under an unused prefix: nothing is lost.
        newer = (*endpoints, "--etcd-prefix", "/newer")
        for kind in ("mgmtd", "meta"):
            threefs(kind, "load", *newer, "--file", str(tmp_path / kind))
        cluster = start_cluster("data", *newer, *TIMERS)
    with cluster.client(60.0) as client:
        assert client.read_file("/early") == DATA
        assert client.listdir("/") == (["early"] if accepted else ["early", "late"])
        if not accepted:
            assert client.read_file("/late") == DATA
        # No new file contains chunks of a lost one.
        with client.open_raw("/newest", "w") as file:
            file.truncate(len(DATA))
        assert client.read_file("/newest") == bytes(len(DATA))
