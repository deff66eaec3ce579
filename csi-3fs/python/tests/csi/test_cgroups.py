"""Memory limits of FUSE daemons by volume.

A plain folder replaces the kernel's control groups; the last tests need a kernel with version 2.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from threefs.confine import DATA_BYTES_MAX
from threefs.csi.errors import CsiError
from threefs.csi.mount_manager import cgroups
from threefs.csi.mount_manager.cgroups import (
    MANAGER_BYTES,
    UNGROUPED_BYTES_MAX,
    VOLUME_BYTES_MAX,
    CgroupError,
    Cgroups,
    divide,
    own_group,
)
from threefs.csi.mount_manager.daemon import Daemon
from threefs.csi.mount_manager.daemon_factory import DaemonFactory, ticket_folder
from threefs.csi.mount_manager.launch import mount_manager_command
from threefs.csi.mount_manager.mount_table import ManagedMount

from .mount_manager_process import SMALL_DAEMON, MountManagerProcess, can_mount, end

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 4 << 30
EATER = """
import sys, time
held = bytearray(int(sys.argv[1]))
held[::4096] = bytes(len(held[::4096]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """A container's group in the kernel's layout, with two processes."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "memory.max").write_text(f"{LIMIT}\n")
    (tmp_path / "cgroup.procs").write_text("11\n12\n")
    return tmp_path


def managed_mount(volume: str) -> ManagedMount:
    return ManagedMount(volume, "default", "/data", f"/place/{volume}", False, "0:99", 0)


def test_the_containers_memory_is_divided_between_mount_manager_and_daemons(group: Path) -> None:
    groups = divide(group)
    assert (group / "cgroup.subtree_control").read_text() == "+memory"
    assert (group / "manager" / "cgroup.procs").read_text() == "12", "the last one that moved"
    assert groups.daemons == group / "daemons"
    assert (groups.daemons / "memory.max").read_text() == str(LIMIT - MANAGER_BYTES)
    assert (groups.daemons / "cgroup.subtree_control").read_text() == "+memory"


@pytest.mark.parametrize(("limit", "daemons"), [("max", None), (str(128 << 20), str(64 << 20))])
def test_other_limits_of_the_container(group: Path, limit: str, daemons: str | None) -> None:
    (group / "memory.max").write_text(f"{limit}\n")
    memory_max = divide(group).daemons / "memory.max"
    assert (memory_max.read_text() if memory_max.exists() else None) == daemons


def test_a_process_that_starts_meanwhile_is_moved_as_well(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet starts probes in the container's group."""
    moved, busy = [], [3, 2, 1]
    real = Path.write_text

    def write(path: Path, text: str) -> int:
        if path.name == "cgroup.procs":
            moved.append(text)
        if path == group / "cgroup.subtree_control" and busy:
            # The first process is exiting: it is not listed, but still counts.
            if busy.pop() == 2:
                real(group / "cgroup.procs", "13\n")
            else:
                real(group / "cgroup.procs", "")
            raise OSError(errno.EBUSY, "Device or resource busy")
        return real(path, text)

    monkeypatch.setattr(Path, "write_text", write)
    divide(group)
    assert moved == ["11", "12", "13"]


def test_the_reason_is_reported_if_new_processes_keep_appearing(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.write_text

    def write(path: Path, text: str) -> int:
        if path.name == "cgroup.subtree_control":
            raise OSError(errno.EBUSY, "Device or resource busy")
        return real(path, text)

    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(cgroups, "MOVE_SECONDS", 0.05)
    with pytest.raises(CgroupError, match=r"cgroup.subtree_control: .*resource busy"):
        divide(group)


def test_the_container_is_found_in_both_views_of_the_tree(group: Path, tmp_path: Path) -> None:
    process = tmp_path / "process"
    process.write_text("0::/\n")
    assert own_group(group, process) == group, "with a separate namespace"
    inside = group / "kubepods" / "pod1" / "c1"
    inside.mkdir(parents=True)
    (inside / "memory.max").write_text("max")
    process.write_text("0::/kubepods/pod1/c1\n")
    assert own_group(group, process) == inside


def test_the_reason_is_reported_without_control_groups(group: Path, tmp_path: Path) -> None:
    process = tmp_path / "process"
    process.write_text("4:memory:/x\n0::/\n")
    (group / "memory.max").unlink()
    with pytest.raises(CgroupError, match="not in a container"):
        own_group(group, process)
    (group / "cgroup.controllers").unlink()
    with pytest.raises(CgroupError, match="not control groups v2"):
        own_group(group, process)


def test_a_daemon_enters_its_volumes_group_before_it_is_executed(group: Path) -> None:
    inside = divide(group).of("one")
    command = [sys.executable, "-I", "-S", "-c", "import sys; print(sys.argv[1:])", "a b", "$c"]
    result = subprocess.run(inside.enter(command), capture_output=True, text=True, check=True)
    assert result.stdout == "['a b', '$c']\n"
    assert (inside.path / "cgroup.procs").read_text() == "0\n"
    assert (inside.path / "memory.max").read_text() == str(VOLUME_BYTES_MAX)
    assert (inside.path / "memory.oom.group").read_text() == "1"
    assert VOLUME_BYTES_MAX == DATA_BYTES_MAX


@pytest.mark.parametrize("refuses", ["missing", "write"])
def test_a_daemon_that_cannot_enter_its_group_serves_and_is_logged(
    group: Path, capfd: pytest.CaptureFixture[str], refuses: str
) -> None:
    """Without delegation the kernel refuses the move after the group was created."""
    inside = divide(group).of("one")
    script = "echo data $(ulimit -H -d) >&2; echo '{}'; exec sleep 60"
    group_command = inside.enter(["/bin/true"])
    procs = inside.path / "cgroup.procs"
    if refuses == "write":
        procs.symlink_to("/dev/full")
    else:
        procs.mkdir()
    assert str(procs) in group_command
    descriptor = os.open("/dev/null", os.O_RDONLY)
    daemon = Daemon(["/bin/sh", "-c", script], descriptor, "v1", inside)
    daemon.start(resume=False)
    assert daemon.wait_ready(10)
    assert daemon.report().restarts == 0
    daemon.stop(at_once=True)
    os.close(descriptor)
    log = capfd.readouterr().err
    assert f"v1: the daemon has no control group: cannot enter {procs}" in log
    assert f"v1: data {UNGROUPED_BYTES_MAX >> 10}\n" in log, "nothing else bounds its memory"


def test_processes_that_may_not_be_moved_leave_the_daemons_without_groups(group: Path) -> None:
    """As without delegation: the mount manager serves anyway."""
    (group / "manager" / "cgroup.procs").mkdir(parents=True)
    with pytest.raises(CgroupError, match=r"manager/cgroup.procs: Is a directory"):
        divide(group)


def test_a_daemon_killed_for_memory_is_reported(group: Path, tmp_path: Path) -> None:
    """The daemons of a volume are in its group."""
    groups = divide(group)
    inside = groups.of(ticket_folder("v1"))
    events = inside.path / "memory.events"
    script = tmp_path / "daemon"
    script.write_text(f"#!/bin/sh\nprintf 'low 0\\noom 3\\noom_kill 1\\n' > {events}\nkill -9 $$\n")
    script.chmod(0o755)
    descriptor = os.open("/dev/null", os.O_RDONLY)
    mount = replace(managed_mount("v1"), descriptor=descriptor)
    daemon = DaemonFactory([str(script)], tmp_path / "clusters", tmp_path, groups).create(mount)
    daemon.start(resume=False)
    assert not daemon.wait_ready(10)
    report = daemon.report()
    daemon.stop(at_once=True)
    os.close(descriptor)
    assert "signal 9: out of memory" in report.message
    assert (inside.path / "cgroup.procs").read_text() == "0\n"


def test_a_daemon_without_a_group_starts_and_the_reason_is_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = Cgroups(tmp_path / "gone").of("one")
    descriptor = os.open("/dev/null", os.O_RDONLY)
    script = "echo data $(ulimit -H -d) >&2; echo '{}'; exec sleep 60"
    daemon = Daemon(["/bin/sh", "-c", script], descriptor, "v1", missing)
    daemon.start(resume=False)
    assert daemon.wait_ready(10)
    daemon.stop(at_once=True)
    os.close(descriptor)
    log = capfd.readouterr().err
    assert "v1: the daemon has no control group: " in log
    assert f"v1: data {UNGROUPED_BYTES_MAX >> 10}\n" in log, "nothing else bounds its memory"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: run it as root")
@pytest.mark.parametrize("alone", [False, True])
def test_a_daemon_keeps_the_lower_limit_that_it_was_started_with(alone: bool) -> None:
    """The daemon sets its own limit as root, which could raise it."""
    code = (
        "import resource, threefs.confine; threefs.confine.confine(0x70000001);"
        "print(*resource.getrlimit(resource.RLIMIT_DATA))"
    )
    command = [sys.executable, "-c", code]
    run = cgroups.without_group(command) if alone else command
    result = subprocess.run(run, capture_output=True, text=True, check=True)
    expected = UNGROUPED_BYTES_MAX if alone else DATA_BYTES_MAX
    assert result.stdout == f"{expected} {expected}\n"


def test_groups_of_unmounted_volumes_are_removed(tmp_path: Path) -> None:
    daemons = tmp_path / "daemons"
    for volume in ("one", "two", "three"):
        (daemons / ticket_folder(volume)).mkdir(parents=True)
    # Its processes still run.
    (daemons / ticket_folder("two") / "cgroup.procs").write_text("7")
    (daemons / "cgroup.procs").touch()
    factory = DaemonFactory([], tmp_path, tmp_path, Cgroups(daemons))

    def mounts() -> list[ManagedMount]:
        # A concurrent mount: it is in the table first.
        (daemons / ticket_folder("four")).mkdir()
        return [managed_mount("one")]

    factory.sweep_groups(mounts)
    groups = {path.name for path in daemons.iterdir() if path.is_dir()}
    assert groups == {ticket_folder(name) for name in ("one", "two", "four")}


@pytest.fixture
def kernels_group() -> Iterator[Path]:
    """An empty group of the kernel, as a runtime creates it for a container."""
    root = cgroups.ROOT
    try:
        usable = "memory" in (root / "cgroup.controllers").read_text().split()
        (root / "cgroup.subtree_control").write_text("+memory")
    except OSError:
        usable = False
    if not usable or os.geteuid() != 0:
        pytest.skip("needs root and control groups v2 with the memory controller")
    group = root / f"threefs-test-{os.getpid()}"
    group.mkdir()
    yield group
    for inside in sorted(group.rglob("*"), key=lambda folder: -len(folder.parts)):
        if inside.is_dir():
            _empty(inside)
    _empty(group)


def _empty(group: Path) -> None:
    (group / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + 30
    while True:
        try:
            group.rmdir()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return


def test_the_kernel_kills_only_the_large_daemon(
    kernels_group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of its volume, and at the common limit of all daemons."""
    monkeypatch.setattr(cgroups, "MANAGER_BYTES", 64 << 20)
    monkeypatch.setattr(cgroups, "VOLUME_BYTES_MAX", 128 << 20)
    (kernels_group / "memory.max").write_text(str(256 << 20))
    # As set by the kubelet: a container that exceeds its memory is killed as a whole.
    (kernels_group / "memory.oom.group").write_text("1")
    # After a failure the fixture kills all processes of the group.
    reserve = subprocess.Popen(["sleep", "600"])
    (kernels_group / "cgroup.procs").write_text(str(reserve.pid))
    groups = divide(kernels_group)

    def eat(volume: str, size_mib: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-I", "-S", "-c", EATER, str(size_mib << 20)]
        return subprocess.Popen(groups.of(volume).enter(command), stdout=subprocess.PIPE, text=True)

    def is_served(daemon: subprocess.Popen[str]) -> bool:
        assert daemon.stdout is not None
        return daemon.stdout.readline() == "held\n"

    small, middle = eat("small", 40), eat("middle", 100)
    assert is_served(small)
    assert is_served(middle)
    large = eat("large", 200)
    assert large.wait(60) == -signal.SIGKILL
    assert groups.of("large").kills() > 0
    # Within its own limit, but all together exceed the common one: the largest is killed.
    other = eat("other", 90)
    assert middle.wait(60) == -signal.SIGKILL
    assert is_served(other)
    assert [process.poll() for process in (small, other, reserve)] == [None, None, None]
    for process in (small, other, reserve):
        process.kill()
        process.wait()


def test_a_mount_manager_divides_its_own_group(kernels_group: Path, tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("needs /dev/fuse")
    manager = MountManagerProcess(tmp_path / "node")
    command = mount_manager_command(
        [
            *("--daemon-groups", "--socket", str(manager.socket)),
            *("--clusters", str(manager.folder / "clusters")),
            *("--kubelet-dir", str(manager.kubelet)),
            *("--daemon", *SMALL_DAEMON),
        ]
    )
    procs = str(kernels_group / "cgroup.procs")
    inside = ["/bin/sh", "-c", cgroups.ENTER, procs, *command]
    process = subprocess.Popen(inside, stdout=subprocess.PIPE, text=True)
    manager.processes.append(process)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        mount(manager)
        top = f"0::/{kernels_group.name}"
        assert group_of(process.pid) == f"{top}/manager"
        folder = ticket_folder("v1:default:/volumes/one")
        served = manager.served("one")
        assert group_of(served.pid) == f"{top}/daemons/{folder}"
        end(served.pid)
        deadline = time.monotonic() + 30
        while (served := manager.served("one")).restarts == 0 or served.state != "serving":
            assert time.monotonic() < deadline, f"restarted {served.restarts} times: {served.state}"
            time.sleep(0.01)
        assert group_of(served.pid) == f"{top}/daemons/{folder}"
    finally:
        manager.close()


def mount(manager: MountManagerProcess) -> None:
    """In an emulated kernel a child takes longer than the mount manager's timeout."""
    deadline = time.monotonic() + 60
    while True:
        try:
            manager.mount("one")
        except CsiError:
            assert time.monotonic() < deadline
        else:
            return


def group_of(pid: int) -> str:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line for line in lines if line.startswith("0::"))
