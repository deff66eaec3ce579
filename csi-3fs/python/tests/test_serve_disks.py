"""`threefs serve --disks`: each folder is a node, and data stays whatever happens to one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from threefs.nodes import node_of, service_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Cluster

    Start = Callable[..., Cluster]

PATIENCE_SECONDS = 60.0
DATA = os.urandom(5 << 20)
DISKS = {node_of(service, disk) for service in (1, 2, 3) for disk in (0, 1)}


def run(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "threefs", *arguments, "--cluster", str(cluster.file)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=3 * PATIENCE_SECONDS, check=False
    )


def nodes_of(cluster: Cluster) -> dict[int, bool]:
    """The nodes, and whether they are alive."""
    return {node["node"]: node["alive"] for node in cluster.status()["cluster"]["nodes"]}


def wait_nodes(cluster: Cluster, expected: dict[int, bool]) -> None:
    """A node may count as dead for a moment on a busy machine."""
    cluster.wait_for(lambda: nodes_of(cluster) == expected, PATIENCE_SECONDS, f"{expected}")


def chains_of(cluster: Cluster) -> list[list[int]]:
    chains = cluster.status()["routing"]["chains"].values()
    return [[place["node"] for place in chain["targets"]] for chain in chains]


def write(cluster: Cluster) -> None:
    with cluster.client() as client:
        for number in range(4):
            client.write_file(f"/file-{number}", DATA)


def check(cluster: Cluster) -> None:
    with cluster.client() as client:
        for number in range(4):
            assert client.read_file(f"/file-{number}") == DATA


def identity_of(cluster: Cluster, name: str) -> Any:
    return json.loads((cluster.folder / "data" / name / "identity.json").read_text())


def test_a_disk_is_drained_into_the_others_of_its_service(start_cluster: Start) -> None:
    cluster = start_cluster("data", "--disks", "2")
    wait_nodes(cluster, dict.fromkeys(DISKS, True))
    write(cluster)
    drained = run(cluster, "drain", "node-1.1", "--apply")
    assert drained.returncode == 0, drained.stderr
    assert "node-1.1: empty" in drained.stdout
    chains = chains_of(cluster)
    assert all({service_of(node) for node in nodes} == {1, 2, 3} for nodes in chains)
    assert not any(node_of(1, 1) in nodes for nodes in chains)
    shown = run(cluster, "status")
    assert shown.returncode == 0
    assert "node-1.1 is drained: 0 replicas remain" in shown.stdout
    check(cluster)


def test_more_disks_are_added_to_a_folder_and_none_is_left_out(start_cluster: Start) -> None:
    cluster = start_cluster("data")
    write(cluster)
    cluster.stop()
    cluster = start_cluster("data", "--disks", "2")
    assert nodes_of(cluster).keys() == DISKS
    check(cluster)
    cluster.stop()
    fewer = run_serve(cluster)
    assert fewer.returncode == 2
    assert "has the disks storage-1.1, storage-2.1, storage-3.1, which --disks 1" in fewer.stderr


def run_serve(cluster: Cluster) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "threefs", "serve", "--data", str(cluster.folder)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


def test_disks_are_recognized_at_each_others_paths(start_cluster: Start) -> None:
    cluster = start_cluster("data", "--disks", "2")
    write(cluster)
    cluster.stop()
    first, second = (cluster.folder / "data" / name for name in ("storage-1", "storage-1.1"))
    other = cluster.folder / "other"
    first.rename(other)
    second.rename(first)
    other.rename(second)
    cluster = start_cluster("data", "--disks", "2")
    assert identity_of(cluster, "storage-1")["node"] == node_of(1, 1)
    wait_nodes(cluster, dict.fromkeys(DISKS, True))
    check(cluster)


def test_a_lost_disk_is_replaced_and_filled_from_the_others(start_cluster: Start) -> None:
    cluster = start_cluster("data", "--disks", "2")
    write(cluster)
    before = identity_of(cluster, "storage-2.1")["disk"]
    shutil.rmtree(cluster.folder / "data" / "storage-2.1")
    lost = node_of(2, 1)
    wait_nodes(cluster, {**dict.fromkeys(DISKS, True), lost: False})
    check(cluster)
    cluster.stop()
    cluster = start_cluster("data", "--disks", "2", "--ready-timeout", "60")
    identity = identity_of(cluster, "storage-2.1")
    assert identity["node"] == lost
    assert identity["disk"] != before
    cluster.wait_whole(PATIENCE_SECONDS)
    wait_nodes(cluster, dict.fromkeys(DISKS, True))
    assert any(lost in nodes for nodes in chains_of(cluster))
    check(cluster)
