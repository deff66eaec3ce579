"""Node failure detector: declares silent nodes lost before Kubernetes does. Pure.

Kubernetes marks a node not ready when its kubelet has been silent for 40 s. A gang's sidecars send
a heartbeat every two seconds. When all sidecars of a node have been silent for a while, the node
itself is probed by a connection to its address: any answer, including a refusal, shows that it is
alive. A node is lost only if it answered a probe before and leaves two in a row unanswered.

The observer itself may be partitioned, overloaded or just started. So only these count:

- silence of a minority: at most a quarter of the monitored nodes, or one node. If more are silent,
  they are probed too, but then only an answer counts;
- nodes that have answered a probe of this process before, in this term or an earlier one;
- time in which this process was running: while it was stalled, no node counts as silent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flyer.kube.gateway import Heartbeat

__all__ = ["TICK_SECONDS", "FailureDetector"]

TICK_SECONDS: Final = 0.5
"""Time between ticks. Of a longer gap, only this much counts as silence."""
SUSPECT_SECONDS: Final = 3.0
"""Silence after which a node is probed: it has missed a heartbeat of each sidecar."""
LOST_SECONDS: Final = 5.0
"""Least silence after which a node is lost, if the probes were not answered."""
PROBES_UNANSWERED: Final = 2
"""Consecutive unanswered probes of a lost node: a link outage of two seconds is tolerated."""
PAUSE_SECONDS: Final = 3.0
"""Time between probes of a silent node."""
UNANSWERED_SECONDS_MAX: Final = 60.0
"""Maximum time between probes of a node that has never answered; it doubles each time. The first
probe may have failed by chance, and a node that has never answered cannot be declared lost; but a
firewall may block all of them."""
BACKGROUND_PROBES_MAX: Final = 100
"""Maximum number of low-priority probes per tick, so that a resync of thousands of nodes does not
flood the network."""
SHARE: Final = 4
"""At most one in this many nodes may be silent; otherwise Kubernetes decides."""


@dataclass(slots=True)
class _Node:
    received_at: float  # time of its latest heartbeat, by the sender's clock; 0: none yet
    heard_at: float  # when the heartbeat was observed, or first expected
    replaceable: bool  # its gang cannot continue without it: it may be declared lost
    runs: bool  # ranks may be running on it
    probing: bool = False
    probed_at: float | None = None  # when the latest probe started
    pause: float = PAUSE_SECONDS  # until the next probe, while none was answered
    counts: bool = False  # the latest probe started while few nodes were silent, and few still are
    unanswered: int = 0  # consecutive probes of this silence that count
    alive: bool = False  # the latest probe of this silence was answered
    reported: bool = False  # `unresolved` has reported this silence

    @property
    def dead(self) -> bool:
        return self.unanswered >= PROBES_UNANSWERED


class FailureDetector:
    """State of each monitored node. Its clock counts only the time between ticks.

    `responding` outlives the detector: nodes that have ever answered a probe of this process.
    """

    def __init__(self, responding: set[str]) -> None:
        self._answered = responding
        self.lost: dict[str, str] = {}  # node → evidence
        self._nodes: dict[str, _Node] = {}
        self._ticked_at: float | None = None
        self._now = 0.0

    def tick(self, heartbeats: Mapping[str, Heartbeat], now: float) -> list[str]:
        """Evaluate the last heartbeats of each node; return the nodes to probe now.

        Their probes count as started when this returns. `probed` records each result.
        """
        if self._ticked_at is not None:
            self._now += min(max(now - self._ticked_at, 0.0), TICK_SECONDS)
        self._ticked_at = now
        for name in self._nodes.keys() - heartbeats.keys() - self.lost.keys():
            del self._nodes[name]
        for name, heartbeat in heartbeats.items():
            at, fresh = (
                heartbeat.received_at,
                _Node(0.0, self._now, heartbeat.replaceable, heartbeat.runs),
            )
            monitored = self._nodes.setdefault(name, fresh)
            monitored.replaceable, monitored.runs = heartbeat.replaceable, heartbeat.runs
            if at > monitored.received_at:
                monitored.received_at, monitored.heard_at = at, self._now
                monitored.unanswered, monitored.alive, monitored.reported = 0, False, False
        few = self._few_silent()
        if not few:
            self._discard_probes()
        due_nodes = self._due(few=few)
        for name in due_nodes:
            monitored = self._nodes[name]
            if monitored.probed_at is not None:
                monitored.pause = min(2 * monitored.pause, UNANSWERED_SECONDS_MAX)
            monitored.probing = True
            monitored.probed_at = self._now
            monitored.counts = few or name in self.lost
        return due_nodes

    def probed(self, node: str, *, answered: bool | None) -> None:
        """A probe has ended. None: inconclusive, for example without a local network."""
        monitored = self._nodes.get(node)
        if monitored is None or monitored.probed_at is None:
            return
        monitored.probing = False
        if answered is None:
            return
        if answered:
            self._answered.add(node)
        if monitored.probed_at - monitored.heard_at >= SUSPECT_SECONDS or node in self.lost:
            monitored.unanswered = 0 if answered else monitored.unanswered + monitored.counts
            monitored.alive = answered

    def evaluate(self) -> tuple[dict[str, str], list[str]]:
        """Nodes that are lost from now on, with the evidence, and nodes that are back."""
        back = [name for name in self.lost if not self._nodes[name].dead]
        for name in back:
            del self.lost[name]
        lost_nodes = {
            name: f"nothing heard for {self._now - monitored.heard_at:.1f} s, and no probe answered"
            for name, monitored in self._nodes.items()
            if name not in self.lost
            and monitored.replaceable
            and monitored.dead
            and name in self._answered
            if self._now - monitored.heard_at >= LOST_SECONDS
        }
        if not self._few_silent():
            return {}, back
        self.lost |= lost_nodes
        return lost_nodes, back

    def unresolved(self) -> dict[str, str]:
        """Silent nodes that are not declared lost, with the reason; each silence once."""
        reasons = {}
        for name, monitored in self._nodes.items():
            awaited = name not in self.lost and (monitored.received_at or monitored.replaceable)
            if (
                awaited
                and not monitored.reported
                and self._now - monitored.heard_at >= LOST_SECONDS
            ):
                if not monitored.replaceable:
                    reasons[name] = "its pods do not depend on other nodes"
                elif monitored.alive:
                    reasons[name] = "it answers probes"
                elif name not in self._answered:
                    reasons[name] = "it has never answered a probe"
        for name in reasons:
            self._nodes[name].reported = True
        return reasons

    @property
    def now(self) -> float:
        """The detector's clock, in seconds."""
        return self._now

    def has_answered(self, node: str) -> bool:
        """Whether the node has ever answered a probe."""
        return node in self._answered

    def heard_at(self, node: str) -> float | None:
        """Time of the latest heartbeat, or when it was first expected; None: nothing runs there."""
        monitored = self._nodes.get(node)
        return monitored.heard_at if monitored is not None and monitored.runs else None

    def last_heard(self) -> dict[str, float]:
        """`heard_at` of all nodes on which ranks may be running."""
        return {
            name: monitored.heard_at for name, monitored in self._nodes.items() if monitored.runs
        }

    def forget(self, node: str) -> None:
        """Stop monitoring the node."""
        self.lost.pop(node, None)
        self._nodes.pop(node, None)

    def _discard_probes(self) -> None:
        """Discard probe results, because this process may be partitioned."""
        for name, monitored in self._nodes.items():
            if name not in self.lost:
                monitored.unanswered, monitored.counts = 0, False

    def _due(self, *, few: bool) -> list[str]:
        """All nodes that may be lost, and the longest-waiting ones of the others."""
        due_nodes = [
            name for name, monitored in self._nodes.items() if self._is_due(name, monitored)
        ]
        urgent = [
            match for match in due_nodes if match in self.lost or (few and match in self._answered)
        ]
        background = set(due_nodes) - set(urgent)
        probed_at = {name: self._nodes[name].probed_at or 0.0 for name in background}
        return (
            urgent
            + sorted(background, key=lambda name: (probed_at[name], name))[:BACKGROUND_PROBES_MAX]
        )

    def _is_due(self, name: str, monitored: _Node) -> bool:
        if monitored.probing or not (monitored.replaceable or name in self.lost):
            return False
        has_responded = name in self._answered
        if name in self.lost or (has_responded and self._is_late(monitored)):
            pause = 0.0 if 0 < monitored.unanswered < PROBES_UNANSWERED else PAUSE_SECONDS
        elif not has_responded:
            pause = monitored.pause
        else:
            return False
        return monitored.probed_at is None or self._now - monitored.probed_at >= pause

    def _is_late(self, monitored: _Node) -> bool:
        return self._now - monitored.heard_at >= SUSPECT_SECONDS

    def _few_silent(self) -> bool:
        """Whether few nodes are silent; otherwise this process may be partitioned."""
        candidates = {
            name: monitored
            for name, monitored in self._nodes.items()
            if monitored.replaceable or name in self.lost
        }
        silent = sum(
            name in self.lost or (self._is_late(monitored) and not monitored.alive)
            for name, monitored in candidates.items()
        )
        return silent < len(candidates) and silent <= max(1, len(candidates) // SHARE)
