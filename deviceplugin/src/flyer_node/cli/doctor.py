"""Node checks of `flyer-node doctor`, with remedies."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyer_node.inventory import LinkLayer
from flyer_node.plugin.cdi_folder import nvidia_cdi_gpus
from flyer_node.plugin.traffic import MARKS, TrafficClass

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flyer_node.inventory import Inventory
    from flyer_node.settings import Settings

__all__ = ["Check", "run_checks", "table"]


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    level: str
    """ok, warning or error."""
    what: str
    remedy: str


def run_checks(inventory: Inventory, settings: Settings, problems: Sequence[str]) -> list[Check]:
    """Runs all checks, in the order in which problems should be fixed."""
    checks = [
        Check("error", text, "see the driver's log; a reboot ends a hang") for text in problems
    ]
    checks.append(_kubelet(settings.plugin_folder))
    if inventory.gpus:
        text = f"{len(inventory.gpus)} GPUs, {len(inventory.bridges)} pairs"
        checks.append(Check("ok", text, ""))
        checks += _device_nodes(inventory, settings)
        checks += _cdi(inventory, settings)
    else:
        text = "no GPU: libnvidia-ml.so.1 is missing or lists none"
        remedy = "install the driver, or run this pod with the runtime class nvidia"
        checks.append(Check("warning", text, remedy))
    if not inventory.hcas:
        checks.append(Check("warning", "no HCA", "load mlx5_ib and ib_uverbs"))
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
            checks.append(Check("ok" if up else "error", text, remedy))
    checks += [
        Check("warning", f"{item.kind.value} {item.where}: {item.detail}", "see the guide on GPUs")
        for item in inventory.findings
    ]
    return checks


def table(checks: Sequence[Check]) -> str:
    """Formats the checks, one per line, with the remedies of warnings and errors below them."""
    lines = []
    for check in checks:
        lines.append(f"{check.level:8}{check.what}")
        if check.remedy and check.level != "ok":
            lines.append(f"        -> {check.remedy}")
    return "\n".join(lines)


def _kubelet(folder: Path) -> Check:
    socket = folder / "kubelet.sock"
    try:
        present = stat.S_ISSOCK(socket.lstat().st_mode)
    except OSError:
        present = False
    if not present:
        remedy = "is the kubelet running, and its folder mounted into this container?"
        return Check("error", f"no kubelet at {socket}", remedy)
    if not os.access(folder, os.W_OK):
        return Check("error", f"{folder} is not writable", "run as root, mount it writable")
    return Check("ok", f"kubelet at {socket}", "")


def _device_nodes(inventory: Inventory, settings: Settings) -> list[Check]:
    names = [f"nvidia{gpu.minor}" for gpu in inventory.gpus] + ["nvidiactl"]
    missing = [name for name in names if not (settings.device_view / name).exists()]
    if not missing:
        return [Check("ok", f"device nodes below {settings.device_view}", "")]
    text = f"no {', '.join(missing)} below {settings.device_view}"
    return [Check("error", text, "is the driver loaded? nvidia-modprobe -u -c=0 creates them")]


def _cdi(inventory: Inventory, settings: Settings) -> list[Check]:
    """Checks that the runtime's folder is writable and that NVIDIA's specification is complete."""
    if settings.device_mode != "cdi":
        return []
    folder = settings.cdi_folder
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        remedy = "mount it writable, or use --device-mode nodes"
        return [Check("error", f"{folder} is not writable: no CDI specifications", remedy)]
    checks = [Check("ok", f"CDI specifications below {folder}", "")]
    listed = nvidia_cdi_gpus((settings.cdi_static_folder, folder))
    missing = [gpu.uuid for gpu in inventory.gpus if gpu.uuid not in listed]
    if missing:
        text = f"no CDI specification of NVIDIA lists {missing[0]} ({len(missing)} of the GPUs)"
        remedy = (
            "the driver's libraries must be in the image; or run nvidia-ctk cdi generate "
            f"--device-name-strategy=uuid --output={folder}/nvidia.yaml"
        )
        checks.append(Check("warning", text, remedy))
    return checks
