"""Network namespaces as nodes: one link per node, with a limited rate, and two zones.

Each zone has a switch; every link has the same rate both ways (token bucket filters), and one link
joins the switches. Needs root, `ip` and `tc`; all it creates has unique names and is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Namespaces", "Network", "enter", "missing", "sh"]

COMMAND_SECONDS = 30
CLONE_NEWNET = 0x40000000
CONGESTION = "cubic"
"""Linux's own default, for both backends. BBR, which some distributions prefer, guesses the rate of
a connection that was idle between two calls: the same run then gave 0.45 to 0.88 of the limit."""
BURST_BYTES = 128 << 10
"""A token bucket has to hold the largest packet that the kernel hands over in one piece, 64 KiB."""
_NUMBERS = itertools.count()
"""Of the networks of this process, for unique names."""


def sh(*words: str) -> str:
    """Runs a command and returns its output."""
    result = subprocess.run(
        words, check=False, capture_output=True, text=True, timeout=COMMAND_SECONDS
    )
    if result.returncode:
        raise RuntimeError(f"{' '.join(words)}: {result.stderr.strip() or result.returncode}")
    return result.stdout


class Namespaces(ABC):
    """Network namespaces that exist inside of a `with` statement."""

    def __enter__(self) -> Self:
        self._namespaces: list[str] = []
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Deleting a namespace deletes its interfaces; deleting either end deletes a veth pair.
        for name in reversed(self._namespaces):
            with contextlib.suppress(RuntimeError):
                sh("ip", "netns", "del", name)

    @abstractmethod
    def _build(self) -> None:
        """Create the namespaces and their links."""

    def _namespace(self, name: str) -> None:
        sh("ip", "netns", "add", name)
        self._namespaces.append(name)
        sh("ip", "-n", name, "link", "set", "lo", "up")


@dataclass
class Network(Namespaces):
    """Namespaces for the machines and for the two switches."""

    zones: Sequence[int]
    megabits: int | None
    """Rate of each link; None: no limit."""
    tag: str = field(default_factory=lambda: f"hfr{os.getpid() % 100_000}-{next(_NUMBERS)}")

    def host(self, rank: int) -> str:
        """The namespace of a machine."""
        return f"{self.tag}-n{rank}"

    def switch(self, zone: int) -> str:
        """The namespace of a zone's switch."""
        return f"{self.tag}-z{zone}"

    def address(self, rank: int) -> str:
        """A machine's address."""
        return f"10.77.0.{rank + 1}"

    def zone_of(self, rank: int) -> int:
        """The zone of a machine."""
        return 0 if rank < self.zones[0] else 1

    def _build(self) -> None:
        for zone in (0, 1):
            self._namespace(self.switch(zone))
            sh("ip", "-n", self.switch(zone), "link", "add", "br0", "type", "bridge")
            sh("ip", "-n", self.switch(zone), "link", "set", "br0", "up")
        for rank in range(sum(self.zones)):
            host, switch = self.host(rank), self.switch(self.zone_of(rank))
            self._namespace(host)
            self._cable((host, "eth0"), (switch, f"p{rank}"))
            sh("ip", "-n", switch, "link", "set", f"p{rank}", "master", "br0")
            sh("ip", "-n", host, "addr", "add", f"{self.address(rank)}/24", "dev", "eth0")
            self._route(rank)
        self._cable((self.switch(0), "uplink"), (self.switch(1), "uplink"))
        for zone in (0, 1):
            sh("ip", "-n", self.switch(zone), "link", "set", "uplink", "master", "br0")

    def _route(self, rank: int) -> None:
        """Sets the congestion control algorithm of this machine's connections to `CONGESTION`."""
        address = self.address(rank)
        sh(
            *("ip", "-n", self.host(rank), "route", "replace", "10.77.0.0/24", "dev", "eth0"),
            *("proto", "kernel", "scope", "link", "src", address, "congctl", CONGESTION),
        )

    def _cable(self, first: tuple[str, str], other: tuple[str, str]) -> None:
        sh(
            *("ip", "link", "add", first[1], "netns", first[0], "type", "veth"),
            *("peer", "name", other[1], "netns", other[0]),
        )
        for space, device in (first, other):
            sh("ip", "-n", space, "link", "set", device, "up")
            if self.megabits is None:
                continue
            sh(
                *("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf"),
                *("rate", f"{self.megabits}mbit", "burst", str(BURST_BYTES), "latency", "50ms"),
            )

    def crossed(self) -> list[int]:
        """Bytes that have left each zone for the other one."""
        statistics = (
            json.loads(sh("ip", "-n", self.switch(zone), "-s", "-j", "link", "show", "uplink"))
            for zone in (0, 1)
        )
        return [int(device[0]["stats64"]["tx"]["bytes"]) for device in statistics]


def missing() -> str | None:
    """The requirements that this machine does not meet."""
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() == 0 and not tools:
        return None
    return f"needs root{', and on the PATH ' + ', '.join(tools) if tools else ''}"


def enter(namespace: str) -> None:
    """Moves the calling thread, and those that it starts, to a network namespace."""
    with Path("/run/netns", namespace).open() as space:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"network namespace {namespace} cannot be entered")
