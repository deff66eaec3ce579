"""Faults of a run, decided by its seed. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FAULTS", "STOP", "Fault", "draw", "limits"]

KILL, STOP = "kill", "stop"
FAULTS = (
    "kill-etcd", "stop-etcd", "kill-meta", "stop-meta", "kill-mgmtd", "stop-mgmtd",
    "kill-storage", "stop-storage", "kill-client",
)  # fmt: skip
"""Of etcd the leader, of mgmtd the primary, of the others any one."""
FIRST_SECONDS = (1.0, 2.5)
PAUSE_SECONDS = (0.5, 2.0)
STOPPED_SECONDS = (1.0, 6.0)
ETCD_GAP_SECONDS, META_GAP_SECONDS, OPEN_FILE_GAP_SECONDS = 4.0, 2.0, 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    name: str
    after_seconds: float
    """After the start of the load."""
    stopped_seconds: float
    """Until SIGCONT; 0 for a kill."""
    choice: int
    """Decides which of several services."""

    @property
    def action(self) -> str:
        """`kill` or `stop`."""
        return self.name.partition("-")[0]

    @property
    def victim(self) -> str:
        """`etcd`, `meta`, `mgmtd`, `storage` or `client`."""
        return self.name.partition("-")[2]


def draw(seed: int, names: Sequence[str], count: int) -> list[Fault]:
    """The faults of one run, in the order of their times."""
    seeded = random.Random(seed)
    faults = []
    after = seeded.uniform(*FIRST_SECONDS)
    for _ in range(count):
        name = seeded.choice(names)
        stopped = seeded.uniform(*STOPPED_SECONDS) if name.startswith(STOP) else 0.0
        faults.append(Fault(name, after, stopped, seeded.randrange(1 << 16)))
        after += seeded.uniform(*PAUSE_SECONDS)
    return faults


def limits(fault: Fault, lease_seconds: float) -> dict[str, float]:
    """Longest time in which a client may complete no operation, by kind of operation.

    Kinds that are missing have no limit: a lost replica of a chain is replaced after the node
    failure timeout, and changes wait for nothing else.
    """
    metadata = {
        "etcd": ETCD_GAP_SECONDS,
        "meta": META_GAP_SECONDS,
        "mgmtd": lease_seconds,
    }.get(fault.victim)
    if metadata is None:
        return {}
    return {
        "change": metadata,
        "lookup": metadata,
        "write": OPEN_FILE_GAP_SECONDS,
        "read": OPEN_FILE_GAP_SECONDS,
    }
