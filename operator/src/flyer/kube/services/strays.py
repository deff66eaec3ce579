"""Living pods of deleted jobs that a new leader finds: their nodes wait until they are gone.

Ours are bound before their job is deleted, and their job is known until its nodes are empty. So
only what lived through a change of leaders is waited for: a pod that comes up later with the owner
reference of a deleted job is a user's, who could keep any node out of service otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flyer.engine import Node
    from flyer.kube.services.views import PodView

__all__ = ["Strays", "unready"]


class Strays:
    """By node."""

    def __init__(self) -> None:
        self._uids: dict[str, set[str]] = {}

    def saw(self, pod: PodView, *, lives: bool, begins: bool) -> bool:
        """Whether it is news that this pod, which is bound, lives as a stray or does no more.

        Only when a term `begins` it can start to.
        """
        uids = self._uids.get(pod.node, set())
        if lives == (pod.uid in uids) or (lives and not begins):
            return False
        if lives:
            self._uids.setdefault(pod.node, set()).add(pod.uid)
        else:
            uids.discard(pod.uid)
        return True

    def observed(self, node: Node) -> Node:
        """The node as the engine is to see it."""
        uids = self._uids.get(node.name)
        if uids and node.ready:
            return unready(node, f"{len(uids)} pods of deleted jobs are still there")
        return node


def unready(node: Node, why: str) -> Node:
    """The same node without new work."""
    return replace(node, ready=False, reason=why)
