"""The descriptor store keeps the mounts of a killed mount manager for the next one."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from threefs.csi.mount_manager.fd_store import FdStoreClient
from threefs.csi.mount_manager.service import MountService

from .mount_manager_process import (
    SMALL_DAEMON,
    WAIT_SECONDS,
    MountManagerProcess,
    can_mount,
    end,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not can_mount(), reason="FUSE mounts need root and /dev/fuse")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[MountManagerProcess]:
    manager = MountManagerProcess(tmp_path)
    manager.start_fd_store()
    manager.start()
    yield manager
    manager.close()
    assert manager.mounts() == []


def read(path: str) -> str:
    """Read in a child process, so that a hung read fails the test with a timeout."""
    result = subprocess.run(
        ["cat", path], capture_output=True, text=True, timeout=WAIT_SECONDS, check=True
    )
    return result.stdout


def opened(path: str) -> subprocess.Popen[str]:
    """A process with an open file, which it reads on request. It is separate from this process,
    whose children close its open files, and a close waits for a daemon.
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


def kill(manager: MountManagerProcess) -> None:
    """Kill the mount manager and its daemons, which share its container."""
    pids = [served.pid for served in manager.client.state()[1]]
    manager.processes[-1].kill()
    manager.processes[-1].wait()
    for pid in pids:
        end(pid)


def test_mounts_and_open_files_survive_a_killed_mount_manager(manager: MountManagerProcess) -> None:
    places = [manager.mount(f"volume-{number}") for number in range(3)]
    manager.client.bind(places[0], manager.place("pod"), read_only=False, flags=[])
    before = read(manager.place("pod/hello"))
    open_file = opened(manager.place("pod/hello"))
    kill(manager)
    # A request in between waits for the next manager.
    contents: list[str] = []
    waiting = threading.Thread(target=lambda: contents.append(read(f"{places[1]}/hello")))
    waiting.start()
    manager.start()
    waiting.join(WAIT_SECONDS)
    assert contents
    for number in range(3):
        manager.wait_state(f"volume-{number}", "serving")
    after = read(manager.place("pod/hello"))
    assert after != before
    assert open_file.communicate("\n", timeout=WAIT_SECONDS)[0]
    # Again: recovered mounts are stored again.
    kill(manager)
    manager.start()
    manager.wait_state("volume-2", "serving")
    assert read(f"{places[2]}/hello")


def test_an_unmounted_volume_is_removed_from_the_store(manager: MountManagerProcess) -> None:
    first, second = manager.mount("first"), manager.mount("second")
    manager.client.unmount(first)
    subprocess.run(["umount", "-l", second], check=True, timeout=WAIT_SECONDS)
    kill(manager)
    manager.start()
    assert manager.client.state() == ([], [])
    assert read(f"{manager.mount('first')}/hello")


def test_a_mount_that_the_store_returned_late_is_adopted(
    manager: MountManagerProcess, tmp_path: Path
) -> None:
    """The descriptor store answered too late at the start, but still has the last descriptor."""
    place = manager.mount("one")
    missing = manager.mount("gone")
    kill(manager)
    subprocess.run(["umount", "-l", missing], check=True, timeout=WAIT_SECONDS)
    assert manager.fd_store is not None
    fd_store = FdStoreClient(manager.fd_store)
    service = MountService(manager.kubelet, tmp_path / "clusters", tmp_path, SMALL_DAEMON, fd_store)
    service.handover.reconcile()
    try:
        assert list(fd_store.devices() or {}) == [place]
        assert read(f"{place}/hello")
        assert [mount["target"] for mount in service.state()["mounts"]] == [place]
    finally:
        service.unmount(place)
    assert fd_store.devices() == {}


def test_surplus_descriptors_are_closed(manager: MountManagerProcess) -> None:
    assert manager.fd_store is not None
    descriptors = Path(f"/proc/{manager.processes[0].pid}/fd")
    before = len(list(descriptors.iterdir()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(WAIT_SECONDS)
        connection.connect(str(manager.fd_store))
        connection.sendall(b'{"op": "put", "mount": {"target": "/a", "device": "0:1"}}\n')
        assert connection.recv(4096)
        socket.send_fds(connection, [b"+"], [connection.fileno()] * 5)
        assert connection.recv(4096) == b""
    # The count before may include the connection of the readiness check.
    assert len(list(descriptors.iterdir())) <= before
    assert FdStoreClient(manager.fd_store).devices() == {}


def test_a_restarted_fd_store_is_filled_again(
    manager: MountManagerProcess,
) -> None:
    place = manager.mount("one")
    manager.processes[0].kill()
    manager.processes[0].wait()
    # Without a descriptor store everything else works.
    other = manager.mount("two")
    manager.start_fd_store()
    manager.start()  # takes over from the running one
    manager.wait_state("one", "serving")
    kill(manager)
    manager.start()
    manager.wait_state("one", "serving")
    manager.wait_state("two", "serving")
    assert read(f"{place}/hello")
    assert read(f"{other}/hello")


def test_invalid_requests_do_not_affect_the_fd_store(
    manager: MountManagerProcess,
) -> None:
    place = manager.mount("one")
    assert manager.fd_store is not None
    for line in (
        b"no JSON\n",
        b"[]\n",
        b'{"op": "send"}\n',
        b'{"op": "list", "then": "send"}\n',
        b'{"op": "put"}\n',
        b'{"op": "put", "mount": []}\n',
        b'{"op": "delete", "target": {}}\n',
        b"",
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(WAIT_SECONDS)
            connection.connect(str(manager.fd_store))
            connection.sendall(line)
            if b"put" in line:
                assert connection.recv(4096)
                socket.send_fds(connection, [b"+"], [connection.fileno()])
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    kill(manager)
    manager.start()
    manager.wait_state("one", "serving")
    assert read(f"{place}/hello")


def test_an_unmount_does_not_wait_for_a_hung_fd_store(
    manager: MountManagerProcess,
) -> None:
    place, other = manager.mount("one"), manager.mount("two")
    fd_store = manager.processes[0]
    fd_store.send_signal(signal.SIGSTOP)
    manager.client.unmount(place)
    fd_store.send_signal(signal.SIGCONT)
    # The descriptor store still has its descriptor, which the next manager ignores.
    kill(manager)
    manager.start()
    manager.wait_state("two", "serving")
    assert [served.target for served in manager.client.state()[1]] == [other]
