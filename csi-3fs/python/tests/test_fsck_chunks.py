"""`threefs fsck --chunks`: leaked chunks of a real cluster are found and removed, nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from threefs.cli.fsck_chunks import is_bad

if TYPE_CHECKING:
    import threefs

SECONDS = 120


def fsck(cluster: Any, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "threefs", "fsck", "--chunks", "--cluster", str(cluster.file)]
    return subprocess.run(
        [*command, "--grace", "0", *options],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def checked(cluster: Any, *options: str) -> tuple[int, dict[str, Any]]:
    result = fsck(cluster, *options, "-o", "json")
    assert result.returncode in (0, 1), result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return result.returncode, report


def test_a_cluster_under_load_has_no_findings(
    cluster: Any, client: threefs.Client, folder: str
) -> None:
    ended = threading.Event()
    problems: list[BaseException] = []

    def change(worker: int) -> None:
        number = 0
        try:
            with cluster.client() as other:
                while not ended.is_set():
                    number += 1
                    path, content = f"{folder}/{worker}-{number}", bytes([number % 256]) * 1_500_000
                    other.write_file(path, content)
                    other.rename(path, f"{folder}/{worker}")
                    assert other.read_file(f"{folder}/{worker}") == content
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=change, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            status, report = checked(cluster, "--repair")
            assert (status, problems) == (0, []), report
            assert report["chunks"] > 0
            assert report["leaked"]["chunks"] == report["missing_chunks"] == 0
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert problems == []
    assert client.listdir(folder) == ["0", "1"]


def test_chunks_of_files_that_a_restored_backup_lacks_are_leaked(
    start_cluster: Any, tmp_path: Any
) -> None:
    cluster = start_cluster("data")
    with cluster.client() as client:
        client.write_file("/kept", b"k" * 2_000_000)
        assert checked(cluster)[0] == 0
    dump = tmp_path / "meta.dump"
    store = next(path.parent for path in cluster.folder.rglob("meta/data.mdb"))
    command = [sys.executable, "-m", "threefs", "meta"]

    def meta(verb: str) -> None:
        options = ["--data", str(store), "--file", str(dump)]
        subprocess.run([*command, verb, *options], check=True, capture_output=True, timeout=SECONDS)

    meta("dump")
    with cluster.client() as client:
        client.write_file("/lost", b"l" * 3_000_000)
    cluster.stop()
    shutil.rmtree(store)
    meta("load")
    cluster = start_cluster("data")
    cluster.wait_whole()

    status, report = checked(cluster)
    assert status == 1
    assert report["leaked"] == {"inodes": 1, "chunks": 3, "bytes": 3_000_000}
    [leak] = report["leaks"]
    table = fsck(cluster)
    assert table.returncode == 1
    assert f"leaked: inode {leak['inode']} does not exist and has 3 chunks" in table.stdout
    assert "--repair" in table.stdout
    status, report = checked(cluster, "--repair")
    assert (status, report["removed"]) == (0, report["leaked"])
    assert report["leaks"] == []
    status, report = checked(cluster)
    assert (status, report["leaked"]["inodes"]) == (0, 0)
    with cluster.client() as client:
        assert client.read_file("/kept") == b"k" * 2_000_000
        client.write_file("/new", b"n" * 1000)
        assert client.read_file("/new") == b"n" * 1000


NOTHING = {"inodes": 0, "chunks": 0, "bytes": 0}
CLEAN: dict[str, Any] = {
    "leaked": NOTHING,
    "removed": NOTHING,
    "missing_chunks": 0,
    "unconfirmed_chunks": 0,
    "not_read": {},
}


@pytest.mark.parametrize(
    ("change", "bad"),
    [
        ({}, False),
        ({"leaked": {"inodes": 2}, "removed": {"inodes": 2}}, False),
        ({"leaked": {"inodes": 2}, "removed": {"inodes": 1}}, True),
        ({"missing_chunks": 1}, True),
        ({"unconfirmed_chunks": 1}, True),
        ({"not_read": {"1": "no replica serves"}}, True),
    ],
)
def test_what_is_a_failure(change: dict[str, Any], bad: bool) -> None:
    assert is_bad(CLEAN | change) is bad


@pytest.mark.parametrize(
    ("options", "problem"),
    [(["--data", "/x"], "--cluster"), (["--file", "/x"], "--cluster")],
)
def test_chunks_are_those_of_a_cluster(cluster: Any, options: list[str], problem: str) -> None:
    result = fsck(cluster, *options)
    assert result.returncode == 2
    assert problem in result.stderr


def test_a_repair_is_one_of_a_running_cluster() -> None:
    command = [sys.executable, "-m", "threefs", "fsck", "--repair", "--file", "/x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert result.returncode == 2
    assert "pass its store, not --file" in result.stderr
