"""What /sys says of a FUSE connection, and that not knowing is not taken for nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from threefs.csi.holder import connections
from threefs.csi.holder.undoing import Ended
from threefs.csi.holder.writing import Writing
from threefs.csi.holder_client import Undone

from .holder_process import PATIENCE_SECONDS, HolderProcess, can_mount

if TYPE_CHECKING:
    from pathlib import Path

DEVICE = "0:4000000000"
"""No connection has this number."""


def test_without_fusectl_nobody_knows_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", tmp_path)
    assert connections.waiting(DEVICE) is None
    writing = Writing("/nowhere", DEVICE)
    assert writing.answered(0.0) == ""
    assert writing.unseen


def test_what_waits_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", tmp_path)
    count = tmp_path / "4000000000" / "waiting"
    count.parent.mkdir()
    count.write_text("2\n")
    writing = Writing("/nowhere", DEVICE)
    assert writing.answered(0.0) == "2 requests have no answer yet"
    count.write_text("0\n")
    assert writing.answered(PATIENCE_SECONDS) == ""
    assert not writing.unseen


def test_an_end_that_was_not_seen_is_no_clean_one() -> None:
    assert Ended("clean").and_then(Ended("unseen")).how == "unseen"
    assert Ended("unseen").and_then(Ended("detached")).how == "detached"
    assert Ended("none").and_then(Ended("clean")).how == "clean"
    assert Undone("one", clean=True, unseen=True).how == "unseen"
    assert Undone("one", clean=True).how == "clean"


def wait_for_requests(device: str, *, expected: bool) -> None:
    """Wait until a connection has requests without an answer, or none."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while bool(seen := connections.waiting(device)) != expected:
        assert time.monotonic() < deadline, f"{seen} requests have no answer"
        time.sleep(0.01)


@pytest.mark.skipif(not can_mount(), reason="FUSE mounts need root and /dev/fuse")
def test_the_holder_makes_connections_visible(tmp_path: Path) -> None:
    holder = HolderProcess(tmp_path)
    try:
        holder.start()
        place = holder.mount("one")
        assert connections.CONNECTIONS.is_mount(), holder.log()
        served = holder.served("one")
        # What the holder itself asked may not have its answer yet.
        wait_for_requests(served.device, expected=False)
        os.kill(served.pid, signal.SIGSTOP)
        holder.wait_state("one", "stopped")
        asking = subprocess.Popen(["cat", f"{place}/hello"], stdout=subprocess.DEVNULL)
        wait_for_requests(served.device, expected=True)
        os.kill(served.pid, signal.SIGCONT)
        asking.wait(PATIENCE_SECONDS)
        holder.client.unmount(place)
        assert connections.waiting(served.device) == 0
    finally:
        holder.close()
