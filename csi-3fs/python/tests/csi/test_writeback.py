"""Write-back at an unmount: the volume stays until its data is written, or the loss is reported."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from threefs.csi.errors import DirtyMount

from .mount_manager_process import WAIT_SECONDS, MountManagerProcess, can_mount

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from threefs.csi.mount_manager_client import UnmountResult

pytestmark = pytest.mark.skipif(not can_mount(), reason="FUSE mounts need root and /dev/fuse")

PAGE = 4096
WRITER = """
import os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
os.pwrite(descriptor, b"A" * 4096, 4096)
os.fsync(descriptor)
print("opened", flush=True)
sys.stdin.readline()
os.pwrite(descriptor, b"B" * 4096, 8192)
print("wrote", flush=True)
sys.stdin.readline()
"""
GATED = """#!/bin/sh
if [ -e {flag} ]; then while [ ! -e {gate} ]; do sleep 0.05; done; fi
touch {flag}
exec {python} "$@"
"""


class Writer:
    """A program with an open file; when it reports, its second page is only in the page cache."""

    def __init__(self, path: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", WRITER, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._said() == "opened\n"

    def write(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self._said() == "wrote\n"

    def _said(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], WAIT_SECONDS)[0], "no output"
        return self.process.stdout.readline()


@pytest.fixture
def writers() -> Iterator[list[Writer]]:
    """Programs end with their mounts, so the fixture waits for them afterwards."""
    started: list[Writer] = []
    yield started
    for writer in started:
        writer.process.communicate(timeout=WAIT_SECONDS)


@pytest.fixture
def manager(tmp_path: Path, writers: list[Writer]) -> Iterator[MountManagerProcess]:
    manager = MountManagerProcess(tmp_path)
    yield manager
    for writer in writers:
        writer.process.kill()
    manager.close()
    assert manager.mounts() == []


def staged(manager: MountManagerProcess, writers: list[Writer]) -> tuple[str, Writer]:
    """A volume for one node, and a pod's program that has one of its files open."""
    place = manager.mount("one", node="node-a")
    manager.client.bind(place, manager.place("pod"), read_only=False, flags=[])
    writers.append(Writer(manager.place("pod/hello")))
    return place, writers[0]


def saved_data(manager: MountManagerProcess) -> bytes:
    (file,) = manager.folder.glob("*.written")
    return file.read_bytes()[2 * PAGE :]


def unmounted_at_last(manager: MountManagerProcess, place: str) -> UnmountResult:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return manager.client.unmount(place)
        except DirtyMount:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_data_of_an_open_file_is_written_before_the_unmount(
    manager: MountManagerProcess, writers: list[Writer]
) -> None:
    manager.start()
    place, writer = staged(manager, writers)
    writer.write()
    manager.client.unmount(manager.place("pod"))
    outcome = unmounted_at_last(manager, place)
    assert saved_data(manager) == b"B" * PAGE
    assert outcome.volume
    assert not outcome.data_lost
    assert manager.mounts() == []


def test_a_stopped_daemon_keeps_its_mount_until_it_continues(
    manager: MountManagerProcess, writers: list[Writer]
) -> None:
    manager.start()
    place, writer = staged(manager, writers)
    pid = manager.served("one").pid
    os.kill(pid, signal.SIGSTOP)
    manager.wait_state("one", "stopped")
    writer.write()
    manager.client.unmount(manager.place("pod"))
    for _ in range(2):
        with pytest.raises(DirtyMount, match=r"`v1:default:/volumes/one`.* its daemon is stopped"):
            manager.client.unmount(place)
    assert manager.mounts() == [place]
    os.kill(pid, signal.SIGCONT)
    assert not unmounted_at_last(manager, place).data_lost
    assert saved_data(manager) == b"B" * PAGE


def test_a_daemon_that_starts_after_a_handover_is_awaited(
    manager: MountManagerProcess, writers: list[Writer], tmp_path: Path
) -> None:
    gated, gate = tmp_path / "gated.sh", tmp_path / "gate"
    python = " ".join(manager.daemon)
    gated.write_text(GATED.format(flag=tmp_path / "flag", gate=gate, python=python))
    manager.daemon = ["/bin/sh", str(gated)]
    manager.start()
    place, writer = staged(manager, writers)
    manager.start()
    assert manager.wait_state("one", "starting")
    writer.write()
    manager.client.unmount(manager.place("pod"))
    with pytest.raises(DirtyMount, match="its daemon is starting"):
        manager.client.unmount(place)
    gate.touch()
    assert not unmounted_at_last(manager, place).data_lost
    assert saved_data(manager) == b"B" * PAGE


def test_a_mount_that_cannot_be_written_is_detached_at_the_deadline_and_reported(
    manager: MountManagerProcess, writers: list[Writer]
) -> None:
    manager.arguments = ("--writeback-timeout", "0.5")
    manager.start()
    place, writer = staged(manager, writers)
    pid = manager.served("one").pid
    os.kill(pid, signal.SIGSTOP)
    manager.wait_state("one", "stopped")
    writer.write()
    manager.client.unmount(manager.place("pod"))
    with pytest.raises(DirtyMount, match=r"after 0\.5 s of retries it is detached"):
        manager.client.unmount(place)
    outcome = unmounted_at_last(manager, place)
    assert outcome.result == "data_lost"
    assert "its daemon is stopped" in outcome.data_lost
    assert saved_data(manager) == b""
    assert manager.mounts() == []
    assert "v1:default:/volumes/one: detached, data not written: " in manager.log()


def test_staging_again_restarts_the_write_back_deadline(
    manager: MountManagerProcess, writers: list[Writer]
) -> None:
    manager.arguments = ("--writeback-timeout", "0")
    manager.start()
    place, writer = staged(manager, writers)
    pid = manager.served("one").pid
    manager.client.unmount(manager.place("pod"))
    writer.write()
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        manager.wait_state("one", "stopped")
        with pytest.raises(DirtyMount):
            manager.client.unmount(place)
        os.kill(pid, signal.SIGCONT)
        assert manager.mount("one", node="node-a") == place
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            outcome = manager.client.unmount(place)
            break
        except DirtyMount:
            assert time.monotonic() < deadline
            manager.mount("one", node="node-a")
    assert not outcome.data_lost
    assert saved_data(manager) == b"B" * PAGE
