"""Cluster cache: all watched objects, with one listener that is notified of changes.

It lives as long as the process, so that a new leader need not list pods and nodes first. The
listener is the current leader term.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from flyer.api import TOPOLOGY_NAME, FinishedJobs, FlyerQuota, FlyerTopology, NodeHealth
from flyer.engine import Quota, QuotaObserved, QuotaRemoved, TeamObserved, Zones
from flyer.kube.apiserver import Cache, WatchSettings
from flyer.kube.apiserver.resources import (
    FLYERJOBS,
    FLYERQUOTAS,
    FLYERTOPOLOGIES,
    NAMESPACES,
    NODEHEALTHS,
    NODES,
    PODS,
)
from flyer.kube.cache.job_view import shape_job
from flyer.kube.cache.node_view import NodeView, shape_node
from flyer.kube.cache.pod_view import PodView, shape_pods
from flyer.kube.pods.names import LABEL_JOB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from flyer.engine import Event, Node, Outcome
    from flyer.kube.apiserver import Api, Key
    from flyer.kube.cache.job_view import JobView
    from flyer.kube.cache.node_view import Strings

__all__ = ["ClusterCache", "Listener", "TermOverError"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """What a leader term does when an object was added, changed or deleted."""

    job_changed: Callable[[JobView | None, JobView | None], None]
    pod_changed: Callable[[PodView | None, PodView | None], None]
    node_changed: Callable[[str], None]
    """Also for its NodeHealth."""
    topology_changed: Callable[[], None]
    enqueue: Callable[[Event], None]
    """Takes the events of quotas and teams."""
    request_rebuild: Callable[[str], None]
    """Called after a failed notification."""


class TermOverError(Exception):
    """The term is ending: no new work is started."""


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """A namespace, with a label that may name its jobs' team."""

    name: str
    labels: Strings


class ClusterCache:
    """All caches. `outcome_of` reads the outcome of a terminated pod."""

    def __init__(
        self,
        api: Api,
        outcome_of: Callable[[Mapping[str, Any] | None], Outcome],
        settings: WatchSettings = WatchSettings(),  # noqa: B008 - frozen
    ) -> None:
        self.listener: Listener | None = None
        self.probed: set[str] = set()  # nodes that have answered a probe of this process
        self.node_shapes = 0  # increases when a change may affect which pods fit on a node
        self._pods_of: defaultdict[str, dict[str, PodView]] = defaultdict(dict)
        self._pods_on: defaultdict[str, dict[str, PodView]] = defaultdict(dict)
        self.jobs = Cache(api, FLYERJOBS, shape_job, self._job, settings=settings)
        # The label only keeps the watch small: the controller reference defines a pod's owner. A
        # running pod that loses the label disappears from this cache: see `PodControl.wait_ended`.
        self.pods = Cache(
            api, PODS, shape_pods(outcome_of), self._pod, settings=settings,
            labelSelector=LABEL_JOB,
        )  # fmt: skip
        self.nodes = Cache(api, NODES, shape_node, self._node, settings=settings)
        self.healths = Cache(
            api, NODEHEALTHS, _shape_health, self._health, settings=settings, optional=True
        )
        self.quotas = Cache(
            api, FLYERQUOTAS, _shape_quota, self._quota, settings=settings, optional=True
        )

        self.topologies = Cache(
            api, FLYERTOPOLOGIES, _shape_topology, self._topology, settings=settings, optional=True
        )
        self.namespaces = Cache(
            api, NAMESPACES, _shape_namespace, self._namespace, settings=settings, optional=True
        )

    @property
    def caches(self) -> tuple[Cache[Any], ...]:
        """The caches of all kinds."""
        return (
            self.jobs, self.pods, self.nodes, self.healths, self.quotas, self.topologies,
            self.namespaces,
        )  # fmt: skip

    @property
    def age_seconds(self) -> float:
        """Time since the last event from the API server, on the stream that is silent longest."""
        return max(cache.age_seconds for cache in self.caches)

    @property
    def synced(self) -> bool:
        """Whether every kind has been listed."""
        return all(cache.synced.is_set() for cache in self.caches)

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for cache in self.caches:
                group.create_task(cache.run(), name=f"watch {cache.resource.plural}")

    async def wait_synced(self) -> None:
        """Wait until every kind has been listed."""
        for cache in self.caches:
            await cache.synced.wait()

    # -- queries -------------------------------------------------------------------------------

    def job(self, key: str) -> JobView | None:
        """The job "namespace/name"."""
        namespace, _, name = key.partition("/")
        return self.jobs.get(namespace, name)

    def pods_of(self, job: str, uid: str | None) -> list[PodView]:
        """The pods of all attempts of a job whose controller is the object with this uid."""
        if job not in self._pods_of:
            return []
        return [pod for pod in self._pods_of[job].values() if pod.owner == uid and pod.attempt]

    def pods_on(self, node: str) -> list[PodView]:
        """The pods of FlyerJobs that are bound to a node."""
        return list(self._pods_on[node].values()) if node in self._pods_on else []

    def zones(self) -> Zones:
        """Zones, leaves and the cross-zone limit of the FlyerTopology."""
        topology = self.topologies.get("", TOPOLOGY_NAME)
        return Zones.of(topology) if topology is not None else Zones()

    def finished_jobs(self) -> FinishedJobs:
        """The FlyerTopology's limits for finished jobs."""
        topology = self.topologies.get("", TOPOLOGY_NAME)
        return topology.spec.finished_jobs if topology is not None else FinishedJobs()

    def team_of(self, namespace: str) -> str:
        """The value of the namespace's team label; empty without a value or a configured label."""
        topology = self.topologies.get("", TOPOLOGY_NAME)
        label = topology.spec.team_label if topology is not None else ""
        view = self.namespaces.get("", namespace)
        return view.labels.get(label, "") if label and view is not None else ""

    def teams(self) -> dict[str, str]:
        """The team of each namespace that has one."""
        return {
            view.name: team
            for view in self.namespaces.values()
            if (team := self.team_of(view.name))
        }

    def engine_nodes(self) -> Iterator[Node]:
        """Every node that may be assigned to gangs."""
        for view in self.nodes.values():
            if view.managed:
                yield self.engine_node(view)

    def engine_node(self, view: NodeView) -> Node:
        """The node with the state of its NodeHealth."""
        health = self.healths.get("", view.node.name)
        node = view.node
        if health is not None:
            node = replace(node, fault=health.fault, drain=health.drained)
        unfit = health.unfit if health else ""
        if health is not None and health.unproven:
            return replace(node, unproven=unfit)  # the removal budget decides
        return replace(node, ready=False, reason=unfit) if unfit and node.ready else node

    # -- changes -------------------------------------------------------------------------------

    def _job(self, _key: Key, before: JobView | None, after: JobView | None) -> None:
        self._notify(lambda listener: listener.job_changed(before, after))

    def _pod(self, _key: Key, before: PodView | None, after: PodView | None) -> None:
        if before is not None:
            _discard(self._pods_of, before.job, before.uid)
            _discard(self._pods_on, before.node, before.uid)
        if after is not None:
            self._pods_of[after.job][after.uid] = after
            if after.node:
                self._pods_on[after.node][after.uid] = after
        replaced = before is not None and after is not None and before.uid != after.uid
        if replaced:
            self._notify(lambda listener: listener.pod_changed(before, None))
        old = None if replaced else before
        if old is None and after is None:
            return  # not a pod of a FlyerJob
        self._notify(lambda listener: listener.pod_changed(old, after))

    def _node(self, key: Key, before: NodeView | None, after: NodeView | None) -> None:
        if _serves(before) != _serves(after):
            self.node_shapes += 1
        self._notify(lambda listener: listener.node_changed(key[1]))

    def _health(self, key: Key, _before: NodeHealth | None, _after: NodeHealth | None) -> None:
        self._notify(lambda listener: listener.node_changed(key[1]))

    def _quota(self, key: Key, before: FlyerQuota | None, after: FlyerQuota | None) -> None:
        # The operator writes the status itself; only a change of the spec matters.
        if before is None or after is None or before.spec != after.spec:
            self._notify(
                lambda listener: listener.enqueue(
                    QuotaRemoved(key[1]) if after is None else QuotaObserved(Quota.of(after))
                )
            )

    def _topology(
        self, _key: Key, before: FlyerTopology | None, after: FlyerTopology | None
    ) -> None:
        # The operator writes the status (the token) itself; only a change of the spec matters.
        if before is None or after is None or before.spec != after.spec:
            self._notify(lambda listener: listener.topology_changed())

    def _namespace(
        self, key: Key, before: NamespaceView | None, after: NamespaceView | None
    ) -> None:
        if before != after:
            self._notify(
                lambda listener: listener.enqueue(TeamObserved(key[1], self.team_of(key[1])))
            )

    def _notify(self, notify: Callable[[Listener], None]) -> None:
        listener = self.listener
        if listener is None:
            return
        try:
            notify(listener)
        except TermOverError:
            self.listener = None  # the next term reads everything from the caches
        except Exception as error:
            log.exception("a bug, please report it")
            listener.request_rebuild(f"{type(error).__name__}: {error}")


def _serves(view: NodeView | None) -> tuple[object, ...] | None:
    """The properties of a node that pods may depend on."""
    if view is None or not view.managed:
        return None
    return view.labels, view.allocatable, view.dedicated


def _discard(index: defaultdict[str, dict[str, PodView]], key: str, uid: str) -> None:
    pods = index.get(key)
    if pods is not None:
        pods.pop(uid, None)
        if not pods:
            del index[key]


def _shape_health(value: dict[str, Any]) -> NodeHealth | None:
    return _parsed(NodeHealth, value)  # type: ignore[no-any-return]


def _shape_quota(value: dict[str, Any]) -> FlyerQuota | None:
    return _parsed(FlyerQuota, value)  # type: ignore[no-any-return]


def _shape_namespace(value: dict[str, Any]) -> NamespaceView:
    metadata = value["metadata"]
    return NamespaceView(metadata["name"], metadata.get("labels") or {})


def _shape_topology(value: dict[str, Any]) -> FlyerTopology | None:
    return _parsed(FlyerTopology, value)  # type: ignore[no-any-return]


def _parsed(model: Any, value: dict[str, Any]) -> Any:
    metadata = {name: field for name, field in value["metadata"].items() if name != "managedFields"}
    try:
        return model.model_validate({**value, "metadata": metadata})
    except ValidationError as error:
        log.warning("ignoring invalid %s %s: %s", model.__name__, metadata.get("name"), error)
        return None
