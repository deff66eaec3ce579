"""Snapshots after restores of mgmtd and of the metadata from older dumps."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import threefs

sys.path.insert(0, str(Path(__file__).parent))

from test_service_processes import Pods, all_serve, choose_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 120.0
VOLUME = "/volume"
FILES = [f"file-{number}" for number in range(6)]
BYTES = (1 << 20) + 7


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path, choose_ports(6))
    pods.start_all()
    pods.wait_states(all_serve)
    yield pods
    for process in pods.processes.values():
        process.kill()
        process.wait()


def store(pods: Pods, service: str, command: str) -> None:
    folder = str(pods.folder / service / service)
    file = str(pods.folder / f"{service}.dump")
    arguments = [sys.executable, "-m", "threefs", service, command, "--data", folder]
    done = subprocess.run(
        [*arguments, "--file", file], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr


def restore(pods: Pods, service: str) -> None:
    """The service is killed, its store is lost, and the dump is loaded."""
    pods.stop(service, signal.SIGKILL)
    shutil.rmtree(pods.folder / service / service)
    store(pods, service, "load")
    pods.start(service)


def fill(client: threefs.Client) -> dict[str, bytes]:
    contents = {name: os.urandom(BYTES) for name in FILES}
    for name, content in contents.items():
        client.write_file(f"{VOLUME}/{name}", content)
    return contents


def shown(client: threefs.Client, root: str) -> dict[str, bytes]:
    return {name: client.read_file(f"{root}/{name}") for name in FILES}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("all_stop", [False, True], ids=["storage-runs", "all-stop"])
def test_mgmtd_from_a_dump_before_the_first_snapshot(pods: Pods, *, all_stop: bool) -> None:
    file = pods.folder / "cluster.json"
    with (
        threefs.connect(file, timeout_seconds=SECONDS) as client,
        threefs.connect(file, timeout_seconds=SECONDS) as writer,
    ):
        client.mkdir(VOLUME)
        client.set_quota(VOLUME, bytes_max=1 << 30)
        contents = fill(client)
        # It knows the files in the epoch before the snapshot.
        with writer.open_raw(f"{VOLUME}/{FILES[0]}", "r+b") as opened:
            opened.write(contents[FILES[0]][:10])
            store(pods, "mgmtd", "dump")
            snapshots = client.snapshots(VOLUME)
            snapshots.create("first")
            if all_stop:
                for number in range(3):
                    pods.stop(f"storage-{number}", signal.SIGKILL)
            restore(pods, "mgmtd")
            if all_stop:
                for number in range(3):
                    pods.start(f"storage-{number}")
            opened.seek(0)
            opened.write(b"after the restore")
        pods.wait_states(all_serve)
        assert shown(client, f"{VOLUME}/.snapshots/first") == contents
        later = {**contents, FILES[0]: b"after the restore" + contents[FILES[0]][17:]}
        assert shown(client, VOLUME) == later
        snapshots.create("second")
        fill(client)
        assert shown(client, f"{VOLUME}/.snapshots/first") == contents
        assert shown(client, f"{VOLUME}/.snapshots/second") == later


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_metadata_from_a_dump_before_the_newest_snapshots(pods: Pods) -> None:
    with threefs.connect(pods.folder / "cluster.json", timeout_seconds=SECONDS) as client:
        client.mkdir(VOLUME)
        client.set_quota(VOLUME, bytes_max=1 << 30)
        snapshots = client.snapshots(VOLUME)
        kept, removed = {}, fill(client)
        snapshots.create("removed")
        kept = fill(client)
        snapshots.create("kept")
        store(pods, "meta", "dump")
        snapshots.remove("removed")
        for name in ("lost-1", "lost-2"):
            snapshots.create(name)
            newest = fill(client)
        assert removed != kept
        restore(pods, "meta")
    with threefs.connect(pods.folder / "cluster.json", timeout_seconds=SECONDS) as client:
        snapshots = client.snapshots(VOLUME)
        names = [snapshot.name for snapshot in snapshots.all()]
        assert names in (["kept"], ["removed", "kept"]), "mgmtd may not know the removal yet"
        assert shown(client, f"{VOLUME}/.snapshots/kept") == kept
        # The files were replaced since the dump, whose inodes have their chunks no more.
        current = fill(client)
        assert current != newest
        snapshots.create("again")
        fill(client)
        assert shown(client, f"{VOLUME}/.snapshots/again") == current
        assert shown(client, f"{VOLUME}/.snapshots/kept") == kept
