"""What the kernel has and 3FS has not when a volume's end is asked for: that waits, or says so."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from threefs.csi.errors import Unwritten

from .holder_process import PATIENCE_SECONDS, HolderProcess, can_mount

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from threefs.csi.holder_client import Undone

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
    """A program that keeps a file open: its second page is the kernel's alone when it says so."""

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
        assert select.select([self.process.stdout], [], [], PATIENCE_SECONDS)[0], "no word"
        return self.process.stdout.readline()


@pytest.fixture
def writers() -> Iterator[list[Writer]]:
    """They end when the mounts do, so they are waited for after that."""
    begun: list[Writer] = []
    yield begun
    for writer in begun:
        writer.process.communicate(timeout=PATIENCE_SECONDS)


@pytest.fixture
def holder(tmp_path: Path, writers: list[Writer]) -> Iterator[HolderProcess]:
    holder = HolderProcess(tmp_path)
    yield holder
    for writer in writers:
        writer.process.kill()
    holder.close()
    assert holder.mounts() == []


def staged(holder: HolderProcess, writers: list[Writer]) -> tuple[str, Writer]:
    """A volume for one node, and a program of a pod that has a file of it open."""
    place = holder.mount("one", node="node-a")
    holder.client.bind(place, holder.place("pod"), read_only=False, flags=[])
    writers.append(Writer(holder.place("pod/hello")))
    return place, writers[0]


def written(holder: HolderProcess) -> bytes:
    (file,) = holder.folder.glob("*.written")
    return file.read_bytes()[2 * PAGE :]


def undone_at_last(holder: HolderProcess, place: str) -> Undone:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return holder.client.unmount(place)
        except Unwritten:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_what_an_open_file_has_is_written_before_its_volume_goes(
    holder: HolderProcess, writers: list[Writer]
) -> None:
    holder.start()
    place, writer = staged(holder, writers)
    writer.write()
    holder.client.unmount(holder.place("pod"))
    undone = undone_at_last(holder, place)
    assert written(holder) == b"B" * PAGE
    assert undone.volume
    assert not undone.unwritten
    assert holder.mounts() == []


def test_a_stopped_daemon_keeps_its_mount_until_it_is_continued(
    holder: HolderProcess, writers: list[Writer]
) -> None:
    holder.start()
    place, writer = staged(holder, writers)
    pid = holder.served("one").pid
    os.kill(pid, signal.SIGSTOP)
    holder.wait_state("one", "stopped")
    writer.write()
    holder.client.unmount(holder.place("pod"))
    for _ in range(2):
        with pytest.raises(Unwritten, match=r"`v1:default:/volumes/one`.* its daemon is stopped"):
            holder.client.unmount(place)
    assert holder.mounts() == [place]
    os.kill(pid, signal.SIGCONT)
    assert not undone_at_last(holder, place).unwritten
    assert written(holder) == b"B" * PAGE


def test_a_daemon_that_starts_after_a_hand_over_is_waited_for(
    holder: HolderProcess, writers: list[Writer], tmp_path: Path
) -> None:
    gated, gate = tmp_path / "gated.sh", tmp_path / "gate"
    python = " ".join(holder.daemon)
    gated.write_text(GATED.format(flag=tmp_path / "flag", gate=gate, python=python))
    holder.daemon = ["/bin/sh", str(gated)]
    holder.start()
    place, writer = staged(holder, writers)
    holder.start()
    assert holder.wait_state("one", "starting")
    writer.write()
    holder.client.unmount(holder.place("pod"))
    with pytest.raises(Unwritten, match="its daemon is starting"):
        holder.client.unmount(place)
    gate.touch()
    assert not undone_at_last(holder, place).unwritten
    assert written(holder) == b"B" * PAGE


def test_without_hope_it_is_undone_in_the_end_and_told(
    holder: HolderProcess, writers: list[Writer]
) -> None:
    holder.arguments = ("--write-patience", "0.5")
    holder.start()
    place, writer = staged(holder, writers)
    pid = holder.served("one").pid
    os.kill(pid, signal.SIGSTOP)
    holder.wait_state("one", "stopped")
    writer.write()
    holder.client.unmount(holder.place("pod"))
    with pytest.raises(Unwritten, match=r"asked for 0\.5 s, it is undone without"):
        holder.client.unmount(place)
    undone = undone_at_last(holder, place)
    assert undone.how == "unwritten"
    assert "its daemon is stopped" in undone.unwritten
    assert written(holder) == b""
    assert holder.mounts() == []
    assert "v1:default:/volumes/one: detached, data not written: " in holder.log()


def test_a_volume_that_is_staged_again_has_all_patience_again(
    holder: HolderProcess, writers: list[Writer]
) -> None:
    holder.arguments = ("--write-patience", "0")
    holder.start()
    place, writer = staged(holder, writers)
    pid = holder.served("one").pid
    holder.client.unmount(holder.place("pod"))
    writer.write()
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        holder.wait_state("one", "stopped")
        with pytest.raises(Unwritten):
            holder.client.unmount(place)
        os.kill(pid, signal.SIGCONT)
        assert holder.mount("one", node="node-a") == place
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            undone = holder.client.unmount(place)
            break
        except Unwritten:
            assert time.monotonic() < deadline
            holder.mount("one", node="node-a")
    assert not undone.unwritten
    assert written(holder) == b"B" * PAGE
