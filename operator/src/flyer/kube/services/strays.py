"""Living pods of jobs that nobody knows: their nodes get no gang until they are gone."""

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

    def saw(self, pod: PodView, *, lives: bool) -> bool:
        """Whether it is news that this pod, which is bound, lives as a stray or does no more."""
        uids = self._uids.get(pod.node, set())
        if lives == (pod.uid in uids):
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
