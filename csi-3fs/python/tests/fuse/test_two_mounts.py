"""Two mounts of one directory: data closed on one is visible at an open on the other."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    import threefs
    from holding import HeldMount


def test_an_overwrite_that_sets_the_time_back_is_visible(mount: Callable[..., HeldMount]) -> None:
    first, other = mount("same").target, mount("same").target
    (first / "file").write_bytes(b"old" * 100_000)
    before = (first / "file").stat()
    assert (first / "file").read_bytes() == b"old" * 100_000
    with (other / "file").open("r+b", buffering=0) as file:
        file.write(b"new" * 100_000)
    os.utime(other / "file", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (other / "file").stat().st_mtime_ns == before.st_mtime_ns
    assert (first / "file").read_bytes() == b"new" * 100_000


def test_changes_by_both_mounts_are_detected(mount: Callable[..., HeldMount]) -> None:
    first, other = mount("same").target, mount("same").target
    (first / "file").write_bytes(b"a" * 8192)
    (first / "file").read_bytes()
    with (first / "file").open("r+b", buffering=0) as first_file:
        with (other / "file").open("r+b", buffering=0) as other_file:
            other_file.seek(4096)
            other_file.write(b"b" * 4096)
        first_file.write(b"c" * 4096)
    assert (first / "file").read_bytes() == b"c" * 4096 + b"b" * 4096


def test_special_files_are_the_same_on_both(mount: Callable[..., HeldMount]) -> None:
    first, other = mount("same").target, mount("same").target
    os.mkfifo(first / "pipe", 0o640)
    os.mknod(first / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.mknod(first / "disk", 0o600 | stat.S_IFBLK, os.makedev(259, 70_000))
    os.mknod(first / "socket", 0o600 | stat.S_IFSOCK)
    statuses = {name: (other / name).stat() for name in ("pipe", "null", "disk", "socket")}
    assert stat.S_ISFIFO(statuses["pipe"].st_mode)
    assert stat.S_ISSOCK(statuses["socket"].st_mode)
    assert stat.S_ISCHR(statuses["null"].st_mode)
    assert statuses["null"].st_rdev == os.makedev(1, 3)
    assert stat.S_ISBLK(statuses["disk"].st_mode)
    assert statuses["disk"].st_rdev == os.makedev(259, 70_000)
    kinds = {entry.name: entry.is_file() for entry in os.scandir(other)}
    assert not any(kinds.values())
    reader = os.open(first / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(first / "pipe", os.O_WRONLY)
    os.write(writer, b"through the kernel")
    assert os.read(reader, 100) == b"through the kernel"
    os.close(reader)
    os.close(writer)
    os.rename(first / "pipe", first / "moved")
    os.link(first / "moved", first / "two")
    assert (other / "two").stat().st_nlink == 2
    for name in ("moved", "two", "null", "disk", "socket"):
        os.unlink(other / name)
    assert os.listdir(first) == []


def test_reserved_attributes_do_not_exist_in_a_mount(
    mount: Callable[..., HeldMount], client: threefs.Client
) -> None:
    mounted = mount()
    folder = mounted.target / "folder"
    folder.mkdir()
    os.setxattr(folder, "user.mine", b"1")
    with pytest.raises(PermissionError):
        os.setxattr(folder, "user.threefs.volume", b"{}")
    with pytest.raises(PermissionError):
        os.removexattr(folder, "user.threefs.claim")
    assert os.listxattr(folder) == ["user.mine"]
