"""Reads from near replicas, with real processes in three zones."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from threefs.client import Client
from threefs.cluster import ClusterFile
from threefs.errors import InvalidArgument

sys.path.insert(0, str(Path(__file__).parent))

from test_service_processes import PATIENCE_SECONDS, Pods, all_serve, pods

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["pods"]

DATA = os.urandom(1 << 20)
NOTHING = {"host": 0, "rack": 0, "zone": 0, "other": 0}
BYTES = 10 * len(DATA)
ALL_FROM_HOST = {**NOTHING, "host": BYTES}
ALL_FROM_ZONE = {**NOTHING, "zone": BYTES}
ALL_FROM_OTHER = {**NOTHING, "other": BYTES}


def client_at(pods: Pods, location: str) -> Client:
    cluster = ClusterFile.read(pods.folder / "cluster.json")
    return Client(cluster, timeout_seconds=PATIENCE_SECONDS, location=location)


def start(pods: Pods) -> None:
    """Each of the three nodes, in one zone each, has a replica of every chunk."""
    for name in ("mgmtd", "meta"):
        pods.start(name)
    for number in range(3):
        pods.start(f"storage-{number}", "--zone", f"z{number}", "--host", f"h{number}")
    pods.wait_states(all_serve)


def ten_reads(client: Client) -> dict[str, int]:
    """The bytes of ten reads by distance; all return the data."""
    before = client.read_bytes()
    for _ in range(10):
        assert client.read_file("/file") == DATA
    return {name: count - before[name] for name, count in client.read_bytes().items()}


def reads_until(client: Client, goal: Callable[[dict[str, int]], bool]) -> None:
    """Read until ten reads satisfy the goal: a slow replica is not preferred for a second."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not goal(counts := ten_reads(client)):
        assert time.monotonic() < deadline, counts


def test_reads_are_answered_by_the_nearest_replica_that_serves(pods: Pods) -> None:
    start(pods)
    with client_at(pods, "z1//h1") as client, client_at(pods, "z1//h9") as neighbor:
        client.write_file("/file", DATA)
        reads_until(client, ALL_FROM_HOST.__eq__)
        reads_until(neighbor, ALL_FROM_ZONE.__eq__)
        assert client.read_bytes()["zone"] == neighbor.read_bytes()["host"] == 0
        # No read fails while the near replica is killed, nor while it is absent.
        pods.stop("storage-1", signal.SIGKILL)
        assert sum(ten_reads(client).values()) == sum(ten_reads(neighbor).values()) == BYTES
        reads_until(client, ALL_FROM_OTHER.__eq__)
        # A write while it is absent: it must not answer with the old data when it is back.
        client.write_file("/file", DATA[::-1])
        pods.start("storage-1", "--zone", "z1", "--host", "h1")
        before, deadline = client.read_bytes()["host"], time.monotonic() + PATIENCE_SECONDS
        while client.read_bytes()["host"] == before:
            assert client.read_file("/file") == DATA[::-1]
            assert time.monotonic() < deadline
        client.write_file("/file", DATA)
        reads_until(client, ALL_FROM_HOST.__eq__)
        reads_until(neighbor, ALL_FROM_ZONE.__eq__)


def test_without_a_known_near_replica_reads_are_spread(pods: Pods) -> None:
    start(pods)
    for location in ("", "z9//h1", "//h9"):
        with client_at(pods, location) as client:
            client.write_file("/file", DATA)
            assert ten_reads(client) == ALL_FROM_OTHER
    with pytest.raises(InvalidArgument, match="ZONE/RACK/HOST"):
        client_at(pods, "a b")
