"""Orphan pods: live pods of deleted jobs that a new leader finds, which block their nodes.

The operator binds pods only while their job exists, and keeps the job until its nodes are empty. So
only pods that survived a change of leaders block a node: a pod that appears later with the owner
reference of a deleted job was created by a user, who could otherwise block any node.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flyer.engine import Node
    from flyer.kube.cache.pod_view import PodView

__all__ = ["OrphanPods", "unready"]


class OrphanPods:
    """Live orphan pods, by node."""

    def __init__(self) -> None:
        self._uids: dict[str, set[str]] = {}

    def observe(self, pod: PodView, *, live: bool, term_start: bool) -> bool:
        """Record whether this bound pod is a live orphan. Returns whether that has changed.

        A pod becomes an orphan only at `term_start`.
        """
        uids = self._uids.get(pod.node, set())
        if live == (pod.uid in uids) or (live and not term_start):
            return False
        if live:
            self._uids.setdefault(pod.node, set()).add(pod.uid)
        else:
            uids.discard(pod.uid)
        return True

    def apply(self, node: Node) -> Node:
        """The node as the engine observes it."""
        uids = self._uids.get(node.name)
        if uids and node.ready:
            return unready(node, f"{len(uids)} pods of deleted jobs still run")
        return node


def unready(node: Node, why: str) -> Node:
    """The node, not ready for new work."""
    return replace(node, ready=False, reason=why)
