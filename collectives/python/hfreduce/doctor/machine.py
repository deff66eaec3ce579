"""Facts about a machine, mostly from files below a root.

Checks read the machine only through this module, so that tests use a folder with a few files.
"""

from __future__ import annotations

import re
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hfreduce import _native

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Finding", "Interface", "Layout", "Machine", "numbers"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    name: str
    status: str
    """ok, warning (it works, not as well as it could) or problem (it will fail)."""
    found: str
    """The observed state, in one line."""
    remedy: str = ""
    """The remedy; empty if none is needed."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks of the job that this machine is checked for."""

    ranks: int
    """Number of ranks on this machine."""
    world_size: int
    peer: str | None = None
    """Address of another machine of the job."""


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface that is up."""

    name: str
    speed_mbps: int | None
    """None if the driver does not report it, as for virtual interfaces."""
    mtu: int | None
    virtual: bool
    """Created by software (bridge, veth, tunnel): it does not lead to other machines."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine below `root`; /, unless a test has made one."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=dict)
    instruction_set: str = ""
    """Instruction set that the kernels use."""
    best_instruction_set: str = ""
    without_gdrcopy: str | None = None
    """Why GDRCopy cannot be used here; None where it can."""
    reached_at: Callable[[str | None, str | None], list[str]] = lambda address, towards: []  # noqa: ARG005
    """Interfaces and addresses selected by HFREDUCE_ADDRESS for a host of the group, best first."""

    def text(self, path: str) -> str:
        """A file's text without the end of its line; empty where there is none."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """A file that holds one whole number."""
        text = self.text(path)
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    def chosen(self, path: str) -> str:
        """The word in brackets of a file that lists choices: `always [madvise] never`."""
        match = re.search(r"\[(\w+)\]", self.text(path))
        return match[1] if match else ""

    def status(self, name: str) -> str:
        """A line of /proc/self/status."""
        match = re.search(rf"^{name}:\s*(.*)$", self.text("proc/self/status"), re.MULTILINE)
        return match[1].strip() if match else ""

    def limit(self, name: str) -> tuple[float, float] | None:
        """Soft and hard limit of /proc/self/limits."""
        match = re.search(rf"^{name}\s+(\S+)\s+(\S+)", self.text("proc/self/limits"), re.MULTILINE)
        if not match:
            return None
        soft, hard = (
            float("inf") if word == "unlimited" else float(word) for word in match.groups()
        )
        return soft, hard

    def cgroup(self, controller: str) -> Path | None:
        """Our folder of a controller: version 2's, or version 1's own hierarchy."""
        for line in self.text("proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            names = controllers.split(",")
            base = "sys/fs/cgroup" if not controllers else f"sys/fs/cgroup/{controller}"
            if controllers and controller not in names:
                continue
            # In a container the path is the host's, and the mount's root is the container's folder.
            for folder in (f"{base}{path}", base):
                if (self.root / folder).is_dir() and self._has(folder, controller):
                    return Path(folder)
        return None

    def _has(self, folder: str, controller: str) -> bool:
        return any((self.root / folder).glob(f"{controller}.*"))

    def interfaces(self) -> list[Interface]:
        """All that are up, loopback excluded."""
        result = []
        for folder in sorted((self.root / "sys/class/net").glob("*")):
            name = folder.name
            path = f"sys/class/net/{name}"
            if name == "lo" or self.text(f"{path}/operstate") not in ("up", "unknown"):
                continue
            speed = self.number(f"{path}/speed")
            virtual = name.startswith(_native.INWARD) or (folder / "bridge").exists()
            speed = speed if speed and speed > 0 else None
            result.append(Interface(name, speed, self.number(f"{path}/mtu"), virtual))
        return result

    def route(self, address: str) -> str | None:
        """The interface that leads to an IPv4 address (0.0.0.0: anywhere), by the routing table."""
        target = struct.unpack("=I", socket.inet_aton(address))[0]
        best: tuple[int, int, str] | None = None
        for line in self.text("proc/net/route").splitlines()[1:]:
            fields = line.split()
            destination, mask = int(fields[1], 16), int(fields[7], 16)
            up = int(fields[3], 16) & 1
            if up and target & mask == destination:
                this = (-mask.bit_count(), int(fields[6]), fields[0])
                best = min(best, this) if best else this
        return best[2] if best else None


def numbers(text: str) -> set[int]:
    """A list as the kernel writes it: 0-3,8,10-11."""
    result: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        result.update(range(int(first), int(last or first) + 1))
    return result
