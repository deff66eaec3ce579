"""Snapshots of a volume through a mount: as it was at one moment, and read-only."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import threefs
from holding import start_mount
from threefs.cli.credential import issue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holding import HeldMount

MIB = 1 << 20


@pytest.fixture
def volume(client: threefs.Client, mount: Callable[..., HeldMount]) -> HeldMount:
    mounted = mount("volume")
    client.set_quota(mounted.root, 1 << 30, 10_000)
    return mounted


def fill(tree: Path) -> None:
    """Files of several chunks and of none, holes, links and attributes."""
    (tree / "deep" / "er").mkdir(parents=True)
    (tree / "deep" / "er" / "large").write_bytes(os.urandom(5 * MIB + 7))
    for number in range(20):
        (tree / "deep" / f"small-{number}").write_bytes(b"%d" % number * 700)
    (tree / "empty").touch()
    with (tree / "holes").open("wb") as file:
        os.pwrite(file.fileno(), b"end", 3 * MIB)
    os.setxattr(tree / "deep", "user.note", b"of the directory")
    os.setxattr(tree / "holes", "user.note", b"of the file")
    (tree / "link").symlink_to("deep/er/large")
    (tree / "deep" / "small-1").chmod(0o640)


def state(tree: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a directory, as its users see it."""
    seen: dict[str, tuple[object, ...]] = {}
    for path in sorted(tree.rglob("*")):
        name = str(path.relative_to(tree))
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else b""
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
        notes = {
            it: os.getxattr(path, it, follow_symlinks=False)
            for it in os.listxattr(path, follow_symlinks=False)
        }
        times = (status.st_mtime_ns, status.st_ctime_ns)
        seen[name] = (status.st_mode, status.st_size, status.st_nlink, times, notes, content)
    return seen


def change(tree: Path) -> None:
    """Change everything that `fill` made."""
    with (tree / "deep" / "er" / "large").open("r+b") as file:
        os.pwrite(file.fileno(), b"changed" * 1000, MIB - 3)
        os.ftruncate(file.fileno(), 4 * MIB)
    for number in range(0, 20, 2):
        (tree / "deep" / f"small-{number}").unlink()
    (tree / "deep" / "small-1").rename(tree / "moved")
    (tree / "empty").write_bytes(b"not any more")
    os.pwrite(fd := os.open(tree / "holes", os.O_WRONLY), b"filled", MIB)
    os.close(fd)
    os.setxattr(tree / "holes", "user.note", b"another")
    os.removexattr(tree / "deep", "user.note")
    (tree / "link").unlink()
    (tree / "new").mkdir()


def test_a_snapshot_shows_the_volume_as_it_was(
    client: threefs.Client, volume: HeldMount, tmp_path: Path
) -> None:
    tree, snapshots = volume.target, client.snapshots(volume.root)
    fill(tree)
    before = state(tree)
    snapshots.create("first")
    shown = tree / ".snapshots" / "first"
    assert ".snapshots" not in os.listdir(tree)
    assert os.listdir(tree / ".snapshots") == ["first"]
    assert state(shown) == before
    change(tree)
    after = state(tree)
    assert state(shown) == before
    snapshots.create("second")
    assert state(tree / ".snapshots" / "second") == after
    assert sorted(os.listdir(tree / ".snapshots")) == ["first", "second"]
    # Programs, from the chunks and not from the pages of the kernel.
    volume.respawn()
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", str(shown), str(copy)], check=True)
    subprocess.run(["diff", "-r", str(shown), str(copy)], check=True)
    assert {name: it[:2] for name, it in state(copy).items() if it[-1]} == {
        name: it[:2] for name, it in before.items() if it[-1]
    }
    # The Python client reads the same: whole files, and parts of many.
    root = f"{volume.root}/.snapshots/first"
    assert client.read_file(f"{root}/deep/er/large") == before["deep/er/large"][-1]
    assert client.read_file(f"{root}/holes") == before["holes"][-1]
    parts = [
        (f"{folder}/holes", start, 5000)
        for start in range(MIB - 2500, 3 * MIB, MIB // 4)
        for folder in (root, f"{volume.root}/.snapshots/second", volume.root)
    ]
    wholes = {
        root: before["holes"][-1],
        f"{volume.root}/.snapshots/second": after["holes"][-1],
        volume.root: after["holes"][-1],
    }
    for (path, start, length), content in zip(parts, client.batch_read(parts), strict=True):
        whole = wholes[path.removesuffix("/holes")]
        assert isinstance(whole, bytes)
        assert content == whole[start : start + length], (path, start)
    snapshots.remove("first")

    def is_gone() -> bool:
        return not shown.exists()

    wait_for(is_gone, "the kernel forgets a removed snapshot")
    assert state(tree / ".snapshots" / "second") == after


def test_no_change_reaches_a_snapshot(client: threefs.Client, volume: HeldMount) -> None:
    tree = volume.target
    fill(tree)
    client.snapshots(volume.root).create("s")
    shown = tree / ".snapshots" / "s"
    before = state(shown)
    file, directory = shown / "deep" / "small-3", shown / "deep"
    outside = tree / "outside"
    outside.touch()
    changes: dict[str, Callable[[], object]] = {
        "create": lambda: (directory / "new").touch(),
        "write": lambda: os.open(file, os.O_WRONLY),
        "read and write": lambda: os.open(file, os.O_RDWR),
        "append": lambda: file.open("ab"),
        "truncating open": lambda: file.open("wb"),
        "truncate": lambda: os.truncate(file, 0),
        "unlink": file.unlink,
        "rmdir": (directory / "er").rmdir,
        "mkdir": lambda: (directory / "new").mkdir(),
        "symlink": lambda: (directory / "new").symlink_to("x"),
        "fifo": lambda: os.mkfifo(directory / "new"),
        "rename": lambda: file.rename(directory / "renamed"),
        "chmod": lambda: file.chmod(0o600),
        "chown": lambda: os.chown(file, 1, 1),
        "times": lambda: os.utime(file, (1, 1)),
        "set attribute": lambda: os.setxattr(file, "user.x", b"y"),
        "remove attribute": lambda: os.removexattr(shown / "holes", "user.note"),
        "remove a snapshot": shown.rmdir,
        "make a snapshot": lambda: (tree / ".snapshots" / "t").mkdir(),
        "rename a snapshot": lambda: shown.rename(tree / ".snapshots" / "t"),
    }
    for name, attempt in changes.items():
        with pytest.raises(OSError, match="Errno") as refused:
            attempt()
        assert refused.value.errno == errno.EROFS, name
    moves: dict[str, Callable[[], object]] = {
        "out": lambda: file.rename(tree / "here"),
        "in": lambda: outside.rename(directory / "there"),
        "link out": lambda: os.link(file, tree / "here"),
        "link in": lambda: os.link(outside, directory / "there"),
    }
    for name, attempt in moves.items():
        with pytest.raises(OSError, match="Errno") as refused:
            attempt()
        assert refused.value.errno in (errno.EROFS, errno.EXDEV), name
    with file.open("rb") as opened, pytest.raises(OSError, match="Errno") as refused:
        fcntl.flock(opened, fcntl.LOCK_SH)
    assert refused.value.errno == errno.EROFS
    path = f"{volume.root}/.snapshots/s/deep/small-3"
    with pytest.raises(threefs.ReadOnly):
        client.batch_write([(path, 0, b"x")])
    assert state(shown) == before


def test_open_files_of_a_snapshot_are_taken_over(client: threefs.Client, volume: HeldMount) -> None:
    tree = volume.target
    content = os.urandom(3 * MIB + 5)
    (tree / "file").write_bytes(content)
    client.snapshots(volume.root).create("s")
    (tree / "file").write_bytes(os.urandom(4 * MIB))
    with (tree / ".snapshots" / "s" / "file").open("rb", buffering=0) as opened:
        assert opened.read(1000) == content[:1000]
        volume.respawn()
        rest = bytearray()
        while part := opened.read(MIB):
            rest += part
        assert bytes(rest) == content[1000:]
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(opened.fileno(), MIB, MIB) == content[MIB : 2 * MIB]


@pytest.mark.parametrize("read_only", [False, True], ids=["writer", "reader"])
def test_the_holder_of_a_ticket_reads_snapshots_of_its_volume(
    cluster: Any, client: threefs.Client, folder: str, tmp_path: Path, read_only: bool
) -> None:
    contents = {name: os.urandom(2 * MIB + 9) for name in ("mine", "theirs")}
    for name, content in contents.items():
        client.make_directory(f"{folder}/{name}", 0o755)
        client.set_quota(f"{folder}/{name}", bytes_max=1 << 30)
        client.batch_write([(f"{folder}/{name}/file", 0, content)], create=True)
        client.snapshots(f"{folder}/{name}").create("s")
        client.batch_write([(f"{folder}/{name}/file", MIB, b"changed")])
    ticket, file = tmp_path / "ticket", tmp_path / "cluster.json"
    issue(cluster.file, f"{folder}/mine", read_only=read_only, expires="1h", node="", to=ticket)
    file.write_text(json.dumps(json.loads(cluster.file.read_text()) | {"key_file": str(ticket)}))
    with threefs.connect(file) as holder:
        assert holder.read_file("/.snapshots/s/file") == contents["mine"]
        with pytest.raises(threefs.ThreeFSError):
            holder.batch_write([("/.snapshots/s/file", 0, b"x")])
    mount = start_mount(file, "/", tmp_path, 0, read_only=read_only)
    try:
        shown = mount.target / ".snapshots" / "s" / "file"
        assert shown.read_bytes() == contents["mine"]
        assert (mount.target / "file").read_bytes()[MIB : MIB + 7] == b"changed"
        mount.respawn()
        assert shown.read_bytes() == contents["mine"]
    finally:
        mount.close()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Log:
    """A writer of numbers, each in a block of a file, and what it knows of them."""

    def __init__(self, write: Callable[[int, bytes], object]) -> None:
        self.write = write
        self.started = self.acknowledged = 0
        self.stop = threading.Event()
        self.problems: list[BaseException] = []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.started += 1
                self.write((self.started - 1) * 512, b"%511d\n" % self.started)
                self.acknowledged = self.started
        except BaseException as error:
            self.problems.append(error)


def test_snapshots_have_what_was_acknowledged_and_nothing_that_started_later(
    client: threefs.Client, volume: HeldMount
) -> None:
    tree = volume.target
    snapshots = client.snapshots(volume.root)
    client.write_file(f"{volume.root}/client", b"")
    by_mount = os.open(tree / "mount", os.O_CREAT | os.O_WRONLY)
    logs = {
        "mount": Log(lambda offset, line: (os.pwrite(by_mount, line, offset), os.fsync(by_mount))),
        "client": Log(
            lambda offset, line: client.batch_write([(f"{volume.root}/client", offset, line)])
        ),
    }
    kept: dict[tuple[int, str], bytes] = {}
    try:
        for number in range(5):
            goals = {name: log.acknowledged + 5 for name, log in logs.items()}
            wait_for(
                lambda goals=goals: all(  # type: ignore[misc]
                    log.problems or log.acknowledged >= goals[name] for name, log in logs.items()
                ),
                "the writers make progress",
            )
            before = {name: log.acknowledged for name, log in logs.items()}
            snapshots.create(f"s{number}")
            after = {name: log.started for name, log in logs.items()}
            for name in logs:
                content = (tree / ".snapshots" / f"s{number}" / name).read_bytes()
                lines = content.count(b"\n")
                expected = b"".join(b"%511d\n" % (line + 1) for line in range(lines))
                assert content == expected, name
                assert before[name] <= lines <= after[name], name
                kept[number, name] = content
    finally:
        for log in logs.values():
            log.stop.set()
            log.thread.join()
        os.close(by_mount)
    assert not any(log.problems for log in logs.values()), [log.problems for log in logs.values()]
    volume.respawn()
    for (number, name), content in kept.items():
        assert (tree / ".snapshots" / f"s{number}" / name).read_bytes() == content
        assert client.read_file(f"{volume.root}/.snapshots/s{number}/{name}") == content
