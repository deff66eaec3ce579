"""Lost metadata is restored from a dump that was made of a running service."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def threefs(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "threefs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_lost_metadata_store_is_restored_from_a_dump(
    start_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    cluster = start_cluster("first")
    store = next(path.parent for path in cluster.folder.rglob("meta/data.mdb"))
    dump = tmp_path / "meta.dump"
    with cluster.client() as client:
        client.write_file("/kept", b"k" * (3 << 20))
        result = threefs("meta", "dump", "--data", str(store), "--file", str(dump))
        assert result.returncode == 0, result.stderr
        assert threefs("meta", "verify", "--file", str(dump)).returncode == 0
        client.write_file("/later", b"l" * (3 << 20))
    cluster.stop()
    again = threefs("meta", "load", "--data", str(store), "--file", str(dump))
    assert again.returncode != 0
    assert "already has a store" in again.stderr
    shutil.rmtree(store)
    result = threefs("meta", "load", "--data", str(store), "--file", str(dump))
    assert result.returncode == 0, result.stderr
    cluster = start_cluster("first")
    with cluster.client() as client:
        assert client.read_file("/kept") == b"k" * (3 << 20)
        assert client.listdir("/") == ["kept"]
        # Chunks of the lost file still exist: no new file may contain them.
        with client.open_raw("/new", "w") as file:
            file.truncate(3 << 20)
        assert client.read_file("/new") == bytes(3 << 20)


def test_backups_are_verified_and_the_newest_are_kept(
    start_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    cluster = start_cluster("first")
    store = next(path.parent for path in cluster.folder.rglob("meta/data.mdb"))
    folder = tmp_path / "backups"
    folder.mkdir()
    # Written when the clock was ahead: kept, and not counted.
    later = "meta-21260101T000000Z.dump"
    others = {"mgmtd-20200101T000000Z.dump", "meta-mine.dump", later}
    old = {f"meta-2020010{day}T000000Z.dump" for day in range(1, 5)}
    for name in others | old:
        (folder / name).write_text("old")
    missing = ("--data", str(tmp_path / "none"), "--folder", str(folder), "--keep", "2")
    result = threefs("meta", "backup", *missing)
    assert result.returncode != 0
    assert "has no store" in result.stderr
    assert {path.name for path in folder.iterdir()} == others | old, "a failure removes nothing"
    options = ("--data", str(store), "--folder", str(folder), "--keep", "3")
    result = threefs("meta", "backup", *options)
    assert result.returncode == 0, result.stderr
    assert "dumped and verified" in result.stdout
    assert later in result.stderr
    names = {path.name for path in folder.iterdir()} - others
    [newest] = names - old
    assert names - {newest} == {"meta-20200103T000000Z.dump", "meta-20200104T000000Z.dump"}
    assert threefs("meta", "verify", "--file", str(folder / newest)).returncode == 0


def test_a_store_is_a_folder_or_in_etcd(tmp_path: Path) -> None:
    file = ("--file", str(tmp_path / "dump"))
    both = ("--data", str(tmp_path), "--etcd-endpoints", "http://127.0.0.1:1")
    for options, words in (((), "none is given"), (both, "both are given")):
        result = threefs("meta", "dump", *options, *file)
        assert result.returncode != 0
        assert words in result.stderr


def test_a_damaged_dump_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dump").write_bytes(b"3FSDUMP1 and nothing else")
    result = threefs("mgmtd", "verify", "--file", str(tmp_path / "dump"))
    assert result.returncode != 0
    assert "is not a complete dump of kind `mgmtd`" in result.stderr
