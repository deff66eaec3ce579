"""`threefs fsck` of a cluster with snapshots: no false findings, and losses are found."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import threefs

sys.path.insert(0, str(Path(__file__).parent))

from test_lost_chunks import EarlierDisk
from test_service_processes import Pods, choose_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
SECONDS = 120


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path, choose_ports(6), replicas=1)
    yield pods
    for process in pods.processes.values():
        process.kill()
        process.wait()


def fsck(*options: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "threefs", "fsck", *options, "-o", "json"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert result.returncode in (0, 1), result.stderr
    assert result.stdout, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def repaired(pods: Pods) -> dict[str, Any]:
    cluster = str(pods.folder / "cluster.json")
    return fsck("--chunks", "--cluster", cluster, "--repair", "--grace", "0")


def is_clean(pods: Pods) -> dict[str, Any]:
    assert fsck("--data", str(pods.folder / "meta" / "meta"))["findings"] == []
    report = repaired(pods)
    assert report["leaked"]["inodes"] == report["removed"]["inodes"] == 0, report
    assert report["missing_chunks"] == report["unconfirmed_chunks"] == 0, report
    assert report["not_read"] == {}
    return report


def test_snapshots_are_no_findings_and_their_losses_are(pods: Pods) -> None:
    pods.start_all()
    with threefs.connect(pods.folder / "cluster.json", timeout_seconds=60) as client:
        client.mkdir("/v")
        client.set_quota("/v", bytes_max=1 << 30)
        content = bytes(range(256)) * (12 * MIB // 256)
        for name in ("changed", "removed", "kept"):
            client.write_file(f"/v/{name}", content)
        snapshots = client.snapshots("/v")
        snapshots.create("first")
        # The same inode, so its chunks get another version.
        client.batch_write([("/v/changed", 0, content)])
        client.remove("/v/removed")
        snapshots.create("second")
        client.batch_write([("/v/changed", 0, content[: 2 * MIB])])
        report = is_clean(pods)
        assert report["bytes"] >= 48 * MIB, "chunks of snapshots are read, too"

        abort_creation(pods)
        client.batch_write([("/v/changed", 0, content)])
        is_clean(pods)
        snapshots.remove("second")
        is_clean(pods)

        disk = EarlierDisk(pods, "storage-0")
        client.write_file("/v/lost", content)
        snapshots.create("third")
        client.batch_write([("/v/changed", 0, content)])
        is_clean(pods)
        disk.put_back()
        report = repaired(pods)
        assert report["leaked"]["inodes"] == 0, "nothing is removed that a snapshot shows"
        missing = {(file["path"], file["snapshot"]): file for file in report["missing"]}
        assert missing.keys() == {("/v/lost", None), (None, "/v/.snapshots/third")}
        tree, snapshot = missing["/v/lost", None], missing[None, "/v/.snapshots/third"]
        assert tree["indexes"] == snapshot["indexes"]
        assert snapshot["inode"] == client.stat("/v/.snapshots/third/lost").inode

        # Its inode may be read until it is collected, which takes minutes, so it is not clean yet.
        client.remove("/v/lost")
        snapshots.remove("third")
        assert repaired(pods)["leaked"]["inodes"] == 0
        assert [snapshot.name for snapshot in snapshots.all()] == ["first"]
        assert client.listdir("/v/.snapshots/first") == ["changed", "kept", "removed"]


def abort_creation(pods: Pods) -> None:
    """A creation that is given up, because mgmtd does not answer."""
    mgmtd = pods.processes["mgmtd"]
    mgmtd.send_signal(signal.SIGSTOP)
    try:
        with (
            threefs.connect(pods.folder / "cluster.json", timeout_seconds=15) as impatient,
            pytest.raises(threefs.ThreeFSError),
        ):
            impatient.snapshots("/v").create("aborted")
    finally:
        mgmtd.send_signal(signal.SIGCONT)
