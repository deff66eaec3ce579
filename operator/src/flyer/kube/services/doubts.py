"""Which nodes that Kubernetes calls lost are lost to what runs on them. Pure.

Kubernetes hears of a node from its kubelet, which may starve, be killed or not reach the API server
while the ranks go on; after a minute without an API server it calls all nodes lost. So its word is
doubted while a node's sidecar is heard, for as long as Kubernetes itself waits before it deletes
pods. A node where nothing runs is lost at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Doubts"]

BEGIN_SECONDS: Final = 1.0
"""After so long a new leader knows where something runs."""
SILENT_SECONDS: Final = 10.0
"""A node that has said nothing for so long is lost. Longer than an exit of its rank takes to be
told and judged: that is no node's fault."""
MANY_SILENT_SECONDS: Final = 60.0
"""Many at a time: it is rather we who hear nobody. Sidecars need so long to find a new leader where
whatever keeps the Service's endpoints was without an API server too."""
DOUBT_SECONDS: Final = 300.0
"""`node.kubernetes.io/unreachable` is tolerated for so long by default."""
SHARE: Final = 4
"""More than one of so many of those that are listened to are many; a single one never is."""


@dataclass(slots=True)
class _Doubt:
    began: float
    heard_at: float
    runs: bool  # something runs there, or did when it was doubted


class Doubts:
    """Of one term, whose clock begins with it."""

    def __init__(self) -> None:
        self._doubts: dict[str, _Doubt] = {}

    def __contains__(self, node: str) -> bool:
        return node in self._doubts

    def of(self, node: str, heard_at: float | None, now: float) -> bool:
        """Whether to doubt that this node is lost. `heard_at`: None = nothing runs there.

        A leader that has just begun does not know yet where something runs.
        """
        if node not in self._doubts and (heard_at is not None or now < BEGIN_SECONDS):
            runs = heard_at is not None
            self._doubts[node] = _Doubt(now, heard_at if heard_at is not None else now, runs)
        return node in self._doubts

    def drop(self, node: str) -> None:
        """It is ready again, gone, or known to be lost."""
        self._doubts.pop(node, None)

    def clear(self) -> None:
        """Everything is asked anew."""
        self._doubts.clear()

    def judge(self, heard: dict[str, float], now: float) -> list[str]:
        """Which are lost now. `heard`: when each of those that are listened to was heard last."""
        silent_nodes = sum(now - heard_at >= SILENT_SECONDS for heard_at in heard.values())
        many = max(len(self._doubts), silent_nodes) > max(1, len(heard) // SHARE)
        found = []
        for name, doubt in self._doubts.items():
            doubt.runs = doubt.runs or name in heard
            doubt.heard_at = max(doubt.heard_at, heard.get(name, 0.0))
            since = max(doubt.began, doubt.heard_at) if many else doubt.heard_at
            silent = now - since >= (MANY_SILENT_SECONDS if many else SILENT_SECONDS)
            empty = not doubt.runs and now >= BEGIN_SECONDS
            if empty or silent or now - doubt.began >= DOUBT_SECONDS:
                found.append(name)
        for name in found:
            del self._doubts[name]
        return found
