"""Not-ready grace period: delays the loss of nodes that Kubernetes reports as not ready. Pure.

Kubernetes monitors a node through its kubelet, which may starve, be killed or not reach the API
server while the ranks keep running; after a minute without an API server it marks all nodes not
ready. So a not-ready node keeps its gang while its sidecar sends heartbeats, for as long as
Kubernetes itself waits before it deletes pods. A node without pods is lost at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["NotReadyGrace"]

TERM_START_SECONDS: Final = 1.0
"""Time after which a new leader has the list of nodes with pods."""
SILENT_SECONDS: Final = 10.0
"""Silence after which a not-ready node is lost. Longer than the report and evaluation of a rank's
exit, which is not a fault of the node."""
MANY_SILENT_SECONDS: Final = 60.0
"""The same while many nodes are silent, when this process is more likely partitioned. Sidecars need
this long to find a new leader if the Service's endpoints were not updated either."""
GRACE_SECONDS_MAX: Final = 300.0
"""Default toleration of `node.kubernetes.io/unreachable`."""
SHARE: Final = 4
"""More than one of this many monitored nodes are many; a single node never is."""


@dataclass(slots=True)
class _Entry:
    started_at: float
    heard_at: float
    runs: bool  # pods run there, or did when the grace period started


class NotReadyGrace:
    """The grace periods of one term, whose clock starts with it."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __contains__(self, node: str) -> bool:
        return node in self._entries

    def grant(self, node: str, heard_at: float | None, now: float) -> bool:
        """Start a grace period if the node may run pods. Returns whether the node has one.

        `heard_at`: None: nothing runs there, which a leader knows only after TERM_START_SECONDS.
        """
        if node not in self._entries and (heard_at is not None or now < TERM_START_SECONDS):
            runs = heard_at is not None
            self._entries[node] = _Entry(now, heard_at if heard_at is not None else now, runs)
        return node in self._entries

    def cancel(self, node: str) -> None:
        """The node is ready again, deleted, or known to be lost."""
        self._entries.pop(node, None)

    def clear(self) -> None:
        """Forget all grace periods."""
        self._entries.clear()

    def expired(self, heartbeats: dict[str, float], now: float) -> list[str]:
        """Nodes that are lost now. `heartbeats`: latest heartbeat of each node."""
        silent_nodes = sum(now - heard_at >= SILENT_SECONDS for heard_at in heartbeats.values())
        many = max(len(self._entries), silent_nodes) > max(1, len(heartbeats) // SHARE)
        expired = []
        for name, entry in self._entries.items():
            entry.runs = entry.runs or name in heartbeats
            entry.heard_at = max(entry.heard_at, heartbeats.get(name, 0.0))
            since = max(entry.started_at, entry.heard_at) if many else entry.heard_at
            silent = now - since >= (MANY_SILENT_SECONDS if many else SILENT_SECONDS)
            empty = not entry.runs and now >= TERM_START_SECONDS
            if empty or silent or now - entry.started_at >= GRACE_SECONDS_MAX:
                expired.append(name)
        for name in expired:
            del self._entries[name]
        return expired
