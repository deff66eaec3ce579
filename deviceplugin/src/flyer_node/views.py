"""What people see of an inventory: a list, a tree, and the doctor's findings."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyer_node.cdi import nvidia_specifications
from flyer_node.inventory import LinkLayer
from flyer_node.inventory.pci import is_gpu
from flyer_node.traffic import MARKS, TrafficClass

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flyer_node.inventory import Inventory
    from flyer_node.settings import Settings

__all__ = ["Remedy", "doctor", "listing", "table", "tree"]

GIB = 1 << 30


@dataclass(frozen=True)
class Remedy:
    """One thing that the doctor looked at."""

    level: str
    """ok, warning or error."""
    what: str
    remedy: str


def listing(inventory: Inventory) -> str:
    """GPUs and adapters, a line each."""
    lines = [f"node {inventory.node}, driver {inventory.driver_version or 'none'}"]
    for gpu in inventory.gpus:
        bridge = inventory.bridge_of.get(gpu.uuid)
        pair = ""
        if bridge is not None:
            other = bridge.second if bridge.first == gpu.uuid else bridge.first
            pair = f", {bridge.links} links to GPU {inventory.gpus_by_uuid[other].index}"
        numa = inventory.numa_of_gpu(gpu.uuid)
        memory = f"{gpu.memory_bytes / GIB:.0f} GiB"
        place = f"{gpu.address}, NUMA {'?' if numa is None else numa}"
        lines.append(f"GPU {gpu.index}  {gpu.uuid}  {gpu.name}, {memory}, {place}{pair}")
    for hca in inventory.hcas:
        ports = ", ".join(
            f"port {port.number} {port.link_layer.value} {port.state} {port.rate_gbps:g} Gb/s"
            for port in hca.ports
        )
        lines.append(f"HCA {hca.name}  {hca.address or 'software'}, {hca.verbs_device}, {ports}")
    lines += [f"finding: {one.kind.value} {one.where}: {one.detail}" for one in inventory.findings]
    return "\n".join(lines)


def tree(inventory: Inventory) -> str:
    """Root complexes with what hangs below them."""
    gpus = {gpu.address: gpu for gpu in inventory.gpus}
    hcas = {hca.address: hca for hca in inventory.hcas}
    shown = [one for one in inventory.pci if one.address in gpus or one.address in hcas]
    lines = [f"node {inventory.node}"]
    known: list[int | None] = [None, *(one.id for one in inventory.numa_nodes)]
    for numa in known:
        here = [one for one in shown if one.numa_node == numa]
        if not here and numa is None:
            continue
        lines.append(f"  NUMA {'unknown' if numa is None else numa}")
        for root in sorted({one.root_complex for one in here}):
            below = [one for one in here if one.root_complex == root]
            shared = " (shared: about 37.5 GB/s to the CPU together)" if len(below) > 1 else ""
            lines.append(f"    {root}{shared}")
            for one in below:
                name = f"GPU {gpus[one.address].index}" if is_gpu(one) else hcas[one.address].name
                link = f"{one.link.gigatransfers:g} GT/s x{one.link.lanes}" if one.link else ""
                lines.append(f"      {one.address}  {name}  {link}")
    for bridge in inventory.bridges:
        first, second = (inventory.gpus_by_uuid[one].index for one in (bridge.first, bridge.second))
        lines.append(f"  pair GPU {first} = GPU {second}, {bridge.links} NVLink links")
    return "\n".join(lines)


def doctor(inventory: Inventory, settings: Settings, problems: Sequence[str]) -> list[Remedy]:
    """What a node needs, in the order in which it is needed."""
    found = [Remedy("error", one, "see the driver's log; a reboot ends a hang") for one in problems]
    found.append(_kubelet(settings.plugin_folder))
    if inventory.gpus:
        text = f"{len(inventory.gpus)} GPUs, {len(inventory.bridges)} pairs"
        found.append(Remedy("ok", text, ""))
        found += _device_nodes(inventory, settings)
        found += _cdi(inventory, settings)
    else:
        text = "no GPU: libnvidia-ml.so.1 is missing or lists none"
        remedy = "install the driver, or run this pod with the runtime class nvidia"
        found.append(Remedy("warning", text, remedy))
    if not inventory.hcas:
        found.append(Remedy("warning", "no HCA", "load mlx5_ib and ib_uverbs"))
    for hca in inventory.hcas:
        for port in hca.ports:
            up = port.state == "active"
            marks = MARKS[TrafficClass.HFREDUCE]
            field = (
                f"Service Levels (HFReduce {marks.service_level})"
                if port.link_layer is LinkLayer.INFINIBAND
                else f"traffic classes (HFReduce {marks.roce_traffic_class})"
            )
            text = f"{hca.name} port {port.number} is {port.state}, uses {field}"
            remedy = "" if up else "init: no subnet manager; down: cable or switch port"
            found.append(Remedy("ok" if up else "error", text, remedy))
    found += [
        Remedy("warning", f"{one.kind.value} {one.where}: {one.detail}", "see the guide on GPUs")
        for one in inventory.findings
    ]
    return found


def table(remedies: Sequence[Remedy]) -> str:
    """A line each; the remedy under what needs one."""
    lines = []
    for one in remedies:
        lines.append(f"{one.level:8}{one.what}")
        if one.remedy and one.level != "ok":
            lines.append(f"        -> {one.remedy}")
    return "\n".join(lines)


def _kubelet(folder: Path) -> Remedy:
    socket = folder / "kubelet.sock"
    try:
        there = stat.S_ISSOCK(socket.lstat().st_mode)
    except OSError:
        there = False
    if not there:
        remedy = "is the kubelet running, and its folder mounted into this container?"
        return Remedy("error", f"no kubelet at {socket}", remedy)
    if not os.access(folder, os.W_OK):
        return Remedy("error", f"{folder} cannot be written", "run as root, mount it writable")
    return Remedy("ok", f"kubelet at {socket}", "")


def _device_nodes(inventory: Inventory, settings: Settings) -> list[Remedy]:
    names = [f"nvidia{gpu.minor}" for gpu in inventory.gpus] + ["nvidiactl"]
    missing = [name for name in names if not (settings.device_view / name).exists()]
    if not missing:
        return [Remedy("ok", f"device nodes below {settings.device_view}", "")]
    text = f"no {', '.join(missing)} below {settings.device_view}"
    return [Remedy("error", text, "is the driver loaded? nvidia-modprobe -u -c=0 creates them")]


def _cdi(inventory: Inventory, settings: Settings) -> list[Remedy]:
    """Whether the runtime's folder can be written, and whether the libraries come by CDI."""
    if settings.device_mode != "cdi":
        return []
    folder = settings.cdi_folder
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        remedy = "mount it writable, or use --device-mode nodes"
        return [Remedy("error", f"{folder} cannot be written: no CDI specifications", remedy)]
    found = [Remedy("ok", f"CDI specifications below {folder}", "")]
    named = nvidia_specifications((settings.cdi_static_folder, folder))
    missing = [gpu.uuid for gpu in inventory.gpus if gpu.uuid not in named]
    if missing:
        text = f"no CDI specification of NVIDIA names {missing[0]} ({len(missing)} of the GPUs)"
        remedy = (
            "the driver's libraries must be in the image; or run nvidia-ctk cdi generate "
            f"--device-name-strategy=uuid --output={folder}/nvidia.yaml"
        )
        found.append(Remedy("warning", text, remedy))
    return found
