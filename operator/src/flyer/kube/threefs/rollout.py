"""Rolling upgrade: which pod to restart next with the latest specification. Pure.

Storage services come first, then the standbys of mgmtd, its primary and meta. A pod that works is
restarted only while the rest of its service is ready, and a storage service only while every
replica of every chain serves. A pod that does not work loses nothing by a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from flyer.kube.threefs.names import KINDS
from flyer.kube.threefs.podspecs import NODE_FAILURE_SECONDS

if TYPE_CHECKING:
    from flyer.kube.threefs.observed import Observed, Pod

__all__ = ["Restart", "blocked_by", "next_restart", "outdated"]

SETTLE_SECONDS: Final = NODE_FAILURE_SECONDS + 5.0
"""Time for which a pod has to be ready. Until a service that was killed counts as dead, mgmtd may
report the state before its restart."""
STUCK_SECONDS: Final = 600.0
"""Time after which a pod that runs but is not ready counts as not working."""


@dataclass(frozen=True, slots=True)
class Restart:
    """A pod to evict; its StatefulSet creates it again."""

    pod: Pod
    reason: str


def outdated(observed: Observed, kind: str) -> list[Pod]:
    """Pods of an earlier specification."""
    revision = observed.revision(kind)
    return [pod for pod in observed.of(kind) if revision and pod.revision != revision]


def next_restart(observed: Observed) -> tuple[Restart | None, str]:
    """The next restart, or what the upgrade waits for; both are empty without an upgrade."""
    for kind in KINDS:
        for pod in outdated(observed, kind):
            if not pod.deleting and _does_not_work(pod, observed, kind):
                return Restart(pod, "does not work and is of an earlier specification"), ""
    for kind in KINDS:
        old = outdated(observed, kind)
        waits = _waits_for(observed, kind)
        if old and not waits:
            waits = _ending(observed)
        if old and not waits:
            return Restart(_first(old, observed, kind), "upgrade"), ""
        if waits and (old or any(outdated(observed, other) for other in KINDS)):
            return None, waits
    return None, ""


def blocked_by(observed: Observed) -> str:
    """The pod of the latest specification that does not become ready; empty: none."""
    for kind in KINDS:
        revision = observed.revision(kind)
        for pod in observed.of(kind):
            if not revision or pod.revision != revision or pod.ready or pod.deleting:
                continue
            if pod.problem:
                return f"{pod.name} does not become ready: {pod.problem}"
            if _is_stuck(pod, observed):
                return f"{pod.name} is not ready for {STUCK_SECONDS / 60:.0f} minutes; see its log"
    return ""


def _waits_for(observed: Observed, kind: str) -> str:
    """Why no pod of this service may be restarted now, nor any of a later one."""
    service, pods = observed.sets.get(kind), observed.of(kind)
    if service is None or not observed.revision(kind):
        return f"the StatefulSet of {kind} is being updated"
    if len(pods) < service.replicas:
        return observed.missing(kind, service.replicas)
    for pod in pods:
        if not pod.ready:
            return f"{pod.name} is not ready" + (f": {pod.problem}" if pod.problem else "")
        if observed.now - (pod.ready_since or 0.0) < SETTLE_SECONDS:
            return f"{pod.name} became ready less than {SETTLE_SECONDS:.0f} s ago"
    if kind == "storage":
        return _unhealthy(observed)
    if kind == "mgmtd" and len(pods) > 1 and observed.health is None:
        return "mgmtd does not report its primary"
    return ""


def _unhealthy(observed: Observed) -> str:
    health = observed.health
    if observed.ending_claims & {pod.ordinal for pod in observed.of("storage")}:
        return "a claim of a storage service is being deleted"
    if health is None:
        return "mgmtd does not respond"
    if not health.healthy:
        return (
            f"chains: {health.degraded} degraded, {health.unavailable} unavailable, "
            f"{health.whole} whole"
        )
    return ""


def _ending(observed: Observed) -> str:
    for kind in KINDS:
        for pod in observed.of(kind):
            if pod.deleting:
                return f"{pod.name} is being deleted"
    return ""


def _does_not_work(pod: Pod, observed: Observed, kind: str) -> bool:
    if pod.ready:
        return False
    if not pod.running:
        return True
    others = [other for other in observed.of(kind) if other is not pod]
    return _is_stuck(pod, observed) and all(other.ready for other in others)


def _is_stuck(pod: Pod, observed: Observed) -> bool:
    """Not its age decides: a pod that has worked for days may be unready for a moment."""
    return observed.now - max(pod.started_at, pod.unready_since) >= STUCK_SECONDS


def _first(old: list[Pod], observed: Observed, kind: str) -> Pod:
    primaries = observed.health.primaries if observed.health is not None else frozenset()

    def leads(pod: Pod) -> bool:
        return kind == "mgmtd" and any(address.startswith(f"{pod.name}.") for address in primaries)

    return min(old, key=lambda pod: (leads(pod), -pod.ordinal))
