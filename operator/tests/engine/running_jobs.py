"""Nodes, and steps of running jobs that several tests share."""

from __future__ import annotations

from typing import Any

from flyer.api import Phase
from flyer.engine import Event, GangStarted, Node, NodeEmptied, PodExited, Released, Succeeded

UNLIMITED: dict[str, Any] = {"progressDeadline": None}


def nodes(count: int, node_class: str = "default") -> list[Node]:
    return [Node(f"{node_class[0]}{i:03d}", "A", node_class=node_class) for i in range(count)]


def leave(harness: Any) -> None:
    """Jobs that are asked to leave do so, and jobs that start become running."""
    for _ in range(8):
        events: list[Event] = []
        for key, job in harness.state.jobs.items():
            status, stops = job.status, job.sent_actions.stops
            if status.phase is Phase.SUSPENDING and not status.suspension.expired and not stops:
                events.append(Released(key, status.history.attempt))
            elif status.phase is Phase.STARTING:
                events.append(GangStarted(key, status.history.attempt))
            events += [
                NodeEmptied(node.name, key, node.attempt)
                for node in status.occupied
                if node.name in stops
            ]
        if not events:
            return
        harness.step(*events)


def finish(harness: Any, name: str) -> None:
    key, attempt = f"default/{name}", harness.status(name).history.attempt
    harness.step(*(PodExited(key, attempt, node, Succeeded()) for node in harness.names(name)))
    harness.empty(name)


def phases(harness: Any, *names: str) -> list[Phase]:
    return [harness.status(name).phase for name in names]
