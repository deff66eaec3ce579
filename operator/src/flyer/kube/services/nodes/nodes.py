"""Nodes as the engine observes them: their state, and which of them are lost.

A node's state comes from its objects (Node, NodeHealth) and from facts known only here: orphan pods
of deleted jobs on the node, and silent nodes (`failure_detector`). A node that Kubernetes reports
as lost gets no new work, but its pods keep running for a grace period while their sidecars send
heartbeats (`not_ready_grace`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flyer.engine import NodeLost, NodeObserved, NodeRemoved
from flyer.kube.services.nodes.failure_detector import FailureDetector
from flyer.kube.services.nodes.not_ready_grace import NotReadyGrace
from flyer.kube.services.pods.orphans import OrphanPods, unready

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flyer.engine import Event, Node
    from flyer.kube.cache.cluster_cache import ClusterCache
    from flyer.kube.cache.node_view import NodeView
    from flyer.kube.cache.pod_view import PodView

__all__ = ["Nodes"]

NODE_SILENT = "NodeSilent"

log = logging.getLogger(__name__)


class Nodes:
    """The nodes of one term."""

    def __init__(self, cache: ClusterCache, enqueue: Callable[[Event], None]) -> None:
        self.failure_detector = FailureDetector(cache.probed)
        self.withheld: dict[str, str] = {}  # nodes of quarantined jobs, with the job
        self._cache = cache
        self._enqueue = enqueue
        self._known: dict[str, Node] = {}  # as last reported to the engine
        self._lost: set[str] = set()  # reported to the engine as lost
        self._not_ready_grace = NotReadyGrace()
        self._orphans = OrphanPods()

    def reset(self) -> list[Node]:
        """Start over: returns all nodes for a rebuild; `report_losses` then reports lost ones."""
        nodes = [self._observed(view) for view in self._cache.nodes.values() if view.managed]
        self._known = {node.name: node for node in nodes}
        self._lost = set()
        self._not_ready_grace.clear()
        return nodes

    def report_losses(self) -> None:
        """Report the lost nodes to the engine."""
        for name in self._known:
            self._check_loss(name)

    def withhold(self, nodes: Mapping[str, str]) -> list[Event]:
        """Withhold these nodes for quarantined jobs. Returns the events for the engine."""
        self.withheld |= nodes
        events: list[Event] = []
        for name in nodes:
            view = self._cache.nodes.get("", name)
            if view is not None and view.managed:
                self._known[name] = self._observed(view)
                events.append(NodeObserved(self._known[name]))
        return events

    def changed(self, name: str) -> None:
        """A node, or its health, was added, changed or deleted."""
        view = self._cache.nodes.get("", name)
        if view is None or not view.managed:
            self.failure_detector.forget(name)
            self._not_ready_grace.cancel(name)
            self._cache.probed.discard(name)
            if self._known.pop(name, None) is not None:
                self._lost.discard(name)
                self._enqueue(NodeRemoved(name, lost=view is None))
            return
        if view.lost and name in self._lost:
            self.failure_detector.forget(
                name
            )  # Kubernetes has detected the loss, and reports the return
        node = self._observed(view)
        back = name in self._lost and not self._is_lost(view)
        if self._known.get(name) != node or back:
            self._known[name] = node
            self._lost.discard(name)
            self._enqueue(NodeObserved(node))
        self._check_loss(name)

    def evaluate(self) -> None:
        """Report nodes that are lost, and nodes that answer again."""
        for name in self._not_ready_grace.expired(
            self.failure_detector.last_heard(), self.failure_detector.now
        ):
            view = self._cache.nodes.get("", name)
            if view is not None and view.lost:
                log.warning(
                    "node %s is lost: it is not ready, and the grace period has ended",
                    name,
                )
                self._lose(name, view)
        lost_nodes, back = self.failure_detector.evaluate()
        for name, evidence in lost_nodes.items():
            log.warning("node %s is lost: %s", name, evidence)
            self.changed(name)
        for name, why in self.failure_detector.unresolved().items():
            log.info("node %s is silent, waiting for Kubernetes to report it: %s", name, why)
        for name in back:
            log.warning("node %s is back: it answers probes", name)
            self.changed(name)

    def observe_orphan(self, pod: PodView, *, live: bool, term_start: bool) -> bool:
        """Record whether this bound pod is a live orphan. Returns whether that has changed."""
        return self._orphans.observe(pod, live=live, term_start=term_start)

    def _observed(self, view: NodeView) -> Node:
        node = self._orphans.apply(self._cache.engine_node(view))
        if node.ready and node.name in self.failure_detector.lost:
            return unready(node, f"silent: {self.failure_detector.lost[node.name]}")
        if node.ready and node.name in self.withheld:
            return unready(node, f"withheld for {self.withheld[node.name]}, which is quarantined")
        return node

    def _is_lost(self, view: NodeView) -> bool:
        return bool(view.lost) or view.node.name in self.failure_detector.lost

    def _check_loss(self, name: str) -> None:
        view = self._cache.nodes.get("", name)
        if view is None or name in self._lost or not self._is_lost(view):
            self._not_ready_grace.cancel(name)
            return
        if name not in self.failure_detector.lost:
            heard_at = self.failure_detector.heard_at(name)
            if self._not_ready_grace.grant(name, heard_at, self.failure_detector.now):
                return
        self._not_ready_grace.cancel(name)
        self._lose(name, view)

    def _lose(self, name: str, view: NodeView) -> None:
        self._lost.add(name)
        evidence = "" if view.lost else self.failure_detector.lost[name]
        self._enqueue(NodeLost(name, view.lost or NODE_SILENT, evidence))
