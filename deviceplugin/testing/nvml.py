"""Fake NVIDIA driver: builds its library, and writes the file that it reads its state from.

The real nvidia-ml-py loads it, so only the driver's C library is simulated.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flyer_node.hardware.driver import EventKind

if TYPE_CHECKING:
    from deviceplugin.testing.sysfs import FakeNode

__all__ = ["LIBRARY", "StubDriver", "build_stub"]

SOURCE = Path(__file__).with_name("nvml_stub.c")
LIBRARY = "libnvidia-ml.so.1"
"""The name that nvidia-ml-py loads: put its folder on LD_LIBRARY_PATH."""


def build_stub(folder: Path) -> Path:
    """Compiles the library into `folder`; needs a C compiler."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / LIBRARY
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True, timeout=120)
    return library


EVENT_TYPES = {
    EventKind.ECC: 0x2,
    EventKind.XID: 0x8,
    EventKind.UNAVAILABLE: 0x4000,
    EventKind.RECOVERY_ACTION: 0x8000,
}
"""NVML's numbers."""


@dataclass
class StubDriver:
    """State that the fake driver reports; every change is written atomically."""

    control: Path
    node: FakeNode
    version: str = "550.90.07"
    lost: set[int] = field(default_factory=set)
    recovery: dict[int, int] = field(default_factory=dict)
    """Recovery action by GPU; -1: a driver without that field."""
    remap: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    links: dict[int, int] = field(default_factory=dict)
    ecc: dict[int, int] = field(default_factory=dict)
    width: dict[int, int] = field(default_factory=dict)
    """PCIe lanes in use."""
    idle: dict[int, int] = field(default_factory=dict)
    """NVML's error with which the utilisation of a GPU is refused."""
    hang: str = ""
    """Calls whose name contains this never return: `nvml` is all of them."""
    _events: list[tuple[int, EventKind, int]] = field(default_factory=list)

    def write(self) -> None:
        """Makes the present values the driver's answers."""
        lines = [f"driver {self.version}"]
        for index, gpu in enumerate(self.node.gpus):
            peer = -1 if gpu.peer is None else gpu.peer
            lines.append(f"gpu {index} {gpu.uuid} {gpu.address} {index} {peer}")
        lines += [f"lost {index}" for index in sorted(self.lost)]
        lines += [f"recovery {index} {action}" for index, action in self.recovery.items()]
        lines += [f"remap {index} {int(a)} {int(b)}" for index, (a, b) in self.remap.items()]
        lines += [f"links {index} {count}" for index, count in self.links.items()]
        lines += [f"ecc {index} {count}" for index, count in self.ecc.items()]
        lines += [f"width {index} {lanes}" for index, lanes in self.width.items()]
        lines += [f"idle {index} {code}" for index, code in self.idle.items()]
        numbered = list(enumerate(self._events, 1))[-200:]
        lines += [
            f"event {number} {gpu} {EVENT_TYPES[kind]} {data}"
            for number, (gpu, kind, data) in numbered
        ]
        if self.hang:
            lines.append(f"hang {self.hang}")
        fresh = self.control.with_name(f".{self.control.name}.new")
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(self.control)

    def xid(self, gpu: int, code: int) -> None:
        """An Xid, delivered to every process that waits for events."""
        self.event(gpu, EventKind.XID, code)

    def event(self, gpu: int, kind: EventKind, data: int = 0) -> None:
        """An event of the driver, delivered to every process that waits for events."""
        self._events.append((gpu, kind, data))
        self.write()

    def fall_off_the_bus(self, gpu: int) -> None:
        """Xid 79 as a real one: the event, and no answer from then on."""
        self.lost.add(gpu)
        self.recovery[gpu] = 2
        self.xid(gpu, 79)

    def reset(self, gpu: int) -> None:
        """A GPU reset, or the reboot that an Xid 79 needs: all faults of the GPU are cleared."""
        self.lost.discard(gpu)
        for faults in (self.recovery, self.remap, self.links, self.ecc, self.width, self.idle):
            faults.pop(gpu, None)
        self.write()
