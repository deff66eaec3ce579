"""Ids and names of storage nodes, each of which is a disk of a service."""

import json
from pathlib import Path
from typing import Any

import pytest
from threefs.errors import InvalidArgument, ThreeFSError
from threefs.nodes import (
    DISK_MAX,
    SERVICE_MAX,
    node_label,
    node_name,
    node_of,
    nodes_named,
    service_of,
)
from threefs.services import probe
from threefs.supervisor import ServeOptions
from threefs.supervisor.folder import DataFolder
from threefs.supervisor.plan import service_names, services
from threefs.supervisor.serve import reason_not_ready


@pytest.mark.parametrize(
    ("service", "disk", "node", "name"),
    [
        (3, 0, 3, "node-3"),
        (3, 2, 2_000_003, "node-3.2"),
        (1, 10, 10_000_001, "node-1.10"),
        (SERVICE_MAX, 0, 999_999, "node-999999"),
        (SERVICE_MAX, DISK_MAX, 255_999_999, "node-999999.255"),
    ],
)
def test_a_name_and_an_id_denote_the_same_disk(
    service: int, disk: int, node: int, name: str
) -> None:
    assert node_of(service, disk) == node
    assert service_of(node) == service
    assert node_name(node) == f"node-{node_label(node)}" == name
    for other in (name, str(node), f"node-{node}"):
        assert nodes_named(other, {node, 7}) == {node}
        assert nodes_named(other, {7}) == set()


@pytest.mark.parametrize(
    "name", ["", "node-", "node-3.", "node-.2", "3.2", "node-3.2.1", "node-x", "-3", "node-٣", "h3"]
)
def test_other_names_denote_no_disk(name: str) -> None:
    assert nodes_named(name, {3, 2_000_003}) is None


def test_a_service_denotes_its_disks() -> None:
    known = {3, 2_000_003, 4, 1_000_004, 30, 3_000_030}
    assert nodes_named("service-3", known) == {3, 2_000_003}
    assert nodes_named("service-4", known) == {4, 1_000_004}
    assert nodes_named("service-5", known) == set()
    assert nodes_named("service-4.1", known) is None


def status(alive: dict[int, bool], replicas_on: set[int]) -> dict[str, Any]:
    nodes = [{"node": node, "alive": it, "heartbeat_age_ms": 5} for node, it in alive.items()]
    chains = {"1": {"targets": [{"node": node} for node in replicas_on]}}
    return {"cluster": {"nodes": nodes}, "routing": {"chains": chains}}


@pytest.mark.parametrize(
    ("alive", "replicas_on", "problem"),
    [
        ({3: True, 1_000_003: True, 4: False, 1_000_004: False}, {3, 1_000_003, 4}, ""),
        ({4: True, 1_000_004: True}, set(), "does not know node-3 yet"),
        ({3: True, 1_000_003: False}, {3, 1_000_003}, "counts node-3.1 as dead"),
        ({3: False, 1_000_003: True}, {3, 1_000_003}, "counts node-3 as dead"),
        # Emptied by a drain.
        ({3: True, 1_000_003: False}, {3}, ""),
        ({3: False, 1_000_003: True}, {1_000_003}, ""),
        ({3: False, 1_000_003: False}, set(), "counts node-3, node-3.1 as dead"),
    ],
)
def test_a_service_is_ready_while_its_disks_with_replicas_are_alive(
    monkeypatch: pytest.MonkeyPatch, alive: dict[int, bool], replicas_on: set[int], problem: str
) -> None:
    monkeypatch.setattr(probe, "_check_port", lambda *_: None)
    monkeypatch.setattr(probe, "_status", lambda *_, **__: status(alive, replicas_on))

    def check() -> None:
        probe.probe("storage", "", Path("/key"), "mgmtd:9000", 3, ready=True, timeout_seconds=1.0)

    if problem:
        with pytest.raises(ThreeFSError, match=problem):
            check()
    else:
        check()


def plan_of(options: ServeOptions) -> list[dict[str, Any]]:
    """The configurations of the storage services."""
    addresses = {name: f"127.0.0.1:{port}" for port, name in enumerate(service_names(options), 1)}
    planned = services(options, addresses, options.data / "key", options.data / "data")
    return [service.config for service in planned if service.kind == "storage"]


def test_a_storage_process_of_threefs_serve_has_a_folder_for_each_disk(tmp_path: Path) -> None:
    data = tmp_path.resolve() / "data"
    (first, second) = plan_of(ServeOptions(tmp_path, storage=2, replicas=2, disks=3))
    assert (first["node_id"], first["data"]) == (1, str(data / "storage-1"))
    assert first["disks"] == [str(data / "storage-1.1"), str(data / "storage-1.2")]
    assert second["disks"] == [str(data / "storage-2.1"), str(data / "storage-2.2")]
    assert "disks" not in plan_of(ServeOptions(tmp_path))[0]


def test_missing_folders_of_disks_are_marked_as_new_ones(tmp_path: Path) -> None:
    folder, data = DataFolder(tmp_path), tmp_path / "data"
    data.mkdir()
    folder.make_disks(ServeOptions(tmp_path))
    assert not any(data.iterdir())
    # An unmounted disk leaves an empty folder, which is not a new disk.
    (data / "storage-1").mkdir()
    folder.make_disks(ServeOptions(tmp_path, storage=1, replicas=1, disks=2))
    names = sorted(str(path.relative_to(data)) for path in data.rglob("*"))
    assert names == ["storage-1", "storage-1.1", "storage-1.1/adopt"]
    with pytest.raises(InvalidArgument, match=r"has the disks storage-1.1, which --disks 1 leaves"):
        folder.make_disks(ServeOptions(tmp_path, storage=1, replicas=1))


@pytest.mark.parametrize("disks", [0, DISK_MAX + 2])
def test_a_number_of_disks_that_has_no_ids_is_refused(tmp_path: Path, disks: int) -> None:
    with pytest.raises(InvalidArgument, match=f"--disks is {disks}"):
        ServeOptions(tmp_path, disks=disks).check()


def test_the_start_waits_for_every_service_and_then_for_every_disk(tmp_path: Path) -> None:
    options = ServeOptions(tmp_path, storage=2, replicas=2, disks=2)

    def reason(nodes: list[int], chains: int) -> str:
        cluster = {
            "nodes": [{"node": node, "alive": True} for node in nodes],
            "nodes_expected": 2,
            "chains": chains,
            "chains_whole": chains,
        }
        value = {"cluster": cluster, "meta": {}, "mgmtds": [], "metas": []}
        return reason_not_ready(json.loads(json.dumps(value)), options)

    assert "1 of 2 storage services" in reason([1, 1_000_001], 0)
    assert reason([1, 2, 1_000_001], 2) == "3 of 4 disks have registered"
    assert reason([1, 2, 1_000_001, 1_000_002], 2) == ""
