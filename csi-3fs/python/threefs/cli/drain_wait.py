"""The wait of `threefs drain`: until the nodes are empty, or without progress."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from threefs.cli.moves import NORMAL_CAUSES, stalls, waits
from threefs.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from threefs.client import Client

__all__ = ["DrainWait", "moves_off", "replicas_on"]

POLL_SECONDS = 0.5
POLLS_PER_PLAN = 10
"""A plan takes mgmtd up to 0.4 s in a cluster of 1,000 nodes; other changes wait meanwhile."""


def replicas_on(nodes: set[int], status: dict[str, Any]) -> int:
    """Number of replicas that these nodes still have."""
    chains = status["routing"]["chains"].values()
    return sum(place["node"] in nodes for chain in chains for place in chain["targets"])


def moves_off(nodes: set[int], plan: dict[str, Any]) -> int:
    """Number of planned moves off these nodes; others may be for balance, on request only."""
    return sum(move["from"] in nodes for move in plan["moves"])


@dataclass
class DrainWait:
    """Waits for nodes to become empty."""

    client: Client
    nodes: set[int]
    stalled_seconds: float
    """Maximum time without progress."""
    progress: Callable[[int], None]
    """Receives the number of replicas left."""
    show: Callable[[str], None]
    """Receives what the moves wait for, when it changes."""
    now: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep
    _seen: object = field(default=None, init=False)
    _seen_at: float = field(default=0.0, init=False)
    _reasons: list[str] = field(default_factory=list, init=False)
    _limited: bool = field(default=False, init=False)

    def run(self) -> None:
        """Return when the nodes are empty, nothing can move, or the drain was cancelled.

        Also after `stalled_seconds` without progress: no replica has left, and no copy has grown.
        """
        self._seen_at = self.now()
        polls = 0
        while True:
            try:
                status = json.loads(self.client.status())
                if self._is_over(status, plan=polls % POLLS_PER_PLAN == 0):
                    return
                polls += 1
            except Unavailable as error:
                self._explain([f"no status: {error}"])
            if self.now() - self._seen_at >= self.stalled_seconds:
                self.show(f"no progress for {self.stalled_seconds:.0f} s")
                return
            self.pause(POLL_SECONDS)

    def _is_over(self, status: dict[str, Any], *, plan: bool) -> bool:
        left = replicas_on(self.nodes, status)
        self.progress(left)
        moves = (status.get("moves") or {}).get("under_way", [])
        seen = (left, [(move["chain"], move["copied_bytes"]) for move in moves])
        if seen != self._seen or self._limited:
            self._seen, self._seen_at = seen, self.now()
        return left == 0 or (plan and self._cannot_continue())

    def _cannot_continue(self) -> bool:
        plan = json.loads(self.client.rebalance())
        if not self.nodes <= set(plan["leaving"]):
            return True
        report = self.client.moves(plan=True)
        if report is not None:
            self._report(json.loads(report))
        return not (moves_off(self.nodes, plan) or plan["under_way"]) and plan["stuck"] > 0

    def _report(self, report: dict[str, Any]) -> None:
        waiting = [move for move in report["waiting"] if move["from"] in self.nodes]
        stalled = stalls(report)
        # The pause that the limit requires is not a lack of progress.
        self._limited = not stalled and any(move["wait"]["cause"] == "rate" for move in waiting)
        unusual = (move for move in waiting if move["wait"]["cause"] not in NORMAL_CAUSES)
        self._explain(stalled + waits(unusual))

    def _explain(self, reasons: list[str]) -> None:
        if reasons != self._reasons:
            self._reasons = reasons
            for reason in reasons:
                self.show(reason)
