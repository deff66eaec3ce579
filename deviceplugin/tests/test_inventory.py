"""The inventory from valid and from inconsistent sysfs trees."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from flyer_node.errors import DataError
from flyer_node.inventory import FindingKind, Gpu, Inventory, LinkLayer
from flyer_node.inventory.assemble import DriverFacts, DriverGpu, assemble, read_sysfs
from flyer_node.inventory.hca import read_ports
from flyer_node.inventory.nccl import nccl_topology
from flyer_node.inventory.pci import normal_address, parse_cpus
from flyer_node.inventory.tree import SysfsTree
from flyer_node.json_codec import from_json, to_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deviceplugin.testing.sysfs import FakeHca, FakeNode, paper_node, write_sysfs


def driver_facts(node: FakeNode) -> DriverFacts:
    return DriverFacts(
        "550.90.07",
        tuple(
            DriverGpu(
                Gpu(gpu.uuid, index, index, gpu.address, "A100", 40 << 30, (8, 0)),
                () if gpu.peer is None else (node.gpus[gpu.peer].address,) * 12,
            )
            for index, gpu in enumerate(node.gpus)
        ),
    )


def inventory(node: FakeNode, root: Path) -> Inventory:
    return assemble("node-1", read_sysfs(write_sysfs(node, root)), driver_facts(node))


def kinds(node: Inventory) -> set[FindingKind]:
    return {finding.kind for finding in node.findings}


def test_the_node_of_the_paper_has_no_finding(tmp_path: Path) -> None:
    node = inventory(paper_node(), tmp_path / "sys")
    assert not node.findings
    assert [node.numa_of_gpu(gpu.uuid) for gpu in node.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    indices = {gpu.uuid: gpu.index for gpu in node.gpus}
    pairs = [
        (indices[bridge.first], indices[bridge.second], bridge.links) for bridge in node.bridges
    ]
    assert pairs == [(0, 1, 12), (2, 3, 12), (4, 5, 12), (6, 7, 12)]
    place = node.pci_by_address
    roots = [place[gpu.address].root_complex for gpu in node.gpus]
    assert roots[5] == roots[6]
    assert len(set(roots)) == 7, "only GPUs 5 and 6 share a root complex"
    hca = node.hcas[0]
    assert place[hca.address or ""].root_complex not in roots, "the NIC has a separate root complex"
    assert (hca.verbs_device, hca.management_devices, hca.numa_node) == ("uverbs0", ("umad0",), 1)
    assert [(port.link_layer, port.rate_gbps) for port in hca.ports] == [
        (LinkLayer.INFINIBAND, 200.0)
    ]
    link = place[node.gpus[0].address].link
    assert link is not None
    assert (link.gigatransfers, link.lanes) == (16.0, 16)


@pytest.mark.parametrize(
    "node",
    [
        paper_node(),
        paper_node(gpus=0),
        paper_node(gpus=4),
        replace(paper_node(), below_switch=True),
        replace(paper_node(), hcas=()),
        paper_node().with_layer("Ethernet"),
        replace(paper_node(), hcas=(FakeHca("mlx5_0", "e0", "e1", 1, ports=2),)),
    ],
    ids=["paper", "no gpus", "four", "switch", "no nic", "roce", "two ports"],
)
def test_every_variant_survives_json_and_has_a_topology_file(
    node: FakeNode, tmp_path: Path
) -> None:
    result = inventory(node, tmp_path / "sys")
    assert not result.findings
    assert from_json(Inventory, json.loads(json.dumps(to_json(result)))) == result
    system = ET.fromstring(nccl_topology(result))
    addresses = {element.get("busid") for element in system.iter("pci")}
    assert {gpu.address for gpu in result.gpus} <= addresses
    assert {hca.address for hca in result.hcas} <= addresses


def test_the_topology_file_has_numa_nodes_and_links_but_no_gpu_index(tmp_path: Path) -> None:
    system = ET.fromstring(nccl_topology(inventory(paper_node(), tmp_path / "sys")))
    cpus = {element.get("numaid"): element for element in system.findall("cpu")}
    assert set(cpus) == {"0", "1"}
    assert cpus["1"].get("affinity") == "ffffffff,00000000"
    assert [len(cpus[numa_id].findall("pci")) for numa_id in ("0", "1")] == [4, 5]
    bridge = cpus["0"].findall("pci")[0]
    assert (bridge.get("link_speed"), bridge.get("link_width")) == ("16.0 GT/s PCIe", "16")
    assert not list(system.iter("gpu"))


def test_a_switch_that_devices_share_is_in_the_topology_file(tmp_path: Path) -> None:
    node = replace(paper_node(), below_switch=True)
    system = ET.fromstring(nccl_topology(inventory(node, tmp_path / "sys")))
    bridges = [element for element in system.iter("pci") if element.get("class") == "0x060400"]
    assert bridges
    assert any(len(bridge.findall("pci")) >= 2 for bridge in bridges)


GPU0 = "bus/pci/devices/0000:01:00.0"
PORT = "class/infiniband/mlx5_0/ports/1"
MALFORMED = {
    "numa -1": ({f"{GPU0}/numa_node": "-1"}, FindingKind.MALFORMED),
    "numa huge": ({f"{GPU0}/numa_node": "999999"}, FindingKind.MALFORMED),
    "numa words": ({f"{GPU0}/numa_node": "left"}, FindingKind.MALFORMED),
    "numa empty": ({f"{GPU0}/numa_node": ""}, FindingKind.MALFORMED),
    "class words": ({f"{GPU0}/class": "display"}, FindingKind.MALFORMED),
    "class too large": ({f"{GPU0}/class": "0xfffffffff"}, FindingKind.MALFORMED),
    "speed": ({f"{GPU0}/current_link_speed": "fast"}, FindingKind.MALFORMED),
    "width": ({f"{GPU0}/current_link_width": "-4"}, FindingKind.MALFORMED),
    "cpus": ({"devices/system/node/node0/cpulist": "7-3,x"}, FindingKind.MALFORMED),
    "cpus endless": ({"devices/system/node/node0/cpulist": "0-99999999999"}, FindingKind.MALFORMED),
    "port state": ({f"{PORT}/state": "ACTIVE"}, FindingKind.MALFORMED),
    "link layer": ({f"{PORT}/link_layer": "Token Ring"}, FindingKind.MALFORMED),
    "odd address": ({"bus/pci/devices/gpu0/class": "0x030200"}, FindingKind.MALFORMED),
    "odd port": ({"class/infiniband/mlx5_0/ports/one/state": "4: ACTIVE"}, FindingKind.MALFORMED),
    "odd adapter": ({"class/infiniband/a b/ports/1/state": "x"}, FindingKind.MALFORMED),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_wrong_content_of_files_becomes_findings(case: str, tmp_path: Path) -> None:
    odd, kind = MALFORMED[case]
    result = inventory(replace(paper_node(), odd=odd), tmp_path / "sys")
    assert kind in kinds(result), result.findings
    assert len(result.gpus) == 8, "GPUs that the driver lists remain"
    assert all(finding.detail and finding.where for finding in result.findings)
    nccl_topology(result)


def test_a_numa_node_of_minus_one_is_unknown_and_not_zero(tmp_path: Path) -> None:
    node = inventory(replace(paper_node(), odd={f"{GPU0}/numa_node": "-1"}), tmp_path / "sys")
    assert node.numa_of_gpu(node.gpus[0].uuid) is None


@pytest.mark.parametrize(
    ("break_it", "kind"),
    [
        (lambda root: (root / GPU0).unlink(), FindingKind.CONFLICT),
        (lambda root: _link(root / GPU0, "0000:01:00.0"), FindingKind.LOOP),
        (lambda root: _link(root / GPU0, "/etc"), FindingKind.LOOP),
        (lambda root: _link(root / GPU0, "nowhere"), FindingKind.MISSING),
        (lambda root: _link(root / GPU0, "0000:21:00.0"), FindingKind.CONFLICT),
        (lambda root: (root / GPU0 / "numa_node").unlink(), FindingKind.MISSING),
        (lambda root: _fifo(root / GPU0 / "numa_node"), FindingKind.MALFORMED),
        (lambda root: _folder(root / GPU0 / "numa_node"), FindingKind.MALFORMED),
        (lambda root: (root / GPU0 / "vendor").write_bytes(b"\xff\xfe" * 9), FindingKind.MALFORMED),
        (lambda root: (root / GPU0 / "numa_node").write_text("1" * 99999), FindingKind.MALFORMED),
        (lambda root: shutil.rmtree(root / "bus"), FindingKind.MISSING),
        (lambda root: shutil.rmtree(root / "devices/system"), FindingKind.MISSING),
        (lambda root: shutil.rmtree(root / "class/infiniband_verbs"), FindingKind.MISSING),
        (lambda root: shutil.rmtree(root / PORT), FindingKind.MISSING),
    ],
)
def test_broken_trees_become_findings(break_it: object, kind: FindingKind, tmp_path: Path) -> None:
    node = paper_node()
    root = write_sysfs(node, tmp_path / "sys")
    if kind is FindingKind.MISSING and not (root / PORT).exists():
        raise AssertionError("the tree has no port")
    break_it(root)  # type: ignore[operator]
    result = assemble("node-1", read_sysfs(root), driver_facts(node))
    if not (root / PORT).exists():
        assert result.hcas[0].ports == ()
    else:
        assert kind in kinds(result), result.findings
    assert len(result.gpus) == 8
    nccl_topology(result)


def _link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def test_an_empty_root_is_an_empty_node(tmp_path: Path) -> None:
    node = assemble("node-1", read_sysfs(tmp_path), DriverFacts())
    assert (node.gpus, node.hcas, node.pci) == ((), (), ())
    assert node.findings


def test_an_attribute_that_cannot_be_read_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some firmware writes to the kernel's log for every read that it refuses."""
    root = write_sysfs(paper_node(), tmp_path / "sys")
    refused: set[str] = set()
    reads: list[str] = []
    real = os.read

    def failing(descriptor: int, count: int) -> bytes:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name == "symbol_error":
            reads.append(path.name)
            raise OSError(5, "Input/output error")
        return real(descriptor, count)

    monkeypatch.setattr("flyer_node.inventory.tree.os.read", failing)
    for _ in range(5):
        (port,) = read_ports(SysfsTree(root, refused))
        assert "symbol_error" not in port.counters
        assert port.counters["link_downed"] == 0
    assert len(reads) == 1


@pytest.mark.parametrize(
    "peers",
    [
        {0: (1,), 1: ()},
        {0: (1,), 1: (2,), 2: (0,)},
        {0: (0,)},
        {0: (1, 2), 1: (0,), 2: (0,)},
    ],
    ids=["one way", "a ring of three", "itself", "two neighbors"],
)
def test_inconsistent_bridges_are_ignored(
    peers: dict[int, tuple[int, ...]], tmp_path: Path
) -> None:
    node = paper_node()
    plain = driver_facts(node).gpus
    gpus = tuple(
        replace(gpu, link_peers=tuple(node.gpus[peer].address for peer in peers.get(index, ())))
        for index, gpu in enumerate(plain)
    )
    root = write_sysfs(node, tmp_path / "sys")
    result = assemble("node-1", read_sysfs(root), DriverFacts("550", gpus))
    assert result.bridges == ()
    assert FindingKind.CONFLICT in kinds(result)


def test_duplicate_and_overlong_uuids_are_not_advertised(tmp_path: Path) -> None:
    node = paper_node()
    first, second, third, *rest = driver_facts(node).gpus
    gpus = (
        first,
        replace(second, gpu=replace(second.gpu, uuid=first.gpu.uuid)),
        replace(third, gpu=replace(third.gpu, uuid="GPU-" + "x" * 90)),
        *rest,
    )
    root = write_sysfs(node, tmp_path / "sys")
    result = assemble("node-1", read_sysfs(root), DriverFacts("550", gpus))
    assert len(result.gpus) == 6
    assert {FindingKind.CONFLICT, FindingKind.MALFORMED} <= kinds(result)


def test_a_gpu_that_the_driver_does_not_list_is_a_finding(tmp_path: Path) -> None:
    node = paper_node()
    root = write_sysfs(node, tmp_path / "sys")
    facts = driver_facts(node)
    result = assemble("node-1", read_sysfs(root), replace(facts, gpus=facts.gpus[:7]))
    assert FindingKind.DRIVER in kinds(result)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_file_contents_never_raise(data: st.DataObject, tmp_path: Path) -> None:
    node = paper_node()
    root = write_sysfs(node, tmp_path / "sys")
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    for path in data.draw(st.lists(st.sampled_from(files), max_size=8, unique=True)):
        path.write_bytes(data.draw(st.binary(max_size=40)))
    result = assemble("node-1", read_sysfs(root), driver_facts(node))
    assert len(result.gpus) == 8
    nccl_topology(result)
    read_ports(SysfsTree(root))
    assert from_json(Inventory, json.loads(json.dumps(to_json(result)))) == result


def test_addresses_and_processor_lists_are_parsed() -> None:
    assert normal_address("00000000:01:00.0") == "0000:01:00.0"
    assert normal_address("0000:A1:00.0") == "0000:a1:00.0"
    assert normal_address("10000:01:00.0") == "10000:01:00.0"
    assert parse_cpus("0-2,8") == (0, 1, 2, 8)
    assert parse_cpus("") == ()
    assert parse_cpus("3-1") is None


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"gpus": 3}, "gpus"),
        ({"gpus": [{"uuid": 5}]}, "uuid"),
        ({"node": None}, "node"),
        ({"surprise": 1}, "surprise"),
        ({"findings": [{"kind": "Odd", "where": "", "detail": ""}]}, "kind"),
    ],
)
def test_the_error_of_invalid_stored_data_names_the_field(
    change: dict[str, object], where: str
) -> None:
    with pytest.raises(DataError, match=where):
        from_json(Inventory, to_json(Inventory("n")) | change)
