"""Scrubs of a real cluster: damage is detected, repaired, and reported if no replica is intact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import threefs
from prometheus_client import CollectorRegistry
from threefs.exporter import StatusCollector

if TYPE_CHECKING:
    from pathlib import Path

#: A scrub of the few chunks here. Measured: below 1 s.
SCRUB_SECONDS = 60
#: Collection of a removed file: at most some 45 s.
COLLECTION_SECONDS = 150


def scrub(cluster: Any, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a scrub of all targets; return the exit status and the scrubs."""
    command = [sys.executable, "-m", "threefs", "scrub", "--cluster", str(cluster.file)]
    result = subprocess.run(
        [*command, "--now", "--wait", str(SCRUB_SECONDS), "-o", "json", *options],
        capture_output=True,
        timeout=3 * SCRUB_SECONDS,
        check=False,
    )
    scrubs: list[dict[str, Any]] = json.loads(result.stdout or b"[]")
    return result.returncode, scrubs


def total(scrubs: list[dict[str, Any]], key: str) -> int:
    return sum(status["scrub"]["total"][key] for status in scrubs)


def damage(cluster: Any, node: int, content: bytes) -> Path:
    """Flip one bit of the content in the data file of a node; return the file."""
    folder: Path = cluster.folder / "data" / f"storage-{node}"
    for path in folder.glob("target-*/data"):
        at = path.read_bytes().find(content[:4096])
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 1000)
                file.write(bytes([content[1000] ^ 1]))
                os.fsync(file.fileno())
            return path
    raise AssertionError(f"node {node} does not hold the content")


def copies(cluster: Any, content: bytes) -> int:
    """Intact copies of the first block of the content, in all data files."""
    files = (cluster.folder / "data").glob("storage-*/target-*/data")
    return sum(content[:4096] in path.read_bytes() for path in files)


def metric(client: Any, name: str) -> float:
    registry = CollectorRegistry()
    registry.register(StatusCollector(client.status, client.scrub))
    values = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    ]
    return sum(values)


def test_scrubs_repair_one_and_two_damaged_replicas_and_report_a_lost_chunk(
    start_cluster: Any,
) -> None:
    cluster = start_cluster()
    one, two, three = (os.urandom(300_000) for _ in range(3))
    with cluster.client() as client:
        for name, content in (("one", one), ("two", two), ("three", three)):
            client.write_file(f"/{name}", content)
        status, scrubs = scrub(cluster)
        assert status == 0
        assert total(scrubs, "bytes") >= 3 * 900_000
        assert total(scrubs, "damaged") == 0

        damage(cluster, 3, one)
        for node in (1, 2):
            damage(cluster, node, two)
        status, scrubs = scrub(cluster)
        assert status == 0
        assert (total(scrubs, "damaged"), total(scrubs, "repaired")) == (3, 3)
        assert (copies(cluster, one), copies(cluster, two)) == (3, 3)
        assert metric(client, "threefs_scrub_repaired_chunks_total") == 3
        assert metric(client, "threefs_scrub_damaged_chunks") == 0

        files = {damage(cluster, node, three) for node in (1, 2, 3)}
        before = {path: path.read_bytes() for path in files}
        status, scrubs = scrub(cluster)
        assert status == 1
        lost = [chunk for it in scrubs for chunk in it["scrub"]["damaged_chunks"]]
        assert lost == [{"inode": client.stat("/three").inode, "index": 0}] * 3
        assert total(scrubs, "repaired") == 3
        assert {path: path.read_bytes() for path in files} == before, "nothing was replaced"
        assert metric(client, "threefs_scrub_damaged_chunks") == 3
        assert client.read_file("/one") == one
        assert client.read_file("/two") == two


def test_chains_with_a_lost_chunk_become_whole_and_rewriting_the_file_ends_the_report(
    start_cluster: Any,
) -> None:
    cluster = start_cluster()
    contents = {f"/file-{number}": os.urandom(300_000) for number in range(6)}
    with cluster.client() as client:
        for path, content in contents.items():
            client.write_file(path, content)
            # The commits of the last files are not durable: after the restart they are pending.
            for node in (1, 2, 3):
                damage(cluster, node, content)
        files = {client.stat(path).inode for path in contents}

    def routing() -> int:
        version: int = cluster.status()["cluster"]["routing_version"]
        return version

    before = routing()
    for node in (1, 2, 3):
        cluster.kill(f"storage-{node}")
    cluster.wait_for(lambda: routing() > before, 20, "chain without replicas")
    cluster.wait_whole()
    status, scrubs = scrub(cluster)
    assert status == 1
    lost = [chunk for it in scrubs for chunk in it["scrub"]["damaged_chunks"]]
    assert sorted(chunk["inode"] for chunk in lost) == sorted([*files] * 3)
    assert total(scrubs, "repaired") == 0
    with cluster.client(5.0) as client:
        with pytest.raises(threefs.ThreeFSError, match=r"corrupt|damaged"):
            client.read_file("/file-0")
        for path, content in contents.items():
            if path == "/file-5":
                continue
            client.batch_write([(path, 0, content)])
            assert client.read_file(path) == content
        status, scrubs = scrub(cluster)
        lost = [chunk for it in scrubs for chunk in it["scrub"]["damaged_chunks"]]
        assert {chunk["inode"] for chunk in lost} == {client.stat("/file-5").inode}
        # A new inode: the old one is collected after its clients' updates have expired.
        client.write_file("/file-5", contents["/file-5"])
        assert client.read_file("/file-5") == contents["/file-5"]
    cluster.wait_for(lambda: scrub(cluster)[0] == 0, COLLECTION_SECONDS, "scrub without damage")


def test_an_unknown_target_and_a_stopped_service_are_named(start_cluster: Any) -> None:
    cluster = start_cluster()
    command = [sys.executable, "-m", "threefs", "scrub", "--cluster", str(cluster.file)]
    result = subprocess.run(
        [*command, "--target", "99"], capture_output=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert b"target-99 is in no chain" in result.stderr
    status, scrubs = scrub(cluster, "--target", "1048577")
    assert (status, [it["target"] for it in scrubs]) == (0, [1048577])
