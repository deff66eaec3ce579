"""Lost metadata is restored from a dump that was made of a running service."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from threefs.cli import backup_folder

if TYPE_CHECKING:
    from collections.abc import Callable


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


def backup(store: Path, folder: Path, keep: int) -> tuple[str, str]:
    """The name of the new backup, and the warnings."""
    options = ("--data", str(store), "--folder", str(folder), "--keep", str(keep))
    result = threefs("meta", "backup", *options, "-o", "json")
    assert result.returncode == 0, result.stderr
    file = Path(json.loads(result.stdout)["file"])
    assert threefs("meta", "verify", "--file", str(file)).returncode == 0
    return file.name, result.stderr


def cluster_of(store: Path, folder: Path) -> str:
    """The name of the store's cluster in its backups; leaves the folder empty."""
    name, _ = backup(store, folder, 1)
    # The next backup may have the same second.
    (folder / name).unlink()
    return name.split("-")[1]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def store(start_cluster: Callable[..., Any]) -> Path:
    """The store of a metadata service that runs."""
    cluster = start_cluster("first")
    return next(path.parent for path in cluster.folder.rglob("meta/data.mdb"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "backups"
    folder.mkdir()
    return folder


def test_backups_of_one_cluster_are_verified_and_the_newest_are_kept(
    store: Path, folder: Path, tmp_path: Path
) -> None:
    cluster = cluster_of(store, folder)
    # Of another service, another cluster, an earlier release, a user.
    others = {
        f"mgmtd-{cluster}-20200101T000000Z.dump",
        f"meta-{int(cluster, 16) ^ 1:08x}-20200101T000000Z.dump",
        "meta-20200101T000000Z.dump",
        "meta-mine.dump",
        "meta-mine.dump.partial",
    }
    old = {f"meta-{cluster}-2020010{day}T000000Z.dump" for day in range(1, 5)}
    for name in others | old:
        (folder / name).write_text("old")
    missing = ("--data", str(tmp_path / "none"), "--folder", str(folder), "--keep", "2")
    result = threefs("meta", "backup", *missing)
    assert result.returncode != 0
    assert "has no store" in result.stderr
    assert names(folder) == others | old, "a failure removes nothing"
    newest, warnings = backup(store, folder, 3)
    assert warnings == ""
    kept = {f"meta-{cluster}-2020010{day}T000000Z.dump" for day in (3, 4)}
    assert names(folder) == others | kept | {newest}


def test_a_backup_with_a_later_time_does_not_replace_the_new_one(store: Path, folder: Path) -> None:
    cluster = cluster_of(store, folder)
    later = f"meta-{cluster}-29990101T000000Z.dump"
    (folder / later).write_text("later")
    earlier = f"meta-{cluster}-20200101T000000Z.dump"
    (folder / earlier).write_text("earlier")
    newest, warnings = backup(store, folder, 1)
    assert names(folder) == {newest, later}
    assert later in warnings
    assert "check the clock" in warnings


def test_interrupted_backups_are_removed_but_not_those_that_run(store: Path, folder: Path) -> None:
    abandoned = {
        "meta-20200101T000000Z-0a.unverified.partial",
        "meta-20200101T000000Z-0b.unverified",
    }
    other = "mgmtd-20200101T000000Z-0a.unverified.partial"
    for name in abandoned | {other}:
        (folder / name).write_text("")
    with backup_folder.draft(folder, "meta") as running:
        partial = running.with_name(running.name + ".partial")
        newest, _ = backup(store, folder, 1)
        assert names(folder) == {other, newest, partial.name}
        partial.rename(running)
        (folder / newest).unlink()
        newest, _ = backup(store, folder, 1)
        assert running.exists()
    assert names(folder) == {other, newest}


def test_a_dump_replaces_a_file_only_on_demand(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "good.dump"
    file.write_text("good")
    options = ("meta", "dump", "--data", str(store), "--file", str(file))
    result = threefs(*options)
    assert result.returncode != 0
    assert "--force" in result.stderr
    assert file.read_text() == "good"
    assert threefs(*options, "--force").returncode == 0
    assert threefs("meta", "verify", "--file", str(file)).returncode == 0


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
