"""POSIX semantics of files and directories on a real mount, as tables of cases."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def write(path: Path, data: bytes = b"data", mode: int = 0o644) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    os.write(descriptor, data)
    os.close(descriptor)


def fails(code: int, call: Callable[..., Any], *arguments: Any, **more: Any) -> None:
    with pytest.raises(OSError) as excinfo:
        call(*arguments, **more)
    assert excinfo.value.errno == code, f"{excinfo.value!r}, expected {errno.errorcode[code]}"


def as_user(uid: int, gid: int, groups: list[int], work: Callable[[], None]) -> str:
    """Run in a child as another user; returns the errno's name, or an empty text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            work()
        except OSError as error:
            os.write(writer, errno.errorcode[error.errno or 0].encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as output:
        return output.read().decode()


def test_open_flags(tree: Path) -> None:
    path = tree / "file"
    fails(errno.ENOENT, os.open, path, os.O_RDONLY)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    fails(errno.EEXIST, os.open, path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    write(path, b"0123456789")
    with open(path, "r+b", buffering=0) as file:
        file.write(b"ab")
    assert path.read_bytes() == b"ab23456789"
    appender = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.lseek(appender, 0, os.SEEK_SET)
    os.write(appender, b"!")
    fails(errno.EBADF, os.read, appender, 1)
    os.close(appender)
    assert path.read_bytes() == b"ab23456789!"
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
    assert path.stat().st_size == 0
    reader = os.open(path, os.O_RDONLY)
    fails(errno.EBADF, os.write, reader, b"x")
    os.close(reader)
    fails(errno.EISDIR, os.open, tree, os.O_WRONLY)
    fails(errno.ENOTDIR, os.open, path, os.O_RDONLY | os.O_DIRECTORY)
    fails(errno.ENOTDIR, os.open, path / "below", os.O_RDONLY)
    (tree / "link").symlink_to("file")
    fails(errno.ELOOP, os.open, tree / "link", os.O_RDONLY | os.O_NOFOLLOW)
    fails(errno.ENAMETOOLONG, os.open, tree / ("n" * 256), os.O_CREAT | os.O_WRONLY)
    write(tree / ("n" * 255))


def test_reading_and_writing_anywhere(tree: Path) -> None:
    path = tree / "file"
    with open(path, "w+b", buffering=0) as file:
        file.seek(3 << 20)
        file.write(b"end")
        file.seek((1 << 20) - 2)
        file.write(b"over the edge")
        assert os.fstat(file.fileno()).st_size == (3 << 20) + 3
        file.seek(0)
        content = file.read()
    expected = bytearray((3 << 20) + 3)
    expected[(1 << 20) - 2 : (1 << 20) + 11] = b"over the edge"
    expected[3 << 20 :] = b"end"
    assert content == expected
    assert path.read_bytes() == expected
    assert os.pread(descriptor := os.open(path, os.O_RDONLY), 10, 5 << 20) == b""
    os.close(descriptor)


def test_truncate(tree: Path) -> None:
    path = tree / "file"
    write(path, b"0123456789")
    os.truncate(path, 4)
    assert path.read_bytes() == b"0123"
    os.truncate(path, 8)
    assert path.read_bytes() == b"0123\0\0\0\0"
    with open(path, "r+b", buffering=0) as file:
        file.write(b"abcdefghij")
        os.ftruncate(file.fileno(), 3)
        assert os.fstat(file.fileno()).st_size == 3
        file.write(b"z")
    assert path.read_bytes() == b"abc" + bytes(7) + b"z"
    with open(path, "w+b", buffering=0) as file:
        file.write(b"0123")
        os.fsync(file.fileno())
        file.write(b"456789")
        os.ftruncate(file.fileno(), 6)
        os.ftruncate(file.fileno(), 10)
        file.seek(0)
        assert file.read() == b"012345\0\0\0\0", "unreported data is truncated, too"
    fails(errno.EISDIR, os.truncate, tree, 0)
    fails(errno.EINVAL, os.truncate, path, -1)
    fails(errno.ENOENT, os.truncate, tree / "missing", 0)
    os.truncate(path, 1 << 50)
    assert path.stat().st_size == 1 << 50, "a pebibyte of nothing"
    with path.open("rb") as huge:
        huge.seek((1 << 50) - 3)
        assert huge.read() == b"\0\0\0"
    fails(errno.EFBIG, os.truncate, path, 1 << 60)


def test_directories(tree: Path) -> None:
    (tree / "d").mkdir(mode=0o750)
    assert stat.S_IMODE((tree / "d").stat().st_mode) == 0o750
    fails(errno.EEXIST, os.mkdir, tree / "d")
    fails(errno.ENOENT, os.mkdir, tree / "no" / "d")
    (tree / "d" / "e").mkdir()
    fails(errno.ENOTEMPTY, os.rmdir, tree / "d")
    write(tree / "file")
    fails(errno.ENOTDIR, os.rmdir, tree / "file")
    fails(errno.EISDIR, os.unlink, tree / "d")
    fails(errno.ENOENT, os.rmdir, tree / "no")
    fails(errno.EINVAL, os.rmdir, f"{tree}/d/.")
    (tree / "d" / "e").rmdir()
    (tree / "d").rmdir()
    assert os.listdir(tree) == ["file"]


def test_a_large_directory_is_listed_once_and_removed_while_listed(tree: Path) -> None:
    names = {f"entry-{number:04}" for number in range(1500)}
    for name in names:
        (tree / name).mkdir() if name.endswith("7") else write(tree / name, b"")
    listed = [entry.name for entry in os.scandir(tree)]
    assert len(listed) == len(names)
    assert set(listed) == names
    directories = {entry.name for entry in os.scandir(tree) if entry.is_dir()}
    assert directories == {name for name in names if name.endswith("7")}
    for entry in os.scandir(tree):
        os.rmdir(entry.path) if entry.is_dir() else os.unlink(entry.path)
    assert os.listdir(tree) == []


def test_renames(tree: Path) -> None:
    write(tree / "a", b"a")
    write(tree / "b", b"b")
    os.rename(tree / "a", tree / "b")
    assert (tree / "b").read_bytes() == b"a"
    assert os.listdir(tree) == ["b"]
    os.rename(tree / "b", tree / "b")
    (tree / "d" / "e").mkdir(parents=True)
    fails(errno.EINVAL, os.rename, tree / "d", tree / "d" / "e" / "f")
    fails(errno.ENOTDIR, os.rename, tree / "d", tree / "b")
    fails(errno.EISDIR, os.rename, tree / "b", tree / "d")
    fails(errno.ENOENT, os.rename, tree / "no", tree / "x")
    (tree / "full").mkdir()
    write(tree / "full" / "file")
    fails(errno.ENOTEMPTY, os.rename, tree / "d", tree / "full")
    (tree / "empty").mkdir()
    os.rename(tree / "full", tree / "empty")
    assert (tree / "empty" / "file").read_bytes() == b"data"
    with open(tree / "b", "rb") as file:
        os.rename(tree / "b", tree / "empty" / "moved")
        assert file.read() == b"a", "an open file stays with its inode"


RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2


def rename2(source: Path, destination: Path, flags: int) -> None:
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    at_cwd = ctypes.c_int(-100)
    if (
        library.renameat2(at_cwd, bytes(source), at_cwd, bytes(destination), ctypes.c_uint(flags))
        != 0
    ):
        raise OSError(ctypes.get_errno(), "renameat2")


def test_rename_flags(tree: Path) -> None:
    write(tree / "a", b"a")
    (tree / "d").mkdir()
    write(tree / "d" / "b", b"b")
    fails(errno.EEXIST, rename2, tree / "a", tree / "d", RENAME_NOREPLACE)
    rename2(tree / "a", tree / "d", RENAME_EXCHANGE)
    assert (tree / "d").read_bytes() == b"a"
    assert (tree / "a" / "b").read_bytes() == b"b"
    fails(errno.ENOENT, rename2, tree / "a", tree / "no", RENAME_EXCHANGE)
    rename2(tree / "d", tree / "new", RENAME_NOREPLACE)
    assert (tree / "new").read_bytes() == b"a"


def test_links(tree: Path) -> None:
    write(tree / "a")
    os.link(tree / "a", tree / "b")
    assert (tree / "a").stat().st_ino == (tree / "b").stat().st_ino
    assert (tree / "a").stat().st_nlink == 2
    fails(errno.EEXIST, os.link, tree / "a", tree / "b")
    os.unlink(tree / "a")
    assert (tree / "b").stat().st_nlink == 1
    assert (tree / "b").read_bytes() == b"data"
    (tree / "d").mkdir()
    fails(errno.EPERM, os.link, tree / "d", tree / "hard")
    os.symlink("b", tree / "s")
    assert os.readlink(tree / "s") == "b"
    assert (tree / "s").read_bytes() == b"data"
    assert (tree / "s").lstat().st_size == 1
    fails(errno.EINVAL, os.readlink, tree / "b")
    os.symlink("y", tree / "x")
    os.symlink("x", tree / "y")
    fails(errno.ELOOP, os.stat, tree / "x")
    fails(errno.ENOENT, os.symlink, "", tree / "empty")


def test_each_directory_is_a_link_to_the_one_above_it(tree: Path) -> None:
    def links(*names: str) -> list[int]:
        return [(tree / name).stat().st_nlink for name in names]

    before = tree.stat().st_nlink
    for name in ("a", "b", "a/in"):
        (tree / name).mkdir()
    write(tree / "a" / "file")
    assert tree.stat().st_nlink == before + 2
    assert links("a", "b", "a/in") == [3, 2, 2]
    (tree / "a" / "in").rename(tree / "b" / "in")
    assert links("a", "b") == [2, 3]
    (tree / "a" / "other").mkdir()
    (tree / "a" / "other").rename(tree / "b" / "in")
    assert links("a", "b") == [2, 3]
    rename2(tree / "a" / "file", tree / "b" / "in", RENAME_EXCHANGE)
    assert links("a", "b") == [3, 2]
    (tree / "a" / "file").rmdir()
    (tree / "a").rmdir()
    assert tree.stat().st_nlink == before + 1


def test_an_unlinked_open_file_exists_until_it_is_closed(tree: Path, client: Any) -> None:
    with open(tree / "file", "w+b", buffering=0) as file:
        file.write(b"before")
        os.unlink(tree / "file")
        assert os.fstat(file.fileno()).st_nlink == 0
        fails(errno.ENOENT, os.stat, tree / "file")
        write(tree / "file", b"another")
        file.write(b" and after")
        os.fsync(file.fileno())
        file.seek(0)
        assert file.read() == b"before and after"
    assert (tree / "file").read_bytes() == b"another"


def test_times(tree: Path) -> None:
    path = tree / "file"
    write(path)
    os.utime(path, ns=(1_000_000_007, 2_000_000_009))
    status = path.stat()
    assert (status.st_atime_ns, status.st_mtime_ns) == (1_000_000_007, 2_000_000_009)
    changed = status.st_ctime_ns
    assert abs(changed / 1e9 - time.time()) < 600
    path.chmod(0o600)
    after = path.stat()
    assert after.st_ctime_ns > changed
    assert after.st_mtime_ns == 2_000_000_009
    write(path, b"more")
    assert path.stat().st_mtime_ns > 2_000_000_009
    directory = tree.stat().st_mtime_ns
    write(tree / "new")
    os.stat(tree / "new")
    deadline = time.monotonic() + 60
    while tree.stat().st_mtime_ns <= directory and time.monotonic() < deadline:
        time.sleep(0.05)
    assert tree.stat().st_mtime_ns > directory
    with open(path, "r+b", buffering=0) as file:
        file.write(b"x")
        os.utime(path, ns=(5, 5))
    assert path.stat().st_mtime_ns == 5, "closing does not undo a time that was set"


def test_modes_and_owners(tree: Path) -> None:
    tree.chmod(0o777)
    path = tree / "file"
    write(path, mode=0o640)
    os.chown(path, 1000, 2000)
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1000, 2000, 0o640)
    open_it = lambda: os.close(os.open(path, os.O_RDONLY))  # noqa: E731
    change = lambda: os.close(os.open(path, os.O_WRONLY))  # noqa: E731
    assert as_user(1000, 1, [], change) == ""
    assert as_user(1001, 2000, [], open_it) == ""
    assert as_user(1001, 1, [7, 2000], open_it) == "", "a further group"
    assert as_user(1001, 2000, [], change) == "EACCES"
    assert as_user(1001, 1, [], open_it) == "EACCES"
    assert as_user(1001, 1, [], lambda: os.chmod(path, 0o777)) == "EPERM"
    assert as_user(1000, 1, [], lambda: os.chown(path, 1001, -1)) == "EPERM"
    assert as_user(1000, 1, [55], lambda: os.chown(path, -1, 55)) == ""
    new_file = tree / "made"
    assert as_user(1001, 1001, [], lambda: write(new_file)) == ""
    assert (new_file.stat().st_uid, new_file.stat().st_gid) == (1001, 1001)
    (tree / "private").mkdir(mode=0o700)
    write(tree / "private" / "file")
    assert as_user(1001, 1, [], lambda: os.listdir(tree / "private")) == "EACCES"
    assert as_user(1001, 1, [], lambda: os.stat(tree / "private" / "file")) == "EACCES"
    sticky = tree / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    assert as_user(1000, 1, [], lambda: write(sticky / "mine")) == ""
    assert as_user(1001, 1, [], lambda: os.unlink(sticky / "mine")) in {"EPERM", "EACCES"}
    assert as_user(1000, 1, [], lambda: os.unlink(sticky / "mine")) == ""
    group = tree / "group"
    group.mkdir()
    os.chown(group, 0, 77)
    group.chmod(0o2777)
    assert as_user(1000, 1, [], lambda: write(group / "file")) == ""
    assert (group / "file").stat().st_gid == 77


def test_extended_attributes(tree: Path) -> None:
    path = tree / "file"
    write(path)
    os.setxattr(path, "user.one", b"1")
    os.setxattr(path, "user.two", b"2" * 4000)
    assert sorted(os.listxattr(path)) == ["user.one", "user.two"]
    assert os.getxattr(path, "user.two") == b"2" * 4000
    fails(errno.EEXIST, os.setxattr, path, "user.one", b"", os.XATTR_CREATE)
    fails(errno.ENODATA, os.setxattr, path, "user.no", b"", os.XATTR_REPLACE)
    fails(errno.ENODATA, os.getxattr, path, "user.no")
    fails(errno.EOPNOTSUPP, os.setxattr, path, "trusted.x", b"")
    os.removexattr(path, "user.one")
    assert os.listxattr(path) == ["user.two"]


def test_allocation_and_holes(tree: Path) -> None:
    with open(tree / "file", "w+b", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, 5 << 20)
        assert os.fstat(file.fileno()).st_size == 5 << 20
        assert os.lseek(file.fileno(), 100, os.SEEK_DATA) == 100
        assert os.lseek(file.fileno(), 100, os.SEEK_HOLE) == 5 << 20
        fails(errno.ENXIO, os.lseek, file.fileno(), 6 << 20, os.SEEK_DATA)


def test_memory_maps(tree: Path) -> None:
    path = tree / "file"
    write(path, bytes(3 << 20))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[100:104] = b"here"
        memory[2 << 20 : (2 << 20) + 5] = b"there"
        memory.flush()
    content = path.read_bytes()
    assert content[100:104] == b"here"
    assert content[2 << 20 : (2 << 20) + 5] == b"there"
    with path.open("r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as memory:
        file.seek(50)
        file.write(b"written")
        assert memory[50:57] == b"written", "one page cache for both"
        memory[0:5] = b"first"
        file.seek(0)
        assert file.read(5) == b"first"
    assert path.read_bytes()[:5] == b"first", "unmapping and closing keep what was changed"


def test_locks_are_local_to_the_mount(tree: Path) -> None:
    import fcntl

    path = tree / "file"
    write(path)
    with path.open("r+b") as first, path.open("r+b") as two:
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(first, fcntl.LOCK_UN)
        fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(first, fcntl.LOCK_EX | fcntl.LOCK_NB, 10)

        def other() -> None:
            with path.open("r+b") as three:
                fcntl.lockf(three, fcntl.LOCK_EX | fcntl.LOCK_NB, 10)

        assert as_user(0, 0, [], other) in {"EAGAIN", "EACCES"}


def test_concurrent_writers(tree: Path) -> None:
    path = tree / "file"
    write(path, b"")
    piece = 300_000

    def part(number: int) -> None:
        descriptor = os.open(path, os.O_WRONLY)
        for round_ in range(4):
            place = (round_ * 8 + number) * piece
            os.pwrite(descriptor, bytes([number + 1]) * piece, place)
        os.close(descriptor)

    threads = [threading.Thread(target=part, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = b"".join(bytes([number + 1]) * piece for number in range(8)) * 4
    assert path.read_bytes() == expected


def test_a_file_closed_on_one_mount_is_current_on_another(mount: Callable[..., Any]) -> None:
    first, two = mount("shared").target, mount("shared").target
    for round_ in range(30):
        content = os.urandom(1000 + 977 * round_)
        (first / "file").write_bytes(content)
        assert (two / "file").read_bytes() == content, f"round {round_}"
        os.truncate(two / "file", round_)
        with open(first / "file", "rb") as file:
            assert file.read() == content[:round_]
            assert os.fstat(file.fileno()).st_size == round_
    (first / "other").write_bytes(b"replaced")
    os.rename(first / "other", first / "file")
    with open(two / "file", "rb") as file:
        old = file.read()
    assert old in {b"replaced", content[:round_]}
    with open(first / "held", "w+b", buffering=0) as file:
        file.write(b"still here")
        os.fsync(file.fileno())
        os.unlink(two / "held")
        file.seek(0)
        assert file.read() == b"still here"


def test_a_read_only_mount_changes_nothing(mount: Callable[..., Any]) -> None:
    writable = mount("volume").target
    write(writable / "file")
    tree = mount("volume", read_only=True).target
    assert (tree / "file").read_bytes() == b"data"
    for call in (
        lambda: os.open(tree / "file", os.O_WRONLY),
        lambda: os.open(tree / "new", os.O_WRONLY | os.O_CREAT),
        lambda: os.unlink(tree / "file"),
        lambda: os.truncate(tree / "file", 0),
        lambda: os.setxattr(tree / "file", "user.x", b""),
    ):
        fails(errno.EROFS, call)


@pytest.mark.parametrize("mode", [0o4777, 0o2777, 0o6777])
def test_a_write_of_another_user_clears_set_user_id_and_set_group_id(tree: Path, mode: int) -> None:
    def overwrite() -> None:
        descriptor = os.open(path, os.O_RDWR)
        os.write(descriptor, b"x")
        assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o777
        os.close(descriptor)

    path = tree / "program"
    write(path)
    path.chmod(mode)
    assert as_user(65534, 65534, [], overwrite) == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o777
    path.chmod(mode)
    assert as_user(65534, 65534, [], lambda: os.truncate(path, 2)) == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o777
    assert as_user(65534, 65534, [], lambda: path.chmod(0o666)) == "EPERM"
