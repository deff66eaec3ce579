"""Exits of a gang's pods, reported with the root cause first.

When one rank fails, ranks on other nodes fail as a consequence moments later, and their reports may
arrive first. So a failed exit is held briefly; then all held exits are reported, the root cause
first. Pure: `now` is an argument.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flyer.engine import Failed, Killed
from flyer.job.failure import Failure, first
from flyer.kube.gateway.outcome import LOST_PEERS, explained, is_out_of_memory

if TYPE_CHECKING:
    from flyer.engine import Outcome
    from flyer.kube.gateway.settings import GatewaySettings

__all__ = ["Exits"]


@dataclass(frozen=True, slots=True)
class _Waiting:
    outcome: Outcome
    failure: Failure
    due: float
    status_due: float | None = None
    """Deadline for the pod's status, after a SIGKILL that the sidecar cannot explain."""


class Exits:
    """The exits of one attempt, by node rank."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self.reported: dict[int, Outcome] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._failures: list[Failure] = []

    def has_ended(self, node_rank: int) -> bool:
        """Whether this pod has ended, reported or not."""
        return node_rank in self.reported or node_rank in self._waiting

    @property
    def root_cause(self) -> Failure | None:
        """The root cause, as far as it is known."""
        return first(self._failures)

    def add(
        self, node_rank: int, outcome: Outcome, failure: Failure | None, now: float
    ) -> list[tuple[int, Outcome]]:
        """Record an exit; returns the exits to report immediately. Repeated exits are ignored."""
        if self.has_ended(node_rank):
            return []
        if not _is_suspicious(outcome):
            self.reported[node_rank] = outcome
            return [(node_rank, outcome)]
        if failure is not None:
            self._failures.append(failure)
        lost_peers = outcome == LOST_PEERS or (failure is not None and failure.peer_lost)
        pause = self._settings.first_failure_seconds
        if lost_peers:
            pause = self._settings.peer_lost_seconds
        cause = failure or _unknown(node_rank, outcome, now, lost_peers=lost_peers)
        unexplained = isinstance(outcome, Killed) and outcome.signal == signal.SIGKILL
        status_due = now + self._settings.status_seconds if unexplained else None
        self._waiting[node_rank] = _Waiting(outcome, cause, now + pause, status_due)
        return []

    def explain(self, node_rank: int, status: Outcome) -> None:
        """Record the pod's status: an exceeded memory limit explains a SIGKILL."""
        waiting = self._waiting.get(node_rank)
        if waiting is None or waiting.status_due is None:
            return
        outcome = status if is_out_of_memory(status) else waiting.outcome
        self._waiting[node_rank] = replace(waiting, outcome=outcome, status_due=None)

    def due(self) -> float | None:
        """When `tick` has exits to report."""
        if not self._waiting:
            return None
        next_due = min(item.due for item in self._waiting.values())
        unexplained = [item.status_due for item in self._waiting.values() if item.status_due]
        return max(next_due, min(unexplained, default=next_due))

    def tick(self, now: float) -> list[tuple[int, Outcome]]:
        """The exits to report now, the root cause first."""
        next_due = self.due()
        if next_due is None or now < next_due:
            return []
        ordered = []
        while self._waiting:
            root_cause = first(item.failure for item in self._waiting.values())
            node_rank = next(
                rank for rank, waiting in self._waiting.items() if waiting.failure is root_cause
            )
            ended = self._waiting.pop(node_rank)
            ordered.append((node_rank, explained(ended.outcome, ended.failure)))
        self.reported.update(ordered)
        return ordered


def _is_suspicious(outcome: Outcome) -> bool:
    if isinstance(outcome, Killed):
        return outcome.signal != 0 or outcome == LOST_PEERS
    return isinstance(outcome, Failed)


def _unknown(node_rank: int, outcome: Outcome, now: float, *, lost_peers: bool) -> Failure:
    """A placeholder for an exit that only the pod's status reports, to order all exits."""
    return Failure(
        job="",
        attempt=0,
        node="",
        node_rank=node_rank,
        rank=node_rank,
        local_rank=0,
        time=now,
        signal=outcome.signal if isinstance(outcome, Killed) else None,
        peer_lost=lost_peers,
    )
