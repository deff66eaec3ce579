"""State of the cluster from its objects, for `nodes` and `quotas`, and the answer of `why`.

`why` runs no engine: the leading scheduler has written its decision into the status of the job.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from flyer import engine
from flyer.api import (
    TOPOLOGY_NAME,
    FlyerJob,
    FlyerJobStatus,
    FlyerQuota,
    FlyerTopology,
    NodeHealth,
    parse_timestamp,
)
from flyer.client.kubernetes.views import job_of
from flyer.engine import NodeState, Quota, Zones
from flyer.engine.state.removal_budget import apply_removal_budget
from flyer.kube.apiserver.errors import ApiError, NotFoundError
from flyer.kube.apiserver.resources import (
    FLYERJOBS,
    FLYERQUOTAS,
    FLYERTOPOLOGIES,
    LEASES,
    NAMESPACES,
    NODEHEALTHS,
    NODES,
)
from flyer.kube.cache.node_view import shape_node
from flyer.presenter import why_of
from flyer.views import WhyReason, WhyView

if TYPE_CHECKING:
    from flyer.engine import EngineState
    from flyer.kube.apiserver import Api
    from flyer.kube.apiserver.resources import Resource

__all__ = ["NO_LEADER", "Objects", "explain_job", "leaderless", "observe"]

NO_LEADER = "NoLeader"
LEASE_NAME = "flyer-operator"
OPERATOR_NAMESPACE = "fireflyer-system"
# A job is looked at within a second; a leader that dies is followed within half a minute.
UNHANDLED_SECONDS = 30.0
_ASK = "an administrator sees more with `kubectl -n fireflyer-system get pods,leases`"


@dataclass(frozen=True, slots=True)
class Objects:
    """All FlyerJobs, the nodes that get gangs (with the cause if one is lost), the quotas."""

    jobs: list[FlyerJob]
    nodes: list[NodeState]
    quotas: list[Quota]
    zones: Zones = field(default_factory=Zones)
    teams: dict[str, str] = field(default_factory=dict)  # by namespace

    def state(self, now: float) -> EngineState:
        """The state of a scheduler that starts now."""
        live = [job for job in self.jobs if not _forgotten(job)]
        epoch = max((job.status.epoch for job in live if job.status), default=0)
        nodes = [node.node for node in self.nodes]
        rebuilt = engine.rebuild(
            nodes, live, now, epoch, quotas=self.quotas, zones=self.zones, teams=self.teams
        )
        states = apply_removal_budget(
            {item.node.name: item for item in self.nodes}, rebuilt.zones, now
        )
        return replace(rebuilt, nodes=states)


def _forgotten(job: FlyerJob) -> bool:
    status = job.status or FlyerJobStatus()
    return status.phase.ended and not status.occupied


async def observe(api: Api) -> Objects:
    """Read all objects. Raises ForbiddenError without the permission."""
    jobs, nodes, healths, quotas, topologies = await asyncio.gather(
        api.list(FLYERJOBS),
        api.list(NODES),
        _optional(api, NODEHEALTHS),
        _optional(api, FLYERQUOTAS),
        _optional(api, FLYERTOPOLOGIES),
    )
    topology = next((parsed for item in topologies for parsed in _topology(item)), None)
    health_of = {health.metadata.name: health for value in healths for health in _health(value)}
    return Objects(
        [job for entry in jobs if (job := job_of(entry)) is not None],
        [
            _with_health(NodeState(view.node, view.lost), health_of.get(view.node.name))
            for view in map(shape_node, nodes)
            if view.managed
        ],
        [quota for element in quotas for quota in _quota(element)],
        Zones.of(topology) if topology is not None else Zones(),
        await _teams(api, topology.spec.team_label if topology is not None else ""),
    )


async def _teams(api: Api, label: str) -> dict[str, str]:
    """The team of each namespace that has one, as far as the caller may see namespaces."""
    if not label:
        return {}
    try:
        namespaces = await api.list(NAMESPACES)
    except ApiError:
        return {}
    labels = {item["metadata"]["name"]: item["metadata"].get("labels") or {} for item in namespaces}
    return {name: team for name, labels_of in labels.items() if (team := labels_of.get(label, ""))}


async def _optional(api: Api, resource: Resource) -> list[dict[str, Any]]:
    try:
        return await api.list(resource)
    except NotFoundError:  # the kind is not installed
        return []


def _health(value: dict[str, Any]) -> list[NodeHealth]:
    try:
        return [NodeHealth.model_validate(value)]
    except ValidationError:
        return []


def _topology(value: dict[str, Any]) -> list[FlyerTopology]:
    try:
        topology = FlyerTopology.model_validate(value)
    except ValidationError:
        return []
    return [topology] if topology.metadata.name == TOPOLOGY_NAME else []


def _quota(value: dict[str, Any]) -> list[Quota]:
    try:
        return [Quota.of(FlyerQuota.model_validate(value))]
    except ValidationError:
        return []


def _with_health(state: NodeState, health: NodeHealth | None) -> NodeState:
    unfit = health.unfit if health is not None else ""
    if health is not None and health.unproven:
        return replace(state, node=replace(state.node, unproven=unfit))
    if not unfit or not state.node.ready:
        return state
    return replace(state, node=replace(state.node, ready=False, reason=unfit))


async def leaderless(api: Api, job: FlyerJob, now: float) -> str:
    """Why no operator seems to handle this job; empty if one does.

    From the Lease, if the caller may read it; otherwise from an unhandled status.
    """
    status, spec_at = job.status or FlyerJobStatus(), job.metadata.creation_timestamp
    handled = status.epoch > 0 and status.observed_generation == job.metadata.generation
    if status.phase.ended and handled:
        return ""
    try:
        lease = await api.get(LEASES, LEASE_NAME, OPERATOR_NAMESPACE)
    except ApiError:
        if status.epoch == 0 and spec_at is not None and now - spec_at > UNHANDLED_SECONDS:
            return f"no operator has handled it in {now - spec_at:.0f} s: {_ASK}"
        return ""
    spec = lease.get("spec") or {}
    renewed_at = parse_timestamp(spec["renewTime"]) if spec.get("renewTime") else 0.0
    limit_seconds = 3 * (spec.get("leaseDurationSeconds") or 15)
    if spec.get("holderIdentity") and now - renewed_at < limit_seconds:
        return ""
    since = f"since {now - renewed_at:.0f} s" if renewed_at else "since it was installed"
    return f"no operator leads {since}, so nothing is scheduled or suspended: {_ASK}"


def explain_job(job: FlyerJob, leaderless: str = "") -> WhyView:
    """The decision of the scheduler that leads, which is in the job's status.

    `leaderless`: why no scheduler acts on it.
    """
    view = why_of(job)
    if not leaderless:
        return view
    first = WhyReason(NO_LEADER, leaderless, "", "", "", None, None)
    return replace(view, verdict="cannot", summary=leaderless, reasons=[first, *view.reasons])
