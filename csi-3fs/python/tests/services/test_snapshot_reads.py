"""Snapshots after changes, for holders of the key and of a credential."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import threefs
from threefs.cli.credential import issue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHUNK = 1 << 20
SMALL = 1 << 14
VOLUME = "/snapshots"


@pytest.fixture
def volume(start_cluster: Callable[..., Any]) -> Any:
    cluster = start_cluster("data")
    with cluster.client() as client:
        client.make_directory(VOLUME, 0o777, chunk_bytes=CHUNK)
        client.set_quota(VOLUME, bytes_max=1 << 30)
    return cluster


def tree(client: threefs.Client, root: str = VOLUME) -> dict[str, Any]:
    """Names, attributes and contents below a directory."""
    found: dict[str, Any] = {}
    for name in client.listdir(root or "/"):
        path = f"{root}/{name}"
        stat = client.stat(path)
        if stat.is_dir:
            found[name] = tree(client, path)
        else:
            found[name] = (stat.size, stat.mode, client.read_file(path))
    return found


def fill(client: threefs.Client) -> None:
    client.mkdir(f"{VOLUME}/directory")
    client.write_file(f"{VOLUME}/small", b"before")
    client.write_file(f"{VOLUME}/large", os.urandom(5 * CHUNK + 17))
    client.write_file(f"{VOLUME}/directory/removed", b"x" * (CHUNK + 1))


def change(client: threefs.Client, root: str = VOLUME) -> None:
    client.write_file(f"{root}/small", b"after, and longer")
    with client.open(f"{root}/large", "r+b") as file:
        file.seek(2 * CHUNK - 5)
        file.write(b"across two chunks")
        file.truncate(3 * CHUNK)
    client.remove(f"{root}/directory/removed")
    client.rename(f"{root}/directory", f"{root}/renamed")
    client.write_file(f"{root}/renamed/new", b"new")


def test_a_snapshot_shows_what_there_was(volume: Any) -> None:
    with volume.client() as client:
        snapshots = client.snapshots(VOLUME)
        fill(client)
        expected = {}
        for turn in range(4):
            expected[f"s{turn}"] = tree(client, VOLUME)
            snapshots.create(f"s{turn}")
            change(client)
            client.rmtree(f"{VOLUME}/renamed")
            client.mkdir(f"{VOLUME}/directory")
            client.write_file(f"{VOLUME}/directory/removed", bytes([turn]) * 100)
            client.write_file(f"{VOLUME}/large", bytes([turn]) * (4 * CHUNK))
            shown = {name: tree(client, f"{VOLUME}/.snapshots/{name}") for name in expected}
            assert shown == expected
        assert ".snapshots" not in client.listdir(VOLUME)
    with volume.client() as other:
        shown = {name: tree(other, f"{VOLUME}/.snapshots/{name}") for name in expected}
        assert shown == expected


def connect_with_ticket(cluster: Any, folder: Path) -> threefs.Client:
    ticket, file = folder / "ticket", folder / "cluster.json"
    issue(cluster.file, VOLUME, read_only=False, expires="1h", node="", to=ticket)
    file.write_text(json.dumps(json.loads(cluster.file.read_text()) | {"key_file": str(ticket)}))
    return threefs.connect(file)


def test_the_holder_of_a_credential_reads_and_makes_snapshots_of_its_volume(
    volume: Any, tmp_path: Path
) -> None:
    with volume.client() as client, connect_with_ticket(volume, tmp_path) as holder:
        fill(client)
        # The capability of a handle is older than the first snapshot.
        with holder.open("/small", "r+b") as file:
            file.write(b"BEFORE")
            file.flush()
            expected = tree(holder, "")
            client.snapshots(VOLUME).create("first")
            file.seek(0)
            file.write(b"AFTER!")
        change(holder, "")
        assert tree(holder, "/.snapshots/first") == expected
        assert tree(client, f"{VOLUME}/.snapshots/first") == expected


def test_files_of_a_snapshot_do_not_change(volume: Any) -> None:
    with volume.client() as client:
        fill(client)
        client.snapshots(VOLUME).create("kept")
        expected = tree(client, VOLUME)
        kept = f"{VOLUME}/.snapshots/kept"
        changes: list[Callable[[], object]] = [
            lambda: client.write_file(f"{kept}/small", b"no"),
            lambda: client.write_file(f"{kept}/new", b"no"),
            lambda: client.open_raw(f"{kept}/small", "r+b").write(b"no"),
            lambda: client.open_raw(f"{kept}/small", "r+b").truncate(1),
            lambda: client.batch_write([(f"{kept}/small", 0, b"no")]),
            lambda: client.remove(f"{kept}/small"),
            lambda: client.mkdir(f"{kept}/more"),
            lambda: client.rename(f"{kept}/small", f"{VOLUME}/small"),
            lambda: client.rename(f"{VOLUME}/small", f"{kept}/small"),
            lambda: client.setxattr(f"{kept}/small", "user.a", b"no"),
            lambda: client.rmtree(kept),
            lambda: client.rmtree(f"{kept}/directory"),
            lambda: client.set_quota(kept, bytes_max=1),
            lambda: client.mkdir(f"{VOLUME}/.snapshots/new"),
            lambda: client.rename(f"{VOLUME}/.snapshots/kept", f"{VOLUME}/.snapshots/lost"),
            lambda: client.rename(f"{VOLUME}/directory", f"{VOLUME}/.snapshots/kept"),
        ]
        for change_it in changes:
            with pytest.raises(threefs.ReadOnly):
                change_it()
        with pytest.raises(threefs.Exists):
            client.mkdir(f"{VOLUME}/.snapshots")
        with pytest.raises(threefs.DirectoryNotEmpty):
            client.rmtree(VOLUME)
        assert tree(client, kept) == expected
        assert tree(client, VOLUME) == expected


def test_a_removed_snapshot_is_gone_and_the_others_stay(volume: Any) -> None:
    with volume.client() as client:
        fill(client)
        snapshots = client.snapshots(VOLUME)
        expected = {}
        for name in ("a", "b", "c"):
            expected[name] = tree(client, VOLUME)
            snapshots.create(name)
            client.write_file(f"{VOLUME}/large", name.encode() * (3 * CHUNK))
        removed = client.open_raw(f"{VOLUME}/.snapshots/b/large")
        assert removed.read(3) == b"aaa"
        snapshots.remove("b")
        assert client.listdir(f"{VOLUME}/.snapshots") == ["a", "c"]

        def is_gone() -> bool:
            removed.seek(2 * CHUNK)
            try:
                assert removed.read(10) == b"a" * 10
            except threefs.Stale:
                return True
            return False

        volume.wait_for(is_gone, 60, "the end of a removed snapshot")
        for name in ("a", "c"):
            assert tree(client, f"{VOLUME}/.snapshots/{name}") == expected[name]
        snapshots.create("b")
        assert client.read_file(f"{VOLUME}/.snapshots/b/large") == b"c" * (3 * CHUNK)


@pytest.mark.slow
def test_a_number_that_is_used_again_shows_the_new_snapshot(volume: Any) -> None:
    with volume.client() as client, volume.client() as reader:
        snapshots = client.snapshots(VOLUME)
        client.write_file(f"{VOLUME}/file", b"first" * SMALL)
        snapshots.create("first")
        held = reader.open_raw(f"{VOLUME}/.snapshots/first/file")
        assert held.read(5) == b"first"
        number = reader.stat(f"{VOLUME}/.snapshots/first/file").inode
        snapshots.remove("first")
        while True:
            with client.open_raw(f"{VOLUME}/file", "r+b") as file:
                file.write(b"later" * SMALL)
            snapshots.create("later")
            if reader.stat(f"{VOLUME}/.snapshots/later/file").inode == number:
                break
            snapshots.remove("later")
        assert reader.read_file(f"{VOLUME}/.snapshots/later/file") == b"later" * SMALL
        with pytest.raises(threefs.Stale):
            held.read(5)
