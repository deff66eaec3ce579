"""Simulated sysfs trees of GPU nodes: files and links as in the kernel's sysfs.

`paper_node` is the paper's (section III-A, IV-D3): two sockets, eight PCIe A100 straight below root
ports, GPUs 5 and 6 below one root complex, one ConnectX-6 below a separate root complex.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FakeGpu", "FakeHca", "FakeNode", "paper_node", "set_port", "write_sysfs"]


@dataclass(frozen=True, slots=True)
class FakeGpu:
    """A GPU and its position in the PCI tree."""

    root: str
    """Two hexadecimal digits of the root complex's bus."""
    bus: str
    numa: int
    uuid: str
    peer: int | None = None
    """Index of the GPU at the other end of its NVLink bridge."""

    @property
    def address(self) -> str:
        """PCI address."""
        return f"0000:{self.bus}:00.0"


@dataclass(frozen=True, slots=True)
class FakeHca:
    """A network adapter and its position in the PCI tree."""

    name: str
    root: str
    bus: str
    numa: int
    layer: str = "InfiniBand"
    ports: int = 1

    @property
    def address(self) -> str:
        """PCI address."""
        return f"0000:{self.bus}:00.0"


@dataclass(frozen=True, slots=True)
class FakeNode:
    """The devices of a node."""

    gpus: tuple[FakeGpu, ...]
    hcas: tuple[FakeHca, ...]
    cpulists: tuple[str, ...] = ("0-31", "32-63")
    below_switch: bool = False
    """Whether a PCIe switch sits between root ports and devices (not on the paper's node)."""
    odd: dict[str, str] = field(default_factory=dict)
    """Contents of files by path, written last: a test can make sysfs inconsistent."""

    def with_layer(self, layer: str) -> FakeNode:
        """The same node with another link layer."""
        return replace(self, hcas=tuple(replace(hca, layer=layer) for hca in self.hcas))


def paper_node(*, seed: int = 0, gpus: int = 8) -> FakeNode:
    """The paper's node; `seed` makes UUIDs differ from node to node."""
    roots = (("00", 0), ("20", 0), ("40", 0), ("60", 0), ("80", 1), ("a0", 1), ("a0", 1), ("c0", 1))
    buses = ("01", "21", "41", "61", "81", "a1", "a2", "c1")
    return FakeNode(
        gpus=tuple(
            FakeGpu(root, buses[index], numa, gpu_uuid(index, seed), index ^ 1)
            for index, (root, numa) in enumerate(roots[:gpus])
        ),
        hcas=(FakeHca("mlx5_0", "e0", "e1", 1),),
    )


def gpu_uuid(index: int, seed: int = 0) -> str:
    """A UUID in NVIDIA's format."""
    return f"GPU-{seed:08x}-0000-4000-8000-{index:012x}"


def write_sysfs(node: FakeNode, root: Path) -> Path:
    """Writes the tree, replacing one at the same path."""
    if root.exists():
        shutil.rmtree(root)
    for number, cpus in enumerate(node.cpulists):
        _write(root, f"devices/system/node/node{number}", {"cpulist": cpus})
    for index, gpu in enumerate(node.gpus):
        _device(node, root, index, gpu.root, gpu.address, gpu.numa, 0x030200, 0x10DE, 0x20F1)
    for index, hca in enumerate(node.hcas):
        layer_class = 0x020700 if hca.layer == "InfiniBand" else 0x020000
        path = _device(
            node, root, 16 + index, hca.root, hca.address, hca.numa, layer_class, 0x15B3, 0x101B
        )
        _adapter(root, index, hca, path)
    for path, text in node.odd.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def set_port(
    root: Path, hca: str, port: int = 1, *, up: bool = True, downed: int | None = None
) -> None:
    """Sets the state of a port as a pulled or plugged cable does, and the link_downed counter."""
    folder = root / "class/infiniband" / hca / "ports" / str(port)
    _replace(folder / "state", "4: ACTIVE" if up else "1: DOWN")
    _replace(folder / "phys_state", "5: LinkUp" if up else "2: Polling")
    if downed is not None:
        _replace(folder / "counters/link_downed", str(downed))


def _device(
    node: FakeNode,
    root: Path,
    index: int,
    complex_bus: str,
    address: str,
    numa: int,
    class_code: int,
    vendor: int,
    device: int,
) -> str:
    """Writes a device below its root port and, on some nodes, a switch. Returns its path."""
    port = f"0000:{complex_bus}:{1 + index % 4:02x}.{1 + index // 4}"
    chain = [port]
    if node.below_switch:
        port = f"0000:{complex_bus}:01.1"
        chain = [port, f"0000:{complex_bus[0]}e:00.0", f"0000:{complex_bus[0]}f:{index:02x}.0"]
    path = f"devices/pci0000:{complex_bus}"
    for bridge in chain:
        path += f"/{bridge}"
        _pci(root, path, bridge, numa, 0x060400, 0x1022, 0x1483)
    path += f"/{address}"
    _pci(root, path, address, numa, class_code, vendor, device)
    return path


def _pci(
    root: Path, path: str, address: str, numa: int, class_code: int, vendor: int, device: int
) -> None:
    _write(
        root,
        path,
        {
            "class": f"0x{class_code:06x}",
            "vendor": f"0x{vendor:04x}",
            "device": f"0x{device:04x}",
            "subsystem_vendor": f"0x{vendor:04x}",
            "subsystem_device": "0x145f",
            "numa_node": str(numa),
            "current_link_speed": "16.0 GT/s PCIe",
            "current_link_width": "16",
            "max_link_speed": "16.0 GT/s PCIe",
            "max_link_width": "16",
        },
    )
    link = root / "bus/pci/devices" / address
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(f"../../../{path}")


def _adapter(root: Path, index: int, hca: FakeHca, device: str) -> None:
    folder = f"{device}/infiniband/{hca.name}"
    _write(
        root,
        folder,
        {
            "node_guid": f"b859:9f03:00d4:{index:04x}",
            "fw_ver": "20.31.1014",
            "board_id": "MT_0000000222",
        },
    )
    (root / folder / "device").symlink_to(f"../../../{hca.address}")
    _link(root, f"class/infiniband/{hca.name}", folder)
    _write(root, f"class/infiniband_verbs/uverbs{index}", {"ibdev": hca.name})
    _write(root, f"class/infiniband_mad/umad{index}", {"ibdev": hca.name, "port": "1"})
    for number in range(1, hca.ports + 1):
        _write(
            root,
            f"{folder}/ports/{number}",
            {
                "state": "4: ACTIVE",
                "phys_state": "5: LinkUp",
                "rate": "200 Gb/sec (4X HDR)",
                "link_layer": hca.layer,
            },
        )
        counters = (
            "link_downed",
            "link_error_recovery",
            "symbol_error",
            "port_rcv_errors",
            "port_xmit_discards",
            "local_link_integrity_errors",
            "excessive_buffer_overrun_errors",
        )
        _write(root, f"{folder}/ports/{number}/counters", dict.fromkeys(counters, "0"))


def _link(root: Path, path: str, target: str) -> None:
    link = root / path
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to("../" * (len(link.relative_to(root).parts) - 1) + target)


def _write(root: Path, folder: str, files: dict[str, str]) -> None:
    path = root / folder
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(f"{text}\n")


def _replace(path: Path, text: str) -> None:
    """Replaces the file atomically."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(f"{text}\n")
    temporary.replace(path)
