"""`threefs fsck`: a served store is consistent at every moment, and damage is reported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import threefs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHECKS = 5


def fsck(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "threefs", "fsck", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def store_of(cluster: Any) -> str:
    return str(next(path.parent for path in cluster.folder.rglob("meta/data.mdb")))


def rows_of(dump: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The rows of a dump, as its format says."""
    at = 8 + 1 + dump[8]
    while key_length := int.from_bytes(dump[at : at + 4], "little"):
        value_length = int.from_bytes(dump[at + 4 : at + 8], "little")
        key_end = at + 8 + key_length
        yield dump[at + 8 : key_end], dump[key_end : key_end + value_length]
        at = key_end + value_length


def dump_of(rows: list[tuple[bytes, bytes]]) -> bytes:
    parts = [b"3FSDUMP1", bytes([4]), b"meta"]
    for key, value in rows:
        parts += [len(key).to_bytes(4, "little"), len(value).to_bytes(4, "little"), key, value]
    parts += [bytes(4), len(rows).to_bytes(8, "little")]
    content = b"".join(parts)
    return content + threefs.crc32c(content).to_bytes(4, "little")


def test_a_store_under_load_is_consistent(
    cluster: Any, client: threefs.Client, folder: str
) -> None:
    volume = f"{folder}/volume"
    client.mkdir(volume)
    client.set_quota(volume, bytes_max=1 << 30)
    client.keep_removed(volume, 3600)
    ended = threading.Event()
    rounds = [0, 0, 0]
    errors: list[BaseException] = []

    def change(worker: int) -> None:
        path = f"{volume}/{worker}"
        try:
            with cluster.client() as other:
                while not ended.is_set():
                    other.mkdir(f"{path}/deep", parents=True)
                    other.write_file(f"{path}/deep/file", b"x" * 5000)
                    other.rename(f"{path}/deep/file", f"{path}/moved")
                    other.rmtree(path)
                    trash = other.trash(volume)
                    trash.purge(
                        [entry.id for entry in trash.entries() if entry.name == str(worker)]
                    )
                    rounds[worker] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=change, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(CHECKS):
            before = sum(rounds)
            result = fsck("--data", store_of(cluster), "-o", "json")
            assert result.returncode == 0, result.stdout + result.stderr
            checked = json.loads(result.stdout)
            assert checked["findings"] == []
            assert checked["inodes"] > 1
            cluster.wait_for(lambda before=before: errors or sum(rounds) > before, 60, "progress")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_a_lost_name_is_found(
    cluster: Any, client: threefs.Client, folder: str, tmp_path: Path
) -> None:
    client.write_file(f"{folder}/kept", b"x")
    client.write_file(f"{folder}/lost", b"x")
    inode = client.stat(f"{folder}/lost").inode
    dump = tmp_path / "meta.dump"
    command = [sys.executable, "-m", "threefs", "meta", "dump", "--data", store_of(cluster)]
    subprocess.run([*command, "--file", str(dump)], check=True, capture_output=True, timeout=60)
    rows = list(rows_of(dump.read_bytes()))
    assert dump_of(rows) == dump.read_bytes()
    assert "consistent" in fsck("--file", str(dump)).stdout
    dump.write_bytes(dump_of([row for row in rows if not row[0].endswith(b"lost")]))
    result = fsck("--file", str(dump))
    assert result.returncode == 1
    lines = [line for line in result.stdout.splitlines() if f"inode {inode} " in line]
    assert any(line.startswith("links: ") for line in lines), result.stdout
    assert any("neither queued nor in the trash" in line for line in lines), result.stdout
    # A dump that is cut off is an error, not a finding.
    dump.write_bytes(dump.read_bytes()[:-1])
    result = fsck("--file", str(dump))
    assert result.returncode != 0
    assert "not a complete dump" in result.stderr


@pytest.mark.parametrize("options", [[], ["--data", "/x", "--file", "/y"]], ids=str)
def test_one_source_is_given(options: list[str]) -> None:
    result = fsck(*options)
    assert result.returncode != 0
    assert "--data" in result.stderr


def test_the_dump_of_a_store_is_removed(cluster: Any, tmp_path: Path) -> None:
    assert fsck("--data", store_of(cluster), "--scratch", str(tmp_path)).returncode == 0
    assert list(tmp_path.iterdir()) == []
    result = fsck("--data", str(tmp_path), "--scratch", str(tmp_path))
    assert result.returncode != 0
    assert "has no store" in result.stderr
    assert list(tmp_path.iterdir()) == []


def plant(cluster: Any, directory: int, dump: Path) -> None:
    """Stop the cluster and make counters of a directory wrong."""
    store = store_of(cluster)
    command = [sys.executable, "-m", "threefs", "meta"]
    options = ["--data", store, "--file", str(dump)]
    cluster.stop()
    subprocess.run([*command, "dump", *options], check=True, capture_output=True, timeout=120)
    number = directory.to_bytes(8, "big")
    wrong = {b"QINO" + number: 5, b"QBYT" + number: 1 << 30, b"DSUB" + number: -1}
    rows = []
    for key, value in rows_of(dump.read_bytes()):
        if (error := wrong.pop(key, 0)) != 0:
            count = int.from_bytes(value, "little", signed=True)
            value = (count + error).to_bytes(8, "little", signed=True)
        rows.append((key, value))
    assert not wrong
    dump.write_bytes(dump_of(rows))
    shutil.rmtree(store)
    subprocess.run([*command, "load", *options], check=True, capture_output=True, timeout=120)


def test_planted_errors_are_corrected_under_load(
    start_cluster: Any, cluster: Any, tmp_path: Path
) -> None:
    own = start_cluster("data")
    with own.client() as client:
        client.mkdir("/volume/deep", parents=True)
        client.set_quota("/volume", bytes_max=1 << 40)
        client.write_file("/volume/file", b"x" * 5000)
        directory = client.stat("/volume").inode
    plant(own, directory, tmp_path / "meta.dump")
    own = start_cluster("data")
    own.wait_whole()
    result = fsck("--data", store_of(own))
    assert result.returncode == 1
    assert "correct 2 counters with `threefs fsck --repair`" in result.stdout
    # The store of another cluster does not have the start of the repair.
    repair = ("--repair", "--cluster", str(own.file))
    result = fsck("--data", store_of(cluster), *repair)
    assert result.returncode == 2
    assert "is not the store of the cluster" in result.stderr

    ended = threading.Event()
    errors: list[BaseException] = []

    def change() -> None:
        try:
            with own.client() as other:
                while not ended.is_set():
                    other.mkdir("/volume/other")
                    other.write_file("/volume/other/file", b"y" * 9000)
                    other.rmtree("/volume/other")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        result = fsck("--data", store_of(own), *repair, "-o", "json")
    finally:
        ended.set()
        thread.join()
    assert errors == []
    assert result.returncode == 0, result.stdout + result.stderr
    checked = json.loads(result.stdout)
    assert (checked["corrected"], checked["correctable"], checked["findings"]) == (2, 0, [])
    with own.client() as client:
        quota = client.quota("/volume")
        assert quota is not None
        assert quota.bytes_used < 1 << 30
