"""Cases of POSIX test suites on a mount and on a local file system, with equal results and errnos.

Each case is a function of a directory; its results are compared.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from asking import GROUP, OTHER_GROUP, USER, as_user, file_state, opened, touch, tried

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COARSE_CLOCK = 5
"""CLOCK_REALTIME_COARSE of Linux, for which Python has no constant."""

CASES: list[Callable[[Path], Any]] = []


def case(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    CASES.append(function)
    return function


@case
def a_file_that_is_renamed_over_lives_on_for_who_has_it_open(at: Path) -> Any:
    old, new = touch(at / "old", b"old"), touch(at / "new", b"new")
    with old.open("r+b") as file:
        new.rename(old)
        links = os.fstat(file.fileno()).st_nlink
        file.write(b"OLD+")
        file.flush()
        file.seek(0)
        return (file.read(), links, old.read_bytes(), new.exists())


@case
def a_file_without_a_name_reads_writes_and_grows(at: Path) -> Any:
    path = touch(at / "file", b"abc")
    with path.open("r+b") as file:
        path.unlink()
        os.ftruncate(file.fileno(), 10)
        os.pwrite(file.fileno(), b"xyz", 7)
        again = touch(path, b"another")
        return (file.read(), os.fstat(file.fileno()).st_nlink, again.read_bytes())


@case
def exclusive_creation(at: Path) -> Any:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    (at / "dangling").symlink_to("nowhere")
    (at / "directory").mkdir()
    names = ("file", "file", "dangling", "directory")
    return [opened(at / name, flags) for name in names]


@case
def appending_by_two_descriptors_loses_nothing(at: Path) -> Any:
    files = [os.open(at / "log", os.O_CREAT | os.O_APPEND | os.O_WRONLY) for _ in range(2)]
    for number in range(50):
        os.write(files[number % 2], b"%03d" % number)
    for file in files:
        os.close(file)
    return (at / "log").read_bytes()


@case
def names_and_paths_that_are_too_long(at: Path) -> Any:
    results = [
        opened(at / ("n" * length), os.O_CREAT | os.O_WRONLY) for length in (254, 255, 256, 300)
    ]
    results += [tried(os.mkdir, at / ("d" * length)) for length in (255, 256)]
    results += [tried(os.symlink, "t" * length, at / f"s{length}") for length in (1, 4095, 4096)]
    results += [tried(os.rename, at / ("n" * 255), at / ("m" * 256))]
    results += [tried(os.link, at / ("n" * 255), at / ("m" * 256))]
    results += [tried(os.stat, str(at) + "/x" * 2100)]
    return results


@case
def names_of_any_bytes(at: Path) -> Any:
    names = [b"\xc3\xa9", b" ", b"a\nb", b"-", b"...", b"\\", b"*", "名前".encode()]
    for name in names:
        os.close(os.open(os.path.join(os.fsencode(at), name), os.O_CREAT | os.O_WRONLY))
    return sorted(os.listdir(os.fsencode(at)))


@case
def hard_links(at: Path) -> Any:
    file = touch(at / "file", b"1")
    results: list[Any] = [tried(os.link, file, at / "second"), file_state(file)]
    results += [tried(os.link, file, at / "second"), tried(os.link, at / "gone", at / "third")]
    (at / "directory").mkdir()
    results += [tried(os.link, at / "directory", at / "third")]
    (at / "second").write_bytes(b"22")
    results += [file.read_bytes(), tried(os.rename, file, at / "second"), file.exists()]
    file.unlink()
    return [*results, file_state(at / "second")]


@case
def symbolic_links(at: Path) -> Any:
    (at / "loop-a").symlink_to("loop-b")
    (at / "loop-b").symlink_to("loop-a")
    (at / "link").symlink_to("file")
    results: list[Any] = [opened(at / "loop-a", os.O_RDONLY), opened(at / "link", os.O_RDONLY)]
    touch(at / "link", b"through")
    results += [(at / "file").read_bytes(), tried(os.readlink, at / "link")]
    results += [tried(os.readlink, at / "file"), opened(at / "link", os.O_RDONLY | os.O_NOFOLLOW)]
    (at / "to-directory").symlink_to(".")
    results += [opened(at / "to-directory", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)]
    chain = "file"
    for number in range(45):
        (at / f"chain-{number}").symlink_to(chain)
        chain = f"chain-{number}"
    return [*results, opened(at / "chain-39", os.O_RDONLY), opened(at / "chain-41", os.O_RDONLY)]


@case
def what_is_no_directory_and_what_is_one(at: Path) -> Any:
    file = touch(at / "file")
    (at / "directory").mkdir()
    touch(at / "directory" / "inside")
    return [
        opened(f"{file}/", os.O_RDONLY),
        opened(file / "below", os.O_RDONLY),
        opened(file, os.O_RDONLY | os.O_DIRECTORY),
        opened(at / "directory", os.O_WRONLY),
        opened(at / "directory", os.O_CREAT | os.O_RDONLY),
        tried(os.rmdir, file),
        tried(os.unlink, at / "directory"),
        tried(os.rmdir, at / "directory"),
        tried(os.rmdir, f"{at}/directory/."),
        tried(os.rmdir, f"{at}/directory/.."),
        tried(os.mkdir, at / "directory"),
        tried(os.mkdir, at / "gone" / "below"),
        tried(os.unlink, f"{file}/"),
        tried(os.truncate, at / "directory", 0),
    ]


@case
def renames_that_must_not_be(at: Path) -> Any:
    file = touch(at / "file")
    for name in ("empty", "full", "full/inside"):
        (at / name).mkdir()
    return [
        tried(os.rename, at / "full", at / "full" / "inside" / "deeper"),
        tried(os.rename, at / "full", at / "full"),
        tried(os.rename, file, at / "empty"),
        tried(os.rename, at / "empty", file),
        tried(os.rename, at / "empty", at / "full"),
        tried(os.rename, at / "gone", file),
        tried(os.rename, file, at / "gone" / "below"),
        tried(os.rename, f"{file}", f"{at}/new/"),
        tried(os.rename, at / "full" / "inside", at / "empty"),
        sorted(os.listdir(at)),
    ]


@case
def times_to_the_nanosecond(at: Path) -> Any:
    file = touch(at / "file")
    results = []
    for times in ((1, 2), (1_234_567_890_123_456_789, 987_654_321), (-1, -1_500_000_001)):
        os.utime(file, ns=times)
        info = file.stat()
        results.append((info.st_atime_ns, info.st_mtime_ns))
    (at / "link").symlink_to("file")
    os.utime(at / "link", ns=(5, 6), follow_symlinks=False)
    return [*results, (at / "link").lstat().st_mtime_ns, file.stat().st_mtime_ns]


@case
def which_times_change(at: Path) -> Any:
    file = touch(at / "file")
    (at / "directory").mkdir()
    results = []
    for change in (
        lambda: file.write_bytes(b"x"),
        lambda: file.chmod(0o600),
        lambda: os.truncate(file, 5),
        lambda: os.link(file, at / "directory" / "link"),
        lambda: file.read_bytes(),
        lambda: os.rename(at / "directory" / "link", at / "directory" / "other"),
        lambda: os.unlink(at / "directory" / "other"),
    ):
        for path in (file, at / "directory"):
            os.utime(path, ns=(1, 1))
        before = [path.stat() for path in (file, at / "directory")]
        # Local file systems use a clock with a resolution of a few milliseconds.
        while time.clock_gettime_ns(COARSE_CLOCK) <= max(info.st_ctime_ns for info in before):
            time.sleep(0.001)
        change()
        after = [path.stat() for path in (file, at / "directory")]
        results.append(
            [
                (old.st_mtime_ns != new.st_mtime_ns, old.st_ctime_ns != new.st_ctime_ns)
                for old, new in zip(before, after, strict=True)
            ]
        )
    return results


@case
def truncation_both_ways_and_holes(at: Path) -> Any:
    file = touch(at / "file", b"0123456789")
    results: list[Any] = []
    for length in (3, 8, 0, 1 << 20, (1 << 20) + 7, 5):
        os.truncate(file, length)
        content = file.read_bytes()
        results.append((len(content), content[:10], any(content[10:])))
    with file.open("r+b") as handle:
        handle.seek(3 << 20)
        handle.write(b"end")
    content = file.read_bytes()
    results += [len(content), any(content[5 : 3 << 20]), content[-3:]]
    with file.open("rb") as handle:
        results += [tried(os.ftruncate, handle.fileno(), 0)]
    return [*results, tried(os.truncate, file, -1)]


@case
def shared_maps(at: Path) -> Any:
    file = touch(at / "file", bytes(10_000))
    with file.open("r+b") as handle, mmap.mmap(handle.fileno(), 0) as first:
        with mmap.mmap(handle.fileno(), 0) as other:
            first[5000:5005] = b"hello"
            seen_by_other = other[5000:5005]
        os.pwrite(handle.fileno(), b"pwrite", 9000)
        seen_after_write = first[9000:9006]
        first.flush()
    return (seen_by_other, seen_after_write, file.read_bytes()[5000:5005])


@case
def modes_of_what_is_made(at: Path) -> Any:
    results = []
    before = os.umask(0o027)
    try:
        os.close(os.open(at / "file", os.O_CREAT | os.O_WRONLY, 0o777))
        os.mkdir(at / "directory", 0o777)
    finally:
        os.umask(before)
    results += [file_state(at / "file"), file_state(at / "directory")]
    for mode in (0o6755, 0o1777, 0o000, 0o7777):
        (at / "file").chmod(mode)
        results.append(file_state(at / "file"))
    return results


@case
def a_directory_with_the_group_bit_gives_its_group(at: Path) -> Any:
    parent = at / "parent"
    parent.mkdir()
    os.chown(parent, 0, OTHER_GROUP)
    parent.chmod(0o2777)
    as_user(parent, "open('file', 'w').close(); os.mkdir('directory')")
    return [file_state(parent / "file"), file_state(parent / "directory")]


@case
def a_sticky_directory_guards_names(at: Path) -> Any:
    parent = at / "parent"
    parent.mkdir()
    parent.chmod(0o1777)
    touch(parent / "roots")
    touch(parent / "theirs")
    os.chown(parent / "theirs", USER, GROUP)
    output = as_user(
        parent,
        "print(tried(os.unlink, 'roots'), tried(os.rename, 'roots', 'new'),"
        " tried(os.rename, 'theirs', 'roots'), tried(os.rename, 'theirs', 'own'),"
        " tried(os.unlink, 'own'))",
    )
    return (output, sorted(os.listdir(parent)))


@case
def what_an_ordinary_user_may(at: Path) -> Any:
    at.chmod(0o777)
    for name, mode in (("none", 0o000), ("read", 0o444), ("group", 0o060), ("all", 0o666)):
        touch(at / name, b"x").chmod(mode)
    os.chown(at / "group", 0, OTHER_GROUP)
    (at / "closed").mkdir(mode=0o700)
    (at / "own").mkdir()
    os.chown(at / "own", USER, GROUP)
    code = (
        "print([(n, tried(lambda: open(n).close()), tried(lambda: open(n, 'a').close()))"
        " for n in ('none', 'read', 'group', 'all', 'closed/x')])\n"
        "print(tried(os.chmod, 'all', 0), tried(os.chown, 'all', %d, -1),"
        " tried(os.chown, 'own', -1, %d), tried(os.chown, 'own', 0, -1),"
        " tried(os.utime, 'all'), tried(os.utime, 'all', (1, 1)), tried(os.utime, 'read'),"
        " tried(os.truncate, 'read', 0), tried(os.listdir, 'closed'),"
        " tried(os.link, 'all', 'linked'), tried(os.rmdir, 'closed'))"
    )
    code %= (USER, OTHER_GROUP)
    return (as_user(at, code), as_user(at, code, OTHER_GROUP))


@case
def names_of_a_file_of_somebody_else(at: Path) -> Any:
    at.chmod(0o777)
    touch(at / "file", b"x").chmod(0o666)
    code = (
        "read = lambda: open('file').close()\n"
        "print(tried(os.link, 'file', 'second'), tried(read),"
        " tried(os.rename, 'second', 'third'), tried(read),"
        " tried(os.unlink, 'third'), tried(read), tried(os.utime, 'file'), tried(read))"
    )
    return as_user(at, code)


@case
def writing_takes_the_set_user_bit_away(at: Path) -> Any:
    at.chmod(0o777)
    file = touch(at / "file", b"x")
    os.chown(file, USER, GROUP)
    file.chmod(0o6777)
    as_user(at, "f = open('file', 'a'); f.write('more'); f.close()")
    first = file_state(file)
    file.chmod(0o6777)
    os.chown(file, USER, OTHER_GROUP)
    return (first, file_state(file))


@case
def locks_of_both_kinds(at: Path) -> Any:
    file = touch(at / "file", bytes(100))
    code = (
        "f = open('file', 'r+b')\n"
        "print(tried(fcntl.lockf, f, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 0),"
        " tried(fcntl.lockf, f, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 50),"
        " tried(fcntl.lockf, f, fcntl.LOCK_SH | fcntl.LOCK_NB, 10, 20),"
        " tried(fcntl.flock, f, fcntl.LOCK_EX | fcntl.LOCK_NB),"
        " tried(fcntl.flock, f, fcntl.LOCK_SH | fcntl.LOCK_NB))"
    )
    at.chmod(0o777)
    file.chmod(0o666)
    with file.open("r+b") as handle:
        fcntl.lockf(handle, fcntl.LOCK_EX, 20, 0)
        fcntl.lockf(handle, fcntl.LOCK_SH, 10, 20)
        fcntl.flock(handle, fcntl.LOCK_SH)
        status = as_user(at, code)
    return (status, as_user(at, code))


@case
def allocation(at: Path) -> Any:
    file = touch(at / "file", b"abc")
    with file.open("r+b") as handle:
        os.posix_fallocate(handle.fileno(), 100, 1000)
        results: list[Any] = [os.fstat(handle.fileno()).st_size]
        results += [tried(os.posix_fallocate, handle.fileno(), 0, 0)]
        results += [os.pread(handle.fileno(), 5, 0)]
    return results


@case
def seeks_reads_and_writes_at_the_edges(at: Path) -> Any:
    file = touch(at / "file", b"abc")
    with file.open("r+b", buffering=0) as handle:
        number = handle.fileno()
        return [
            tried(os.lseek, number, -1, os.SEEK_SET),
            tried(os.lseek, number, 10, os.SEEK_END),
            tried(os.read, number, 10),
            tried(os.pread, number, 10, 2),
            tried(os.pwrite, number, b"", 100),
            os.fstat(number).st_size,
            tried(os.pread, number, 1, -1),
            opened(file, os.O_RDONLY | os.O_TRUNC),
        ]


@case
def a_directory_that_was_removed(at: Path) -> Any:
    (at / "directory").mkdir()
    number = os.open(at / "directory", os.O_RDONLY)
    os.rmdir(at / "directory")
    try:
        return [
            tried(os.open, "file", os.O_CREAT | os.O_WRONLY, dir_fd=number),
            tried(os.mkdir, "below", dir_fd=number),
        ]
    finally:
        os.close(number)


@pytest.mark.parametrize("operation", CASES, ids=lambda function: function.__name__)
def test_a_mount_gives_the_results_of_a_local_file_system(
    operation: Callable[[Path], Any],
    tree_of_the_module: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    local, mounted = tmp_path_factory.mktemp("local"), tree_of_the_module / operation.__name__
    mounted.mkdir()
    for at in (local, mounted):
        at.chmod(0o755)
    assert operation(mounted) == operation(local)
