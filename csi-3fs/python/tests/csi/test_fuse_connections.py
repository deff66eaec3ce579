"""State of FUSE connections in /sys; an unknown state does not count as idle."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from threefs.csi.mount_manager import fuse_connections
from threefs.csi.mount_manager.unmount import UnmountOutcome
from threefs.csi.mount_manager.writeback import Writeback
from threefs.csi.mount_manager_client import UnmountResult

from .mount_manager_process import WAIT_SECONDS, MountManagerProcess, can_mount

if TYPE_CHECKING:
    from pathlib import Path

DEVICE = "0:4000000000"
"""No connection has this number."""


def test_without_fusectl_the_number_of_waiting_requests_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse_connections, "CONNECTIONS", tmp_path)
    assert fuse_connections.waiting(DEVICE) is None
    writeback = Writeback("/nowhere", DEVICE)
    assert writeback.wait_for_replies(0.0) == ""
    assert writeback.unverified


def test_waiting_requests_are_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_connections, "CONNECTIONS", tmp_path)
    count = tmp_path / "4000000000" / "waiting"
    count.parent.mkdir()
    count.write_text("2\n")
    writeback = Writeback("/nowhere", DEVICE)
    assert writeback.wait_for_replies(0.0) == "2 requests are unanswered"
    count.write_text("0\n")
    assert writeback.wait_for_replies(WAIT_SECONDS) == ""
    assert not writeback.unverified


def test_an_unobserved_end_is_not_clean() -> None:
    assert UnmountOutcome("clean").combine(UnmountOutcome("unverified")).result == "unverified"
    assert UnmountOutcome("unverified").combine(UnmountOutcome("detached")).result == "detached"
    assert UnmountOutcome("none").combine(UnmountOutcome("clean")).result == "clean"
    assert UnmountResult("one", clean=True, unverified=True).result == "unverified"
    assert UnmountResult("one", clean=True).result == "clean"


def wait_for_requests(device: str, *, expected: bool) -> None:
    """Wait until a connection has unanswered requests, or none."""
    deadline = time.monotonic() + WAIT_SECONDS
    while bool(count := fuse_connections.waiting(device)) != expected:
        assert time.monotonic() < deadline, f"{count} requests have no answer"
        time.sleep(0.01)


@pytest.mark.skipif(not can_mount(), reason="FUSE mounts need root and /dev/fuse")
def test_the_mount_manager_makes_connections_visible(tmp_path: Path) -> None:
    manager = MountManagerProcess(tmp_path)
    try:
        manager.start()
        place = manager.mount("one")
        assert fuse_connections.CONNECTIONS.is_mount(), manager.log()
        served = manager.served("one")
        # A request of the mount manager itself may still be unanswered.
        wait_for_requests(served.device, expected=False)
        os.kill(served.pid, signal.SIGSTOP)
        manager.wait_state("one", "stopped")
        asking = subprocess.Popen(["cat", f"{place}/hello"], stdout=subprocess.DEVNULL)
        wait_for_requests(served.device, expected=True)
        os.kill(served.pid, signal.SIGCONT)
        asking.wait(WAIT_SECONDS)
        manager.client.unmount(place)
        # Another mount of this machine may have the number of the device by now.
        wait_for_requests(served.device, expected=False)
    finally:
        manager.close()
