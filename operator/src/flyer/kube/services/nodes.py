"""What the engine is told of nodes: how they are, and which have died.

A node is as its objects say (Node, NodeHealth), but for what is known here alone: pods of deleted
jobs that still live on it, and machines that have fallen silent (`silence`). One that Kubernetes
calls lost gets no work, but what runs there goes on for a while if it is heard (`doubts`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flyer.engine import NodeLost, NodeObserved, NodeRemoved
from flyer.kube.services.doubts import Doubts
from flyer.kube.services.silence import Silence
from flyer.kube.services.strays import Strays, unready

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flyer.engine import Event, Node
    from flyer.kube.services.views import NodeView, PodView
    from flyer.kube.services.world import World

__all__ = ["Nodes"]

NODE_SILENT = "NodeSilent"

log = logging.getLogger(__name__)


class Nodes:
    """Of one term."""

    def __init__(self, world: World, tell: Callable[[Event], None]) -> None:
        self.silence = Silence(world.answered)
        self.withheld: dict[str, str] = {}  # nodes of jobs that are left alone
        self._world = world
        self._tell = tell
        self._known: dict[str, Node] = {}  # as last told
        self._lost: set[str] = set()  # told
        self._doubts = Doubts()
        self._strays = Strays()

    def begin(self) -> list[Node]:
        """Everything is told anew: the nodes by this, losses by `tell_losses`."""
        found = [self._observed(view) for view in self._world.nodes.values() if view.ours]
        self._known = {node.name: node for node in found}
        self._lost = set()
        self._doubts.clear()
        return found

    def tell_losses(self) -> None:
        """Which nodes are dead."""
        for name in self._known:
            self._see_loss(name)

    def withhold(self, nodes: Mapping[str, str]) -> list[Event]:
        """Keep these nodes for jobs that are left alone: what the engine is told of them."""
        self.withheld |= nodes
        events: list[Event] = []
        for name in nodes:
            view = self._world.nodes.get("", name)
            if view is not None and view.ours:
                self._known[name] = self._observed(view)
                events.append(NodeObserved(self._known[name]))
        return events

    def changed(self, name: str) -> None:
        """A node, or what is known of it, came, changed or went."""
        view = self._world.nodes.get("", name)
        if view is None or not view.ours:
            self.silence.forget(name)
            self._doubts.drop(name)
            self._world.answered.discard(name)
            if self._known.pop(name, None) is not None:
                self._lost.discard(name)
                self._tell(NodeRemoved(name, lost=view is None))
            return
        if view.lost and name in self._lost:
            self.silence.forget(name)  # Kubernetes has noticed, and says when it is back
        node = self._observed(view)
        back = name in self._lost and not self._is_lost(view)
        if self._known.get(name) != node or back:
            self._known[name] = node
            self._lost.discard(name)
            self._tell(NodeObserved(node))
        self._see_loss(name)

    def judge(self) -> None:
        """Tell who has fallen silent, and who answers again."""
        for name in self._doubts.judge(self.silence.heard(), self.silence.now):
            view = self._world.nodes.get("", name)
            if view is not None and view.lost:
                log.warning("node %s is lost: Kubernetes says so, and is doubted no longer", name)
                self._lose(name, view)
        lost, back = self.silence.judge()
        for name, evidence in lost.items():
            log.warning("node %s is lost: %s", name, evidence)
            self.changed(name)
        for name, why in self.silence.spared().items():
            log.info("node %s is silent, and left to Kubernetes: %s", name, why)
        for name in back:
            log.warning("node %s is back: it answers", name)
            self.changed(name)

    def saw(self, pod: PodView, *, lives: bool, begins: bool) -> bool:
        """Whether it is news that this pod, which is bound, lives as a stray or does no more."""
        return self._strays.saw(pod, lives=lives, begins=begins)

    def _observed(self, view: NodeView) -> Node:
        node = self._strays.observed(self._world.engine_node(view))
        if node.ready and node.name in self.silence.lost:
            return unready(node, f"silent: {self.silence.lost[node.name]}")
        if node.ready and node.name in self.withheld:
            return unready(node, f"kept for {self.withheld[node.name]}, which is left alone")
        return node

    def _is_lost(self, view: NodeView) -> bool:
        return bool(view.lost) or view.node.name in self.silence.lost

    def _see_loss(self, name: str) -> None:
        view = self._world.nodes.get("", name)
        if view is None or name in self._lost or not self._is_lost(view):
            self._doubts.drop(name)
            return
        if name not in self.silence.lost:
            heard_at = self.silence.heard_at(name)
            if self._doubts.of(name, heard_at, self.silence.now):
                return
        self._doubts.drop(name)
        self._lose(name, view)

    def _lose(self, name: str, view: NodeView) -> None:
        self._lost.add(name)
        evidence = "" if view.lost else self.silence.lost[name]
        self._tell(NodeLost(name, view.lost or NODE_SILENT, evidence))
