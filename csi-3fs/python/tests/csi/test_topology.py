"""Volumes are accessible on the nodes with the labels of the node plugins, or on all nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from threefs.csi.errors import InvalidArgument
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.volumes.topology import parse_topology

from .driver import Driver, capability

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LABEL = {"example.com/storage": "yes"}
Service = csi.PluginCapability.Service


@pytest.fixture
def labelled(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path, topology=parse_topology("example.com/storage=yes"))
    yield driver
    driver.close()


def request(*requisite: dict[str, str]) -> csi.CreateVolumeRequest:
    topologies = [csi.Topology(segments=segments) for segments in requisite]
    return csi.CreateVolumeRequest(
        name="pvc-1",
        volume_capabilities=[capability()],
        accessibility_requirements=csi.TopologyRequirement(requisite=topologies),
    )


def has_constraints(driver: Driver) -> bool:
    capabilities = driver.call(csi.GetPluginCapabilitiesRequest()).capabilities
    kinds = [each.service.type for each in capabilities if each.HasField("service")]
    return Service.VOLUME_ACCESSIBILITY_CONSTRAINTS in kinds


def test_a_node_and_its_volumes_have_the_labels(labelled: Driver) -> None:
    assert has_constraints(labelled)
    info = labelled.call(csi.NodeGetInfoRequest())
    assert dict(info.accessible_topology.segments) == LABEL
    volume = labelled.create("pvc-1")
    [topology] = volume.accessible_topology
    assert dict(topology.segments) == LABEL
    [entry] = labelled.call(csi.ListVolumesRequest()).entries
    found = labelled.call(csi.ControllerGetVolumeRequest(volume_id=volume.volume_id)).volume
    assert entry.volume == found == volume


def test_without_labels_volumes_are_accessible_everywhere(driver: Driver) -> None:
    assert not has_constraints(driver)
    assert not driver.call(csi.NodeGetInfoRequest()).HasField("accessible_topology")
    assert not driver.call(request({"zone": "a"})).volume.accessible_topology


@pytest.mark.parametrize(
    "requisite", [[], [LABEL], [{**LABEL, "zone": "a"}], [{"zone": "a"}, LABEL]], ids=str
)
def test_a_volume_is_created_where_it_is_accessible(
    labelled: Driver, requisite: list[dict[str, str]]
) -> None:
    [topology] = labelled.call(request(*requisite)).volume.accessible_topology
    assert dict(topology.segments) == LABEL


@pytest.mark.parametrize(
    "requisite", [[{"zone": "a"}], [{"example.com/storage": "no"}], [{}]], ids=str
)
def test_a_volume_for_other_nodes_only_is_refused(
    labelled: Driver, requisite: list[dict[str, str]]
) -> None:
    code, message = labelled.refused(request(*requisite))
    assert code == "RESOURCE_EXHAUSTED"
    assert "nodes with example.com/storage=yes only" in message
    assert "remove allowedTopologies" in message
    assert not labelled.call(csi.ListVolumesRequest()).entries


def test_other_nodes_have_no_capacity(labelled: Driver, tmp_path: Path) -> None:
    def capacity(**segments: str) -> int:
        topology = csi.Topology(segments={key.replace("_", "/"): v for key, v in segments.items()})
        answer = labelled.call(csi.GetCapacityRequest(accessible_topology=topology))
        return int(answer.available_capacity)

    everywhere = int(labelled.call(csi.GetCapacityRequest()).available_capacity)
    assert everywhere > 0
    assert capacity(**{"example.com_storage": "yes", "zone": "a"}) == everywhere
    assert capacity(**{"example.com_storage": "no"}) == 0
    assert capacity(zone="a") == 0


@pytest.mark.parametrize(
    "text", ["a", "=b", "a=b c", "a=b,a=c", "a/b/c=d", "A.example/x=1", f"{'x' * 64}=1", "a=-b"]
)
def test_invalid_labels_are_named(text: str) -> None:
    with pytest.raises(InvalidArgument, match="THREEFS_TOPOLOGY"):
        parse_topology(text)


def test_labels_of_kubernetes_are_accepted() -> None:
    topology = parse_topology("topology.kubernetes.io/zone=eu-1,storage=,a.b/c_d=1.2-3").segment()
    assert topology is not None
    assert dict(topology.segments) == {
        "topology.kubernetes.io/zone": "eu-1", "storage": "", "a.b/c_d": "1.2-3",
    }  # fmt: skip
