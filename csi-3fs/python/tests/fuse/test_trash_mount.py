"""A volume with a trash behaves as any other through a mount, and what was removed returns."""

from __future__ import annotations

import errno
import os
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    import threefs

MIB = 1 << 20


def test_removed_files_return_to_the_mount(
    client: threefs.Client, mount: Callable[..., Any]
) -> None:
    mounted = mount("volume")
    client.set_quota(mounted.root, 4 * MIB, 100)
    client.keep_removed(mounted.root, 3600)
    target = mounted.target
    (target / "run" / "deep").mkdir(parents=True)
    content = os.urandom(MIB + 5)
    (target / "run" / "deep" / "model").write_bytes(content)
    os.setxattr(target / "run" / "deep" / "model", "user.note", b"kept")
    (target / "run" / "link").symlink_to("deep/model")
    # An open file stays readable and has no name, as without a trash.
    with (target / "run" / "deep" / "model").open("rb") as opened:
        shutil.rmtree(target / "run")
        assert not (target / "run").exists()
        assert os.fstat(opened.fileno()).st_nlink == 0
        assert opened.read() == content
    assert list(target.iterdir()) == []
    trash = client.trash(mounted.root)
    entries = {entry.path: entry for entry in trash.entries()}
    assert set(entries) == {"run", "run/deep", "run/deep/model", "run/link"}
    for path in ("run/deep/model", "run/link"):
        trash.restore(entries[path].id)
    deadline = time.monotonic() + 30
    while not (target / "run" / "link").exists():
        assert time.monotonic() < deadline, "the kernel does not see the restored file"
        time.sleep(0.05)
    assert (target / "run" / "link").read_bytes() == content
    assert os.getxattr(target / "run" / "deep" / "model", "user.note") == b"kept"
    assert (target / "run").stat().st_nlink == 3
    assert list(trash.entries()) == []


def test_a_full_volume_is_freed_by_a_purge(
    client: threefs.Client, mount: Callable[..., Any]
) -> None:
    mounted = mount("volume")
    client.set_quota(mounted.root, 2 * MIB, 100)
    client.keep_removed(mounted.root, 3600)
    file = mounted.target / "file"
    file.write_bytes(b"x" * (2 * MIB))
    # Replaced by a rename: its bytes stay charged.
    (mounted.target / "empty").touch()
    (mounted.target / "empty").rename(file)
    with pytest.raises(OSError, match="quota") as refused:
        file.write_bytes(b"y" * MIB)
    assert refused.value.errno == errno.EDQUOT
    trash = client.trash(mounted.root)
    trash.purge(entry.id for entry in trash.entries())
    file.write_bytes(b"y" * MIB)
    assert file.read_bytes() == b"y" * MIB
