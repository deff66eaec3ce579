"""Data that is lost on the only replica: an error that names it, never zeros."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import threefs

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "fuse"))

from holding import start_mount
from test_service_processes import Pods, choose_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path, choose_ports(6), replicas=1)
    yield pods
    for process in pods.processes.values():
        process.kill()
        process.wait()


class EarlierDisk:
    """Restores an earlier state of a node's disk, like a wrong restore of a backup."""

    def __init__(self, pods: Pods, name: str) -> None:
        self._pods, self._name = pods, name
        self._disk, self._earlier = pods.folder / name, pods.folder / "earlier"
        pods.stop(name)
        shutil.copytree(self._disk, self._earlier)
        pods.start(name)

    def put_back(self) -> None:
        self._pods.stop(self._name)
        shutil.rmtree(self._disk)
        shutil.copytree(self._earlier, self._disk)
        self._pods.start(self._name)


def test_a_lost_chunk_is_an_error_that_names_it(pods: Pods) -> None:
    """One replica per chain; the disk of one node is reset to an earlier state."""
    pods.start_all()
    with threefs.connect(pods.folder / "cluster.json", timeout_seconds=60) as client:
        client.write_file("/first", random.Random(2).randbytes(MIB) * 48)  # all services are up
        disk = EarlierDisk(pods, "storage-0")
        data = random.Random(3).randbytes(MIB) * 48
        client.write_file("/dense", data)
        client.batch_write([("/sparse", 40 * MIB, b"end")])
        places = [2 * number * MIB for number in range(600)]
        client.batch_write([("/scattered", place, b"x") for place in places])
        disk.put_back()
        with pytest.raises(threefs.Corrupt, match=r"/dense.*was written and .* does not have it"):
            client.read_file("/dense")
        # A hole is not a loss, on any chain.
        assert client.batch_read([("/sparse", 0, 30 * MIB)]) == [bytes(30 * MIB)]
        # More ranges than fit into an inode.
        assert client.batch_read([("/scattered", place + MIB, 1) for place in places[:-1]]) == [
            b"\0" for _ in places[:-1]
        ]
        assert 0 < lost_or_written(client, "/scattered", places) < len(places)


def lost_or_written(client: threefs.Client, path: str, places: list[int]) -> int:
    """Count the lost positions; none may be zeros."""
    count = 0
    for place in places:
        try:
            assert client.batch_read([(path, place, 1)]) == [b"x"], place
        except threefs.Corrupt:
            count += 1
    return count


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
)
def test_data_written_through_a_mount_with_a_killed_daemon_is_not_a_hole(
    pods: Pods,
) -> None:
    """Storage loses written data, also of writes while the metadata service was unavailable."""
    pods.start_all()
    with threefs.connect(pods.folder / "cluster.json", timeout_seconds=60) as client:
        client.write_file("/first", random.Random(2).randbytes(MIB) * 48)  # all services are up
        client.make_directory("/root", 0o777)
        disk = EarlierDisk(pods, "storage-0")
        client.write_file("/second", bytes([1]) * (12 * MIB))
        mount = start_mount(pods.folder / "cluster.json", "/root", pods.folder, 1)
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(mount.target)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert program.stdin is not None
        assert program.stdout is not None

        def step() -> str:
            program.stdin.write("\n")
            program.stdin.flush()
            return program.stdout.readline().strip()

        try:
            assert program.stdout.readline() == "opened\n"
            pods.stop("meta")
            assert step() == "written"
            mount.signal(signal.SIGKILL)
            disk.put_back()
            pods.start("meta")
            mount.respawn()
            results = json.loads(step())
            places = [2 * number * MIB for number in range(200)]
            assert 0 < lost_or_written(client, "/root/scattered", places) < len(places)
        finally:
            mount.close()
            program.kill()
            program.wait()
    even = range(0, 13, 2)
    assert all(
        results[index] == (0 if index % 2 else 1) for index in range(13) if results[index] >= 0
    )
    failures = [index for index in range(13) if results[index] < 0]
    assert {-results[index] for index in failures} == {errno.EIO}
    assert set(failures) < set(even)


# A process without children: a child would wait for the dead daemon when it closes the file.
PROGRAM = """
import json, os, sys
os.chdir(sys.argv[1])
with open("scattered", "wb", buffering=0) as file:
    for number in range(200):
        os.pwrite(file.fileno(), b"x", number << 21)
file = os.open("file", os.O_CREAT | os.O_RDWR, 0o600)
os.ftruncate(file, 12 << 20)
print("opened", flush=True)
sys.stdin.readline()
for index in range(0, 13, 2):
    os.pwrite(file, bytes([1]), index << 20)
# Waits until the writes are durable, and needs no metadata service.
os.lseek(file, 0, os.SEEK_HOLE)
print("written", flush=True)
sys.stdin.readline()
def read(index):
    try:
        return os.pread(file, 1, index << 20)[0]
    except OSError as error:
        return -error.errno
print(json.dumps([read(index) for index in range(13)]), flush=True)
"""
