"""Status of a ThreeFSCluster from what is observed and planned. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flyer.api import (
    ChainCount,
    ClusterPhase,
    ServiceCount,
    StorageNode,
    StorageState,
    ThreeFSClusterStatus,
)
from flyer.api.conditions import Condition
from flyer.kube.threefs.claims import missing_classes, unbound
from flyer.kube.threefs.names import KINDS, node_id, replicas_of
from flyer.kube.threefs.rollout import blocked_by

if TYPE_CHECKING:
    from flyer.api import ThreeFSCluster
    from flyer.kube.threefs.health import NodeState
    from flyer.kube.threefs.observed import Observed, Pod
    from flyer.kube.threefs.plan import Plan

__all__ = ["refused_status", "rejected_status", "status_of"]

_NAMES_MAX: Final = 5
_DIGEST_CHARS: Final = 19  # sha256: and 12 digits
_MESSAGE_CHARS_MAX: Final = 1024
Verdict = tuple[str, bool, str, str]


def refused_status(
    generation: int | None,
    before: ThreeFSClusterStatus,
    reason: str,
    message: str,
    now: float,
) -> ThreeFSClusterStatus:
    """The status of a cluster that the operator does not run."""
    verdicts = [("Accepted", False, reason, message)]
    return before.replace(
        phase=ClusterPhase.BLOCKED,
        conditions=_conditions(verdicts, before, generation, now),
        observed_generation=generation,
    )


def status_of(cluster: ThreeFSCluster, observed: Observed, step: Plan) -> ThreeFSClusterStatus:
    """The status of a cluster that the operator runs."""
    before = cluster.status or ThreeFSClusterStatus()
    available, degraded = _available(observed), _degraded(observed)
    change = _change_before(before)
    progressing = _progressing(cluster, observed, step, before)
    if change and progressing[2] == "Complete":
        progressing = _unfinished(change, available, degraded) or progressing
    verdicts = [
        ("Accepted", True, "Accepted", "the operator runs this cluster"),
        available,
        progressing,
        degraded,
        _upgrade_blocked(observed, step, progressing),
    ]
    return _facts(before, observed, sum(step.replicas.values())).replace(
        phase=_phase(verdicts, step, before),
        conditions=_conditions(verdicts, before, cluster.metadata.generation, observed.now),
        observed_generation=cluster.metadata.generation,
    )


def rejected_status(
    cluster: ThreeFSCluster, observed: Observed, message: str
) -> ThreeFSClusterStatus:
    """The status of a cluster whose services run while its new specification is rejected."""
    before = cluster.status or ThreeFSClusterStatus()
    verdicts = [
        ("Accepted", False, "Rejected", message), _available(observed), _degraded(observed),
    ]  # fmt: skip
    desired = sum(service.replicas for service in observed.sets.values())
    # No pod is of the rejected specification.
    return _facts(before, observed.after_writing(KINDS), desired).replace(
        phase=ClusterPhase.BLOCKED,
        conditions=_conditions(verdicts, before, cluster.metadata.generation, observed.now),
        observed_generation=cluster.metadata.generation,
    )


def _facts(before: ThreeFSClusterStatus, observed: Observed, desired: int) -> ThreeFSClusterStatus:
    """What is observed; the previous value of what cannot be observed now."""
    counts = {kind: _count(observed, kind) for kind in KINDS}
    health = observed.health
    nodes = health.nodes.values() if health is not None else ()
    return before.replace(
        ready=f"{sum(count.ready for count in counts.values())}/{desired}",
        capacity=_size(sum(node.capacity_bytes for node in nodes)) if nodes else before.capacity,
        used=_size(sum(node.used_bytes for node in nodes)) if nodes else before.used,
        version=_version(observed) or before.version,
        mgmtd=counts["mgmtd"],
        meta=counts["meta"],
        storage=counts["storage"],
        chains=None
        if health is None
        else ChainCount(
            whole=health.whole, degraded=health.degraded, unavailable=health.unavailable
        ),
        storage_nodes=tuple(_node(pod, observed) for pod in observed.of("storage")[:1000]),
    )


def _count(observed: Observed, kind: str) -> ServiceCount:
    pods, revision = observed.of(kind), observed.revision(kind)
    return ServiceCount(
        replicas=len(pods),
        ready=sum(pod.ready for pod in pods),
        updated=sum(bool(revision) and pod.revision == revision for pod in pods),
    )


def _available(observed: Observed) -> Verdict:
    health = observed.health
    if health is None:
        return "Available", False, "ManagerUnreachable", "mgmtd does not respond"
    if not health.whole and not health.degraded:
        return "Available", False, "NoChains", "no chain serves yet"
    if health.unavailable:
        message = (
            f"{health.unavailable} chains have no serving replica: see `threefs status`; if their "
            "disks are lost, choose other copies with `threefs promote`"
        )
        return "Available", False, "ChainsUnavailable", message
    if not any(pod.ready for pod in observed.of("meta")):
        return "Available", False, "NoMetadataService", "no pod of meta is ready"
    return "Available", True, "Serving", f"{health.whole + health.degraded} chains serve"


def _progressing(
    cluster: ThreeFSCluster, observed: Observed, step: Plan, before: ThreeFSClusterStatus
) -> Verdict:
    if missing := missing_classes(observed.pending_claims, created=bool(before.version)):
        return "Progressing", False, "StorageClassMissing", missing
    if step.resize.note:
        reason = "DrainFailed" if step.resize.failed else "Resizing"
        return "Progressing", not step.resize.failed, reason, step.resize.note
    if step.replacing:
        return "Progressing", True, "Replacing", step.replacing
    if step.upgrading:
        return "Progressing", True, "Upgrading", step.upgrading
    counts = [observed.missing(kind, replicas_of(cluster, kind)) for kind in KINDS]
    if any(counts):
        reason = "Upgrading" if _change_before(before) == "Upgrading" else "Resizing"
        return "Progressing", True, reason, "; ".join(filter(None, counts))
    if updating := [kind for kind in KINDS if not observed.revision(kind)]:
        message = f"waiting for the StatefulSet controller: update of {', '.join(updating)}"
        return "Progressing", True, "Updating", message
    if not before.version and not _version(observed):
        message = "; ".join(["waiting for all pods to be ready", *unbound(observed.pending_claims)])
        return "Progressing", True, "Creating", message
    return "Progressing", False, "Complete", "all pods are of the latest specification"


def _change_before(before: ThreeFSClusterStatus) -> str:
    """Reason of the change that was in progress; empty: none was."""
    for condition in before.conditions:
        if condition.type == "Progressing" and condition.status == "True":
            return condition.reason
    return ""


def _unfinished(change: str, available: Verdict, degraded: Verdict) -> Verdict | None:
    """A change lasts until everything serves; a later failure is not part of it."""
    if degraded[1]:
        return "Progressing", True, change, f"waiting: {degraded[3]}"
    if not available[1]:
        return "Progressing", True, change, f"waiting: {available[3]}"
    return None


def _degraded(observed: Observed) -> Verdict:
    pods = [pod for kind in KINDS for pod in observed.of(kind) if not pod.ready]
    parts = [_describe(pod) for pod in pods[:_NAMES_MAX]]
    if len(pods) > _NAMES_MAX:
        parts.append(f"{len(pods) - _NAMES_MAX} more pods are not ready")
    parts += [
        f"the volume of claim {name} is lost: delete the claim, and the pod gets another one"
        for _, name in sorted(observed.lost_claims.items())[:_NAMES_MAX]
    ]
    parts += unbound(observed.pending_claims)
    health = observed.health
    if health is not None and (health.degraded or health.unavailable):
        parts.append(f"{health.degraded} chains degraded, {health.unavailable} unavailable")
    reason = "PodsNotReady" if pods else "ReplicasMissing" if parts else "Healthy"
    return "Degraded", bool(parts), reason, "; ".join(parts) or "all pods are ready"


def _upgrade_blocked(observed: Observed, step: Plan, progressing: Verdict) -> Verdict:
    _, continues, reason, _ = progressing
    # The last pod has no successor that waits for it.
    last = blocked_by(observed) if continues and reason == "Upgrading" else ""
    if pod := step.upgrade_blocked or last:
        message = f"{pod}: correct spec.image, or restore the previous one"
        return "UpgradeBlocked", True, "PodNotReady", message
    return "UpgradeBlocked", False, "NotBlocked", "no upgrade is blocked"


def _describe(pod: Pod) -> str:
    return f"{pod.name} is not ready" + (f": {pod.problem}" if pod.problem else "")


def _phase(verdicts: list[Verdict], step: Plan, before: ThreeFSClusterStatus) -> ClusterPhase:
    holds = {kind: status for kind, status, _, _ in verdicts}
    class_missing = any(reason == "StorageClassMissing" for _, _, reason, _ in verdicts)
    if holds["UpgradeBlocked"] or step.resize.failed or class_missing:
        return ClusterPhase.BLOCKED
    if not before.version and not holds["Available"]:
        return ClusterPhase.CREATING
    if holds["Progressing"]:
        return ClusterPhase.PROGRESSING
    if holds["Degraded"] or not holds["Available"]:
        return ClusterPhase.DEGRADED
    return ClusterPhase.READY


def _node(pod: Pod, observed: Observed) -> StorageNode:
    health = observed.health
    node = None if health is None else health.nodes.get(node_id(pod.ordinal))
    state, message = _state(pod, node, observed)
    return StorageNode(
        name=pod.name,
        state=state,
        replicas=0 if node is None else node.replicas,
        message=message[:_MESSAGE_CHARS_MAX],
    )


def _state(pod: Pod, node: NodeState | None, observed: Observed) -> tuple[StorageState, str]:
    if pod.ordinal in observed.ending_claims:
        return StorageState.REPLACING, "its claim is being deleted"
    if pod.ordinal in observed.lost_claims:
        return StorageState.FAILED, "the volume of its claim is lost"
    if not pod.ready:
        state = StorageState.FAILED if pod.problem else StorageState.STARTING
        return state, pod.problem or ("it is being deleted" if pod.deleting else "")
    if node is not None and node.draining:
        state = StorageState.DRAINING if node.replicas else StorageState.DRAINED
        return state, f"{node.replicas} replicas are left" if node.replicas else ""
    return StorageState.SERVING, ""


def _version(observed: Observed) -> str:
    """Tag or digest of the image that all pods run and serve with; empty: they differ."""
    pods = [pod for kind in KINDS for pod in observed.of(kind)]
    images = {pod.image for pod in pods}
    kinds = [kind for kind in KINDS if observed.of(kind)]
    if len(images) != 1 or len(kinds) != len(KINDS) or not all(pod.ready for pod in pods):
        return ""
    (image,) = images
    name, at, digest = image.partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    return tag or (digest[:_DIGEST_CHARS] if at else "latest")


def _conditions(
    verdicts: list[Verdict], before: ThreeFSClusterStatus, generation: int | None, now: float
) -> tuple[Condition, ...]:
    since = {condition.type: condition for condition in before.conditions}

    def time_of(kind: str, text: str) -> float:
        old = since.get(kind)
        return old.last_transition_time if old is not None and old.status == text else now

    return tuple(
        Condition(
            type=kind,
            status="True" if holds else "False",
            reason=reason,
            message=message[: 4 * _MESSAGE_CHARS_MAX],
            last_transition_time=time_of(kind, "True" if holds else "False"),
            observed_generation=generation,
        )
        for kind, holds, reason, message in verdicts
    )


def _size(count: float) -> str:
    units: Any = iter(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    unit = next(units)
    while count >= 1024 and unit != "PiB":
        count, unit = count / 1024, next(units)
    return f"{count:.0f}{unit}" if unit == "B" else f"{count:.1f}{unit}"
