"""A holder that is killed leaves its mounts to the keeper; the next holder gets them back."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from threefs.csi.holder.keeper import KeeperClient
from threefs.csi.holder.mounts import Mounts

from .holder_process import PATIENCE_SECONDS, SMALL_DAEMON, HolderProcess, can_mount, end

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not can_mount(), reason="FUSE mounts need root and /dev/fuse")


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[HolderProcess]:
    holder = HolderProcess(tmp_path)
    holder.start_keeper()
    holder.start()
    yield holder
    holder.close()
    assert holder.mounts() == []


def read(path: str) -> str:
    """Read in a child: a test that hangs must not hang the tests."""
    done = subprocess.run(
        ["cat", path], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    return done.stdout


def opened(path: str) -> subprocess.Popen[str]:
    """A process with an open file, which it reads when it is told to. Not this one: its children
    close what it has open, and a close waits for a daemon.
    """
    process = subprocess.Popen(
        ["sh", "-c", 'exec 3<"$0"; echo open; read -r _; cat <&3', path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def kill(holder: HolderProcess) -> None:
    """The holder and, as they are in one container, its daemons."""
    pids = [served.pid for served in holder.client.state()[1]]
    holder.processes[-1].kill()
    holder.processes[-1].wait()
    for pid in pids:
        end(pid)


def test_mounts_and_open_files_survive_a_killed_holder(holder: HolderProcess) -> None:
    places = [holder.mount(f"volume-{number}") for number in range(3)]
    holder.client.bind(places[0], holder.place("pod"), read_only=False, flags=[])
    before = read(holder.place("pod/hello"))
    open_file = opened(holder.place("pod/hello"))
    kill(holder)
    # A program that asks in between waits for the next holder.
    asked: list[str] = []
    waiting = threading.Thread(target=lambda: asked.append(read(f"{places[1]}/hello")))
    waiting.start()
    holder.start()
    waiting.join(PATIENCE_SECONDS)
    assert asked
    for number in range(3):
        holder.wait_state(f"volume-{number}", "serving")
    after = read(holder.place("pod/hello"))
    assert after != before
    assert open_file.communicate("\n", timeout=PATIENCE_SECONDS)[0]
    # And once more: what was taken back is kept again.
    kill(holder)
    holder.start()
    holder.wait_state("volume-2", "serving")
    assert read(f"{places[2]}/hello")


def test_a_mount_that_was_undone_is_not_kept(holder: HolderProcess) -> None:
    first, second = holder.mount("first"), holder.mount("second")
    holder.client.unmount(first)
    subprocess.run(["umount", "-l", second], check=True, timeout=PATIENCE_SECONDS)
    kill(holder)
    holder.start()
    assert holder.client.state() == ([], [])
    assert read(f"{holder.mount('first')}/hello")


def test_a_mount_that_a_new_holder_did_not_get_at_first_is_taken_later(
    holder: HolderProcess, tmp_path: Path
) -> None:
    """The keeper was too slow when that holder began: it has the last descriptor nevertheless."""
    place = holder.mount("one")
    gone = holder.mount("gone")
    kill(holder)
    subprocess.run(["umount", "-l", gone], check=True, timeout=PATIENCE_SECONDS)
    assert holder.keeper is not None
    keeper = KeeperClient(holder.keeper)
    mounts = Mounts(holder.kubelet, tmp_path / "clusters", tmp_path, SMALL_DAEMON, keeper)
    mounts.handover.remind()
    try:
        assert list(keeper.known() or {}) == [place]
        assert read(f"{place}/hello")
        assert [one["target"] for one in mounts.state()["held"]] == [place]
    finally:
        mounts.unmount(place)
    assert keeper.known() == {}


def test_descriptors_that_nobody_asked_for_are_closed(holder: HolderProcess) -> None:
    assert holder.keeper is not None
    descriptors = Path(f"/proc/{holder.processes[0].pid}/fd")
    before = len(list(descriptors.iterdir()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        connection.connect(str(holder.keeper))
        connection.sendall(b'{"op": "keep", "line": {"target": "/a", "device": "0:1"}}\n')
        assert connection.recv(4096)
        socket.send_fds(connection, [b"+"], [connection.fileno()] * 5)
        assert connection.recv(4096) == b""
    # The connection that found the keeper ready may have been counted, and have ended since.
    assert len(list(descriptors.iterdir())) <= before
    assert KeeperClient(holder.keeper).known() == {}


def test_a_keeper_that_begins_anew_is_filled_by_the_next_holder(holder: HolderProcess) -> None:
    place = holder.mount("one")
    holder.processes[0].kill()
    holder.processes[0].wait()
    # Without a keeper everything goes on but its purpose.
    other = holder.mount("two")
    holder.start_keeper()
    holder.start()  # takes over from the living one
    holder.wait_state("one", "serving")
    kill(holder)
    holder.start()
    holder.wait_state("one", "serving")
    holder.wait_state("two", "serving")
    assert read(f"{place}/hello")
    assert read(f"{other}/hello")


def test_requests_that_make_no_sense_cost_the_keeper_nothing(holder: HolderProcess) -> None:
    place = holder.mount("one")
    assert holder.keeper is not None
    for line in (
        b"no JSON\n",
        b"[]\n",
        b'{"op": "give"}\n',
        b'{"op": "lines", "then": "give"}\n',
        b'{"op": "keep"}\n',
        b'{"op": "keep", "line": []}\n',
        b'{"op": "drop", "target": {}}\n',
        b"",
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE_SECONDS)
            connection.connect(str(holder.keeper))
            connection.sendall(line)
            if b"keep" in line:
                assert connection.recv(4096)
                socket.send_fds(connection, [b"+"], [connection.fileno()])
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    kill(holder)
    holder.start()
    holder.wait_state("one", "serving")
    assert read(f"{place}/hello")


def test_undoing_a_mount_does_not_wait_for_a_keeper_that_hangs(holder: HolderProcess) -> None:
    place, other = holder.mount("one"), holder.mount("two")
    keeper = holder.processes[0]
    keeper.send_signal(signal.SIGSTOP)
    holder.client.unmount(place)
    keeper.send_signal(signal.SIGCONT)
    # The keeper still has its descriptor, which is of no use to the next holder.
    kill(holder)
    holder.start()
    holder.wait_state("two", "serving")
    assert [served.target for served in holder.client.state()[1]] == [other]
