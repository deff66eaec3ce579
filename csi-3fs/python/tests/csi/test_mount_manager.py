"""The mount manager with real FUSE mounts: daemons are replaced, mount managers hand over."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from threefs.csi.errors import (
    AlreadyExists,
    CsiError,
    FailedPrecondition,
    InvalidArgument,
    Unreachable,
)
from threefs.csi.mount_manager import mountinfo
from threefs.csi.mount_manager.daemon_factory import daemon_user, ticket_folder
from threefs.csi.mount_manager.fd_store import FdStoreClient
from threefs.csi.mount_manager.protocol import Refused
from threefs.csi.mount_manager.service import MountService
from threefs.csi.mount_manager_client import MountManagerClient, UnmountResult

from .mount_manager_process import WAIT_SECONDS, MountManagerProcess, can_mount, end

if TYPE_CHECKING:
    from collections.abc import Iterator

    from threefs.csi.mount_manager.mount_table import ManagedMount

pytestmark = pytest.mark.skipif(not can_mount(), reason="FUSE mounts need root and /dev/fuse")

UNDO_SECONDS_MAX = 5.0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[MountManagerProcess]:
    manager = MountManagerProcess(tmp_path)
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


def test_a_daemon_uses_the_ticket_of_its_volume_where_there_is_one(
    manager: MountManagerProcess,
) -> None:
    """With a ticket the volume's directory is the root of the daemon's tree."""
    volume = "v1:default:/volumes/two"
    folder = manager.folder / "tickets" / ticket_folder(volume)
    folder.mkdir(parents=True)
    (folder / "cluster.json").write_text("{}")
    (folder / "ticket").write_text("")
    target = manager.place("two")
    manager.client.mount(volume, "default", "/volumes/two/data", target, read_only=False)
    assert read(f"{target}/hello").split()[1] == "/data"
    [served] = manager.client.state()[1]
    command = Path(f"/proc/{served.pid}/cmdline").read_bytes().decode().split("\0")
    assert command[command.index("--cluster") + 1] == str(folder / "cluster.json")
    manager.client.unmount(target)


def test_a_daemon_with_a_ticket_runs_as_a_user_that_can_read_only_this_ticket(
    manager: MountManagerProcess,
) -> None:
    users = set()
    for name in ("two", "three"):
        volume = f"v1:default:/volumes/{name}"
        folder = manager.folder / "tickets" / ticket_folder(volume)
        folder.mkdir(mode=0o700, parents=True)
        for file in ("cluster.json", "ticket"):
            (folder / file).write_text("{}")
            (folder / file).chmod(0o600)
        target = manager.place(name)
        manager.client.mount(volume, "default", f"/volumes/{name}/data", target, read_only=False)
        user = daemon_user(volume)
        status = Path(f"/proc/{manager.served(name).pid}/status").read_text()
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert facts["Uid"].split() == facts["Gid"].split() == [str(user)] * 4
        assert int(facts["CapEff"], 16) == int(facts["CapPrm"], 16) == 0
        for path, mode in (
            (folder, 0o42750),
            (folder / "ticket", 0o100640),
            (folder / "cluster.json", 0o100640),
        ):
            about = path.stat()
            assert (about.st_uid, about.st_gid, about.st_mode) == (0, user, mode), path
        [state] = [
            path.stat()
            for path in manager.folder.glob("mount-*.state")
            if path.stat().st_uid == user
        ]
        assert state.st_mode == 0o100600
        # Files that the node service renews have the folder's group.
        (folder / "new").touch()
        assert (folder / "new").stat().st_gid == user
        users.add(user)
    assert len(users) == 2
    for name in ("two", "three"):
        manager.client.unmount(manager.place(name))


def test_a_mount_serves_and_is_removed_with_its_directory(manager: MountManagerProcess) -> None:
    place = manager.mount("one")
    assert read(f"{place}/hello").endswith("/volumes/one/data\n")
    mount_points, mounts = manager.client.state()
    assert [(m.volume, m.target, m.read_only) for m in mount_points] == [
        ("v1:default:/volumes/one", place, False)
    ]
    assert [mount.state for mount in mounts] == ["serving"]
    assert manager.client.unmount(place) == UnmountResult("v1:default:/volumes/one", clean=True)
    assert manager.mounts() == []
    assert not Path(place).exists()
    assert manager.client.state() == ([], [])
    assert not Path(f"/proc/{mounts[0].pid}").exists()


def test_calls_may_be_repeated(manager: MountManagerProcess) -> None:
    place = manager.mount("one")
    manager.mount("one")
    for _ in range(2):
        manager.client.bind(place, manager.place("pod"), read_only=False, flags=[])
    assert len(manager.mounts()) == 2
    for _ in range(2):
        manager.client.unmount(manager.place("pod"))
        manager.client.unmount(manager.place("never"))
    for _ in range(2):
        manager.client.unmount(place)
    assert manager.mounts() == []


def test_an_existing_mount_is_not_replaced(
    manager: MountManagerProcess,
) -> None:
    place = manager.mount("one")
    with pytest.raises(AlreadyExists, match="already mounted"):
        manager.client.mount("v1:default:/x/two", "default", "/x", place, read_only=False)
    with pytest.raises(AlreadyExists):
        manager.mount("one", read_only=True)
    two = manager.mount("two")
    manager.client.bind(place, manager.place("pod"), read_only=True, flags=[])
    with pytest.raises(AlreadyExists, match="read-only"):
        manager.client.bind(place, manager.place("pod"), read_only=False, flags=[])
    with pytest.raises(AlreadyExists, match="is mounted at"):
        manager.client.bind(two, manager.place("pod"), read_only=True, flags=[])
    with pytest.raises(AlreadyExists, match="no 3FS volume"):
        manager.client.bind(manager.place("empty"), manager.place("p"), read_only=True, flags=[])


def test_a_volume_stays_staged_while_a_pod_has_it(manager: MountManagerProcess) -> None:
    place = manager.mount("one")
    manager.client.bind(place, manager.place("pod"), read_only=False, flags=[])
    with pytest.raises(FailedPrecondition, match=r"still mounted at .*pod"):
        manager.client.unmount(place)
    assert read(manager.place("pod/hello"))
    manager.client.unmount(manager.place("pod"))
    assert read(f"{place}/hello")


def test_a_read_only_bind_mount_does_not_affect_others(manager: MountManagerProcess) -> None:
    place = manager.mount("one")
    manager.client.bind(place, manager.place("ro"), read_only=True, flags=["noexec"])
    manager.client.bind(place, manager.place("rw"), read_only=False, flags=[])
    by_target = {mount.target: mount for mount in mountinfo.read()}
    assert by_target[manager.place("ro")].read_only
    assert not by_target[manager.place("rw")].read_only
    assert not by_target[place].read_only


def test_a_killed_daemon_is_replaced_and_readers_only_wait(manager: MountManagerProcess) -> None:
    place = manager.mount("one")
    manager.client.bind(place, manager.place("pod"), read_only=False, flags=[])
    first = manager.served("one").pid
    descriptor = os.open(manager.place("pod/hello"), os.O_RDONLY)
    try:
        for count in range(1, 4):
            os.kill(manager.served("one").pid, signal.SIGKILL)
            assert "/volumes/one/data" in read(manager.place("pod/hello"))
            assert manager.wait_state("one", "serving").restarts == count
        assert str(first) not in read(manager.place("pod/hello"))
        assert os.pread(descriptor, 100, 0)
    finally:
        os.close(descriptor)


def test_a_pending_read_is_answered_by_the_next_daemon(
    manager: MountManagerProcess,
) -> None:
    manager.mount("one")
    pid = manager.served("one").pid
    os.kill(pid, signal.SIGSTOP)
    assert manager.wait_state("one", "stopped").message.startswith(f"process {pid} is stopped")
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(read(manager.place("one/hello"))))
    reader.start()
    os.kill(pid, signal.SIGKILL)
    reader.join(WAIT_SECONDS)
    assert texts
    assert str(pid) not in texts[0]


@pytest.mark.parametrize("trouble", ["killed for good", "stopped", "serving"])
def test_an_unmount_takes_at_most_its_time_limit(tmp_path: Path, trouble: str) -> None:
    manager = MountManagerProcess(tmp_path)
    if trouble == "killed for good":
        once = tmp_path / "once.sh"
        once.write_text(ONCE.format(flag=tmp_path / "flag", python=" ".join(manager.daemon)))
        manager.daemon = ["/bin/sh", str(once)]
    manager.start()
    try:
        place = manager.mount("one")
        manager.client.bind(place, manager.place("pod"), read_only=False, flags=[])
        pid = manager.served("one").pid
        if trouble == "killed for good":
            os.kill(pid, signal.SIGKILL)
            manager.wait_state("one", "down")
        elif trouble == "stopped":
            os.kill(pid, signal.SIGSTOP)
        readers = []
        if trouble != "serving":
            # A program waits for the daemon in the kernel during the unmount.
            readers = [subprocess.Popen(["cat", f"{place}/hello"], stderr=subprocess.DEVNULL)]
            time.sleep(0.2)
        for target in (manager.place("pod"), place):
            started = time.monotonic()
            outcome = manager.client.unmount(target)
            assert time.monotonic() - started < UNDO_SECONDS_MAX
        assert outcome.clean is (trouble == "serving")
        for reader in readers:
            assert reader.wait(WAIT_SECONDS) != 0
        assert manager.mounts() == []
        assert not Path(f"/proc/{pid}").exists()
    finally:
        manager.close()


ONCE = 'if [ -e {flag} ]; then exit 1; fi\ntouch {flag}\nexec {python} "$@"\n'


def test_a_daemon_that_cannot_start_leaves_no_mount_and_reports_why(tmp_path: Path) -> None:
    manager = MountManagerProcess(tmp_path)
    manager.daemon = [*manager.daemon, "--fail"]
    manager.start()
    try:
        with pytest.raises(CsiError, match=r"cannot reach the cluster of .*default"):
            manager.mount("one")
        assert manager.mounts() == []
        assert manager.client.state() == ([], [])
    finally:
        manager.close()


def test_a_new_mount_manager_takes_over_the_mounts_and_pods_only_wait(
    manager: MountManagerProcess,
) -> None:
    places = [manager.mount(f"volume-{number}") for number in range(5)]
    manager.client.bind(places[0], manager.place("pod"), read_only=False, flags=[])
    pids = {manager.served(f"volume-{number}").pid for number in range(5)}
    first = manager.processes[0]
    second = manager.start()
    assert manager.client.hello()["pid"] == second.pid
    for number in range(5):
        manager.wait_state(f"volume-{number}", "serving")
    now = {daemon.pid for daemon in manager.client.state()[1]}
    assert len(now) == 5
    assert not now & pids
    assert read(manager.place("pod/hello"))
    # The former manager no longer has mounts: its end has no effect.
    first.terminate()
    assert first.wait(WAIT_SECONDS) == 0
    assert read(manager.place("pod/hello"))
    assert manager.client.unmount(manager.place("pod")).volume
    assert manager.client.unmount(places[0]).volume


def test_a_mount_manager_that_dies_during_a_handover_takes_no_mounts(
    manager: MountManagerProcess,
) -> None:
    place = manager.mount("one")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(manager.socket))
        connection.sendall(b'{"op": "handover"}\n')
        assert json.loads(connection.makefile("rb").readline())["ok"] is True
    deadline = time.monotonic() + WAIT_SECONDS
    while manager.client.hello()["draining"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    manager.wait_state("one", "serving")
    assert read(f"{place}/hello")


def test_calls_are_refused_while_a_handover_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A concurrent call would treat them as mounts of a dead mount manager and unmount them."""
    refused = []
    fd_store = FdStoreClient(tmp_path / "fd-store.sock")
    service = MountService(tmp_path, tmp_path / "clusters", tmp_path, ["true"], fd_store)

    def watched(_: list[ManagedMount]) -> None:
        with pytest.raises(Refused) as excinfo:
            service.unmount(str(tmp_path / "volume"))
        refused.append(excinfo.value.kind)

    monkeypatch.setattr(service.handover, "adopt", watched)
    service.handover.prepare()
    service.handover.rollback()
    assert refused == ["again"]
    assert not service.draining
    assert service.unmount(str(tmp_path / "volume")) == {
        "volume": None,
        "result": "none",
        "data_lost": "",
    }


def test_mounts_of_a_killed_mount_manager_are_reported_lost_and_mounted_again(
    manager: MountManagerProcess,
) -> None:
    place = manager.mount("one")
    manager.client.bind(place, manager.place("pod"), read_only=False, flags=[])
    pid = manager.served("one").pid
    manager.processes[0].kill()
    manager.processes[0].wait()
    end(pid)
    with pytest.raises(Unreachable, match=str(manager.socket)):
        manager.client.state()
    manager.start()
    mount_points, mounts = manager.client.state()
    assert {mount.target for mount in mount_points} == {place, manager.place("pod")}
    assert mounts == []
    started = time.monotonic()
    manager.client.unmount(manager.place("pod"))
    assert time.monotonic() - started < UNDO_SECONDS_MAX
    manager.mount("one")
    assert read(f"{place}/hello")


def test_two_calls_for_one_path_are_serialized(manager: MountManagerProcess) -> None:
    outcomes: list[str] = []

    def mount_once(number: int) -> None:
        try:
            if number % 2:
                manager.client.unmount(manager.place("one"))
            else:
                manager.mount("one")
        except CsiError as error:
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=mount_once, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert set(outcomes) <= {"InFlight"}
    mount_points, mounts = manager.client.state()
    assert len(mount_points) == len(mounts) <= 1


@pytest.mark.parametrize(
    "request_line",
    [
        b"",
        b"\n",
        b"[]\n",
        b"{}\n",
        b"not json\n",
        b'{"op": "format"}\n',
        b'{"op": "mount"}\n',
        b'{"op": "mount", "volume": 5, "cluster": "a", "root": "/", "target": "/x"}\n',
        b'{"op": "unmount", "target": "/etc"}\n',
        b'{"op": "unmount", "target": "KUBELET/../../etc"}\n',
        b'{"op": "unmount", "target": "KUBELET"}\n',
        b'{"op": "unmount", "target": "KUBELET/a\\u0000b"}\n',
        b'{"op": "bind", "source": "/etc", "target": "KUBELET/x"}\n',
        b'{"op": "bind", "source": "KUBELET/a", "target": "KUBELET/x", "flags": ["exec"]}\n',
        b'{"op": "mount", "volume": "v", "cluster": "../..", "root": "/", "target": "KUBELET/x"}\n',
        b"x" * 3_000_000 + b"\n",
    ],
)
def test_a_wrong_request_is_refused_and_changes_nothing(
    manager: MountManagerProcess, request_line: bytes
) -> None:
    request_line = request_line.replace(b"KUBELET", str(manager.kubelet).encode())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(WAIT_SECONDS)
        connection.connect(str(manager.socket))
        try:
            connection.sendall(request_line)
            connection.shutdown(socket.SHUT_WR)
            answer: dict[str, Any] = json.loads(connection.makefile("rb").readline() or b"{}")
        except (BrokenPipeError, ConnectionResetError):
            answer = {}
    assert answer.get("kind", "invalid") in ("invalid", "conflict")
    assert manager.mounts() == []
    assert manager.client.hello()["mounts"] == 0


def test_only_root_may_call(manager: MountManagerProcess) -> None:
    assert manager.socket.stat().st_mode & 0o777 == 0o600


def test_a_foreign_mount_is_not_unmounted(manager: MountManagerProcess) -> None:
    place = manager.kubelet / "tmpfs"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], check=True)
    with pytest.raises(AlreadyExists, match="a tmpfs file system"):
        manager.client.unmount(str(place))
    assert str(place) in manager.mounts()
    subprocess.run(["umount", str(place)], check=True)


def test_the_mount_manager_loads_the_standard_library_and_itself_only(
    manager: MountManagerProcess,
) -> None:
    maps = Path(f"/proc/{manager.processes[0].pid}/maps").read_text()
    assert "site-packages" not in maps
    assert "_native" not in maps
    resident = Path(f"/proc/{manager.processes[0].pid}/status").read_text()
    kilobytes = int(resident.partition("VmRSS:")[2].split()[0])
    assert kilobytes < 40_000


def test_a_path_outside_the_kubelets_folder_is_refused(manager: MountManagerProcess) -> None:
    with pytest.raises(InvalidArgument, match="must be below"):
        manager.client.mount("v1:default:/v/a", "default", "/v/a", "/mnt/x", read_only=False)


def test_an_absent_mount_manager_is_reported_with_its_socket(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"none\.sock"):
        MountManagerClient(tmp_path / "none.sock").state()


def test_mount_tables_are_parsed() -> None:
    text = (
        "36 35 0:52 / /var/a\\040b rw,relatime shared:1 - fuse.threefs 3fs:v1:default:/v/a rw\n"
        "37 35 0:53 / /x ro - tmpfs none rw,size=1k\n"
        "38 35 0:54 / /new rw - fuse.hf3fs 3fs:v1:default:/v/b rw\n"
        "39 35 0:55 / /other rw - fuse.other 3fs:v1:default:/v/c rw\n"
        "broken line\n"
    )
    first, second, new, other = mountinfo.parse(text)
    assert (first.target, first.device, first.volume) == ("/var/a b", "0:52", "v1:default:/v/a")
    assert (second.volume, second.read_only) == (None, True)
    assert (new.volume, other.volume) == ("v1:default:/v/b", None)
