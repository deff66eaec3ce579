"""Host channel adapters from sysfs: what they are, and what their ports do now.

Works for InfiniBand and RoCE without a verbs library. `issm` devices are never allocated and not
read; `umad` is optional.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyer_node.inventory.model import FindingKind, Hca, HcaPort, LinkLayer

if TYPE_CHECKING:
    from flyer_node.inventory.tree import SysfsTree

__all__ = ["COUNTERS", "PortStatus", "read_hcas", "read_ports"]

FOLDER = "class/infiniband"
COUNTERS = (
    "link_downed",
    "link_error_recovery",
    "symbol_error",
    "port_rcv_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
"""Error counters of a port that health looks at; all only grow, until a reset."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")


@dataclass(frozen=True, slots=True)
class PortStatus:
    """The current state of one port."""

    hca: str
    port: int
    state: str
    """Lower case: active, armed, init, down; empty if it cannot be read."""
    physical: str
    """Lower case: linkup, polling, disabled, …"""
    counters: dict[str, int]
    """Those of COUNTERS that could be read."""


def read_hcas(tree: SysfsTree) -> tuple[Hca, ...]:
    """All adapters with their character devices and ports."""
    verbs = _character_devices(tree, "class/infiniband_verbs", "uverbs")
    management = _character_devices(tree, "class/infiniband_mad", "umad")
    hcas = []
    for name in tree.names(FOLDER):
        if not _NAME.fullmatch(name):
            tree.found(FindingKind.MALFORMED, f"{FOLDER}/{name[:60]}", "odd name of an adapter")
            continue
        own = f"{FOLDER}/{name}"
        if not verbs.get(name):
            tree.found(FindingKind.MISSING, own, "no uverbs device: is ib_uverbs loaded?")
        address = _pci_address(tree, own)
        hcas.append(
            Hca(
                name=name,
                address=address,
                node_guid=tree.text(f"{own}/node_guid", optional=True) or "",
                firmware=tree.text(f"{own}/fw_ver", optional=True) or "",
                board=tree.text(f"{own}/board_id", optional=True) or "",
                numa_node=tree.numa_node(f"{own}/device") if address else None,
                verbs_device=next(iter(verbs.get(name, ())), None),
                management_devices=tuple(management.get(name, ())),
                ports=_read_hca_ports(tree, own),
            )
        )
    return tuple(hcas)


def read_ports(tree: SysfsTree) -> tuple[PortStatus, ...]:
    """State and counters of every port; fast enough for two polls per second."""
    statuses = []
    for name in tree.names(FOLDER):
        for port in _port_numbers(tree, f"{FOLDER}/{name}"):
            folder = f"{FOLDER}/{name}/ports/{port}"
            values = {
                counter: tree.number(f"{folder}/counters/{counter}", optional=True)
                for counter in COUNTERS
            }
            statuses.append(
                PortStatus(
                    hca=name,
                    port=port,
                    state=_word(tree, f"{folder}/state"),
                    physical=_word(tree, f"{folder}/phys_state"),
                    counters={key: value for key, value in values.items() if value is not None},
                )
            )
    return tuple(statuses)


def _pci_address(tree: SysfsTree, own: str) -> str | None:
    """The PCI function behind an adapter; software devices have none."""
    if "device" not in tree.names(own):
        return None
    real = tree.resolve(f"{own}/device")
    return real.rsplit("/", 1)[-1] if real else None


def _read_hca_ports(tree: SysfsTree, own: str) -> tuple[HcaPort, ...]:
    ports = []
    for number in _port_numbers(tree, own):
        folder = f"{own}/ports/{number}"
        layer = tree.text(f"{folder}/link_layer") or ""
        if layer not in set(LinkLayer):
            tree.found(FindingKind.MALFORMED, f"{folder}/link_layer", f"{layer[:40]!r} is unknown")
            continue
        rate = _RATE.match(tree.text(f"{folder}/rate", optional=True) or "")
        ports.append(
            HcaPort(
                number=number,
                link_layer=LinkLayer(layer),
                state=_word(tree, f"{folder}/state"),
                rate_gbps=float(rate[1]) if rate else 0.0,
            )
        )
    return tuple(ports)


def _port_numbers(tree: SysfsTree, own: str) -> list[int]:
    names = tree.names(f"{own}/ports", optional=False)
    numbers = [int(name) for name in names if name.isdecimal() and 0 < int(name) < 256]
    for name in names:
        if not name.isdecimal() or not 0 < int(name) < 256:
            tree.found(FindingKind.MALFORMED, f"{own}/ports/{name[:40]}", "not a port number")
    return sorted(numbers)


def _word(tree: SysfsTree, path: str) -> str:
    """`4: ACTIVE` becomes `active`; empty with a finding for anything else."""
    text = tree.text(path)
    number, separator, word = (text or "").partition(":")
    if text is not None and not (separator and number.strip().isdecimal() and word.strip()):
        tree.found(FindingKind.MALFORMED, path, f"not a port state: {text[:40]!r}")
        return ""
    return word.strip().lower()


def _character_devices(tree: SysfsTree, folder: str, prefix: str) -> dict[str, list[str]]:
    """Names below /dev/infiniband by the adapter that they belong to."""
    devices: dict[str, list[str]] = {}
    for name in tree.names(folder):
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal():
            adapter = tree.text(f"{folder}/{name}/ibdev")
            if adapter:
                devices.setdefault(adapter, []).append(name)
    return devices
