"""Quotas on a mount: no writer exceeds one, and the usage is exact."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    import threefs

MIB = 1 << 20


def settled(client: threefs.Client, path: str, expected: tuple[int, int]) -> tuple[int, int]:
    """The usage once all closes are reported; the kernel reports the last one a moment later."""
    deadline = time.monotonic() + 60
    while True:
        quota = client.quota(path)
        assert quota is not None
        usage = (quota.bytes_used, quota.inodes_used)
        if usage == expected or time.monotonic() > deadline:
            return usage
        time.sleep(0.05)


def fill(path: str, piece: int, limit: int) -> tuple[int, int]:
    """Write until refused; returns the acknowledged bytes and the errno."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    total = 0
    try:
        while total < limit:
            total += os.write(descriptor, b"x" * piece)
        return total, 0
    except OSError as error:
        return total, error.errno or 0
    finally:
        os.close(descriptor)


def test_concurrent_writers_can_use_every_byte_of_a_quota(
    client: threefs.Client, mount: Callable[..., Any]
) -> None:
    mounts = [mount("volume"), mount("volume")]
    root = mounts[0].root
    client.set_quota(root, 20 * MIB, 100)
    results: list[tuple[int, int]] = []

    def writer(number: int) -> None:
        target = mounts[number % 2].target / f"file-{number}"
        results.append(fill(str(target), 64 * 1024, 100 * MIB))

    threads = [threading.Thread(target=writer, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {code for _, code in results} == {errno.EDQUOT}
    total = sum(count for count, _ in results)
    assert total <= 20 * MIB
    assert settled(client, root, (total, 6)) == (total, 6)
    sizes = sum(entry.stat().st_size for entry in os.scandir(mounts[0].target))
    assert sizes == total
    # Unused reservations were returned: now the rest fits to the byte.
    rest = 20 * MIB - total
    if rest:
        (mounts[0].target / "rest").write_bytes(b"r" * rest)
    with pytest.raises(OSError, match="quota"):
        (mounts[1].target / "one more").write_bytes(b"1")
    os.unlink(mounts[1].target / "one more")
    os.unlink(mounts[0].target / "file-0")
    (mounts[1].target / "again").write_bytes(b"fits")


def test_inodes_truncation_and_space(client: threefs.Client, mount: Callable[..., Any]) -> None:
    mounted = mount("volume")
    client.set_quota(mounted.root, 10 * MIB, 3)
    tree = mounted.target
    (tree / "one").write_bytes(b"1" * MIB)
    (tree / "two").mkdir()
    os.symlink("one", tree / "three")
    for call in (
        lambda: os.mkdir(tree / "four"),
        lambda: os.symlink("x", tree / "four"),
        lambda: (tree / "four").write_bytes(b""),
    ):
        with pytest.raises(OSError, match="quota") as excinfo:
            call()
        assert excinfo.value.errno == errno.EDQUOT
    os.link(tree / "one", tree / "another name")
    space = os.statvfs(tree)
    assert space.f_blocks * space.f_frsize == 10 * MIB
    assert (space.f_files, space.f_ffree) == (3, 0)
    assert settled(client, mounted.root, (MIB, 3)) == (MIB, 3)
    with pytest.raises(OSError, match="quota"):
        os.truncate(tree / "one", 11 * MIB)
    os.truncate(tree / "one", 10 * MIB)
    assert settled(client, mounted.root, (10 * MIB, 3)) == (10 * MIB, 3)
    # Truncated bytes are free immediately, up to an eighth of the limit; the rest minutes later.
    os.truncate(tree / "one", 9 * MIB)
    assert settled(client, mounted.root, (9 * MIB, 3)) == (9 * MIB, 3)
    os.truncate(tree / "one", 5)
    remainder = 10 * MIB - 10 * MIB // 8
    assert settled(client, mounted.root, (remainder, 3)) == (remainder, 3)
    client.set_quota(mounted.root, 30 * MIB, None)
    (tree / "four").write_bytes(b"4" * 15 * MIB)
    assert settled(client, mounted.root, (15 * MIB + remainder, 4)) == (15 * MIB + remainder, 4)
    # The same file can use its remaining charge.
    (tree / "one").write_bytes(b"1" * 9 * MIB)
    expected = (24 * MIB, 4)
    assert settled(client, mounted.root, expected) == expected


def test_moves_between_quotas(client: threefs.Client, mount: Callable[..., Any]) -> None:
    mounted = mount("volumes")
    tree = mounted.target
    for name in ("a", "b"):
        (tree / name).mkdir()
        client.set_quota(f"{mounted.root}/{name}", 10 * MIB, 10)
    (tree / "a" / "file").write_bytes(b"f" * 6 * MIB)
    os.rename(tree / "a" / "file", tree / "b" / "file")
    assert settled(client, f"{mounted.root}/a", (0, 0)) == (0, 0)
    assert settled(client, f"{mounted.root}/b", (6 * MIB, 1)) == (6 * MIB, 1)
    (tree / "a" / "file").write_bytes(b"f" * 6 * MIB)
    with pytest.raises(OSError, match="quota"):
        os.rename(tree / "a" / "file", tree / "b" / "second")
    (tree / "a" / "d").mkdir()
    (tree / "a" / "d" / "inside").write_bytes(b"")
    with pytest.raises(OSError, match="ross") as excinfo:
        os.rename(tree / "a" / "d", tree / "b" / "d")
    assert excinfo.value.errno == errno.EXDEV


def test_the_client_is_limited_as_well(client: threefs.Client, folder: str) -> None:
    import threefs

    client.set_quota(folder, 3 * MIB, 2)
    client.batch_write([(f"{folder}/one", 0, b"1" * MIB), (f"{folder}/two", 0, b"2" * MIB)])
    with pytest.raises(threefs.QuotaExceeded, match="3145728 bytes"):
        client.batch_write([(f"{folder}/one", MIB, b"1" * (2 * MIB))])
    with pytest.raises(threefs.QuotaExceeded, match="2 inodes"):
        client.make_directory(f"{folder}/three")
    client.batch_write([(f"{folder}/one", MIB, b"1" * MIB)])
    assert client.quota(folder) == threefs.Quota(3 * MIB, 3 * MIB, 2, 2)
    assert client.statfs(folder).bytes_free == 0
    client.setxattr(folder, "user.name", b"value")
    assert client.listxattr(folder) == ["user.name"]
    assert client.getxattr(folder, "user.name") == b"value"
    client.removexattr(folder, "user.name")
    with pytest.raises(threefs.NoAttribute):
        client.getxattr(folder, "user.name")
    client.remove_tree(f"{folder}/one")
    assert settled(client, folder, (MIB, 1)) == (MIB, 1)
    assert client.quota("/") is None
