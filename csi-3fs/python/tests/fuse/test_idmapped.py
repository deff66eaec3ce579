"""Idmapped mounts of 3FS, as pods with user namespaces get them (Linux 6.12)."""

from __future__ import annotations

import ctypes
import os
import platform
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from threefs.mount import unmount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holding import HeldMount

KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])
pytestmark = pytest.mark.skipif(
    KERNEL < (6, 12), reason=f"Linux {platform.release()}: idmapped FUSE mounts need 6.12"
)

FIRST, COUNT = 100_000, 65_536
"""Ids of the host that a pod's 0, 1, … are."""
LIBC = ctypes.CDLL(None, use_errno=True)
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
AT_FDCWD, AT_EMPTY_PATH, OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = -100, 0x1000, 1, 4
MOUNT_ATTR_IDMAP = 0x100000
CLONE_NEWUSER = 0x10000000


class MountAttributes(ctypes.Structure):
    """struct mount_attr of mount_setattr(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def call(number: int, *arguments: object) -> int:
    result = LIBC.syscall(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(result)


def user_namespace() -> int:
    """A user namespace in which the ids from FIRST are 0, 1, …."""
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(done[1])
        status = LIBC.unshare(CLONE_NEWUSER)
        os.write(ready[1], bytes([status & 1]))
        os.read(done[0], 1)
        os._exit(0)
    os.close(done[0])
    try:
        assert os.read(ready[0], 1) == b"\0", "unshare(CLONE_NEWUSER) failed"
        for kind in ("uid", "gid"):
            Path(f"/proc/{child}/{kind}_map").write_text(f"0 {FIRST} {COUNT}\n")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    finally:
        for descriptor in (*ready, done[1]):
            os.close(descriptor)
        os.waitpid(child, 0)


def bind_idmapped(source: Path, target: Path) -> None:
    """Mounts `source` at `target` as a container runtime does for a pod with `hostUsers: false`."""
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC
    tree = call(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(source), flags)
    namespace = user_namespace()
    try:
        wanted = MountAttributes(MOUNT_ATTR_IDMAP, 0, 0, namespace)
        size = ctypes.sizeof(wanted)
        call(SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, ctypes.byref(wanted), size)
        arguments = (tree, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH)
        call(SYS_MOVE_MOUNT, *arguments)
    finally:
        os.close(namespace)
        os.close(tree)


@pytest.fixture
def views(mount: Callable[..., HeldMount], tmp_path: Path) -> Iterator[tuple[HeldMount, Path]]:
    """A mount of one node, and the same directory idmapped."""
    mounted = mount(write_back=True)
    idmapped = tmp_path / "idmapped"
    idmapped.mkdir()
    bind_idmapped(mounted.target, idmapped)
    try:
        yield mounted, idmapped
    finally:
        unmount(idmapped)


def run_as(user: int, groups: list[int], function: Callable[[], object]) -> str:
    """Calls a function as a user of the host; the name of its error, or "ok"."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(groups)
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            os.umask(0o022)
            function()
            result = "ok"
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        os.write(writing, result.encode()[:1000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text.partition(":")[0]


def owner(path: Path) -> tuple[int, int]:
    about = path.lstat()
    return about.st_uid, about.st_gid


POD_USER = FIRST + 1000


def test_inodes_have_the_ids_of_the_pod(views: tuple[HeldMount, Path]) -> None:
    mounted, idmapped = views

    def create() -> None:
        (idmapped / "file").write_bytes(b"x")
        (idmapped / "directory").mkdir()
        (idmapped / "link").symlink_to("file")
        os.mkfifo(idmapped / "pipe")
        os.link(idmapped / "file", idmapped / "second")

    assert run_as(POD_USER, [], create) == "ok"
    for name in ("file", "directory", "link", "pipe", "second"):
        assert owner(mounted.target / name) == (1000, 1000), name
        assert owner(idmapped / name) == (POD_USER, POD_USER), name


def test_an_id_that_the_pod_does_not_have_is_refused(views: tuple[HeldMount, Path]) -> None:
    mounted, idmapped = views

    def create() -> None:
        (idmapped / "file").write_bytes(b"x")

    assert run_as(1000, [], create) == "OSError"  # EOVERFLOW
    assert list(mounted.target.iterdir()) == []


def test_the_kernel_checks_owner_group_and_others(views: tuple[HeldMount, Path]) -> None:
    mounted, idmapped = views
    private, shared = idmapped / "private", idmapped / "shared"

    def create() -> None:
        private.write_bytes(b"own")
        private.chmod(0o600)
        shared.write_bytes(b"group")
        shared.chmod(0o060)

    assert run_as(POD_USER, [], create) == "ok"
    os.chown(mounted.target / "shared", 1000, 50)
    other = FIRST + 2000
    assert run_as(POD_USER, [], private.read_bytes) == "ok"
    assert run_as(other, [], private.read_bytes) == "PermissionError"
    assert run_as(other, [], lambda: private.chmod(0o666)) == "PermissionError"
    assert run_as(other, [], lambda: os.truncate(private, 0)) == "PermissionError"
    assert run_as(other, [FIRST + 50], shared.read_bytes) == "ok"
    assert run_as(other, [50], shared.read_bytes) == "PermissionError"
    assert run_as(POD_USER, [FIRST + 50], shared.read_bytes) == "PermissionError"
    assert run_as(POD_USER, [], lambda: os.chown(private, other, -1)) == "PermissionError"
    assert (mounted.target / "private").read_bytes() == b"own"


def test_a_sticky_directory_belongs_to_its_owners(views: tuple[HeldMount, Path]) -> None:
    mounted, idmapped = views
    mounted.target.chmod(0o1777)
    file, other = idmapped / "file", FIRST + 2000
    assert run_as(POD_USER, [], lambda: file.write_bytes(b"x")) == "ok"
    assert run_as(other, [], file.unlink) == "PermissionError"
    assert run_as(other, [], lambda: file.rename(idmapped / "mine")) == "PermissionError"
    assert run_as(POD_USER, [], file.unlink) == "ok"


def test_ids_of_chown_are_those_of_the_pod(views: tuple[HeldMount, Path]) -> None:
    mounted, idmapped = views
    (mounted.target / "file").touch()
    os.chown(idmapped / "file", FIRST + 7, FIRST + 8)
    assert owner(mounted.target / "file") == (7, 8)
    with pytest.raises(OSError, match=r"too large|Invalid"):
        os.chown(idmapped / "file", 7, 8)


def test_a_write_of_another_user_clears_the_set_user_id_bit(
    views: tuple[HeldMount, Path],
) -> None:
    mounted, idmapped = views
    file = idmapped / "program"

    def create() -> None:
        file.write_bytes(b"x")
        file.chmod(0o4777)

    assert run_as(POD_USER, [], create) == "ok"
    assert run_as(FIRST + 2000, [], lambda: file.write_bytes(b"y")) == "ok"
    assert stat.S_IMODE((mounted.target / "program").stat().st_mode) == 0o777


def test_the_next_daemon_serves_idmapped_mounts(views: tuple[HeldMount, Path]) -> None:
    mounted, idmapped = views
    mounted.respawn()
    assert run_as(POD_USER, [], lambda: (idmapped / "file").write_bytes(b"x")) == "ok"
    assert owner(mounted.target / "file") == (1000, 1000)


def test_a_mount_of_several_nodes_cannot_be_idmapped(
    mount: Callable[..., HeldMount], tmp_path: Path
) -> None:
    target = tmp_path / "idmapped"
    target.mkdir()
    with pytest.raises(OSError, match="Invalid argument"):
        bind_idmapped(mount().target, target)
