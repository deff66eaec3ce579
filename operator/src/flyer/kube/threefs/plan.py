"""Planner: what to do next for a ThreeFSCluster, from what is observed. Pure.

Each step restarts or removes at most one pod. A step that is not safe now is left out, and a note
says what it waits for; the next step observes again, so nothing is remembered between steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flyer.kube.threefs.names import KINDS, node_id, replicas_of
from flyer.kube.threefs.resize import Resize, resize
from flyer.kube.threefs.rollout import Restart, blocked_by, next_restart, outdated

if TYPE_CHECKING:
    from flyer.api import ThreeFSCluster
    from flyer.kube.threefs.observed import Observed

__all__ = ["Plan", "plan", "refused"]

REPLACE_AGAIN_SECONDS = 60.0
"""A new pod may exist before the claim that is being deleted is gone."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step."""

    replicas: dict[str, int]
    """Pods that each StatefulSet should have now."""
    restart: Restart | None = None
    resize: Resize = field(default_factory=Resize)
    upgrading: str = ""
    """What the upgrade does or waits for; empty: all pods are of the latest specification."""
    upgrade_blocked: str = ""
    replacing: str = ""
    """What the replacement of a claim does or waits for; empty: none is replaced."""


def refused(step: Plan, why: str) -> Plan:
    """The step, if the restart of its pod was refused, as by a disruption budget."""
    if step.replacing:
        return replace(step, replacing=f"{step.replacing}; waiting: {why}")
    return replace(step, upgrading=f"{step.upgrading}; waiting: {why}")


def plan(cluster: ThreeFSCluster, observed: Observed) -> Plan:
    """The next step."""
    size = resize(cluster.spec.storage.replicas, observed)
    replicas = {kind: replicas_of(cluster, kind) for kind in KINDS}
    if size.replicas is not None:
        replicas["storage"] = size.replicas
    replacement, replacing = _replacement(observed)
    restart, waits = next_restart(observed)
    old = [pod for kind in KINDS for pod in outdated(observed, kind)]
    upgrading = ""
    if old:
        upgrading = f"{len(old)} pods are of an earlier specification"
        if restart is None and waits:
            upgrading += f"; waiting: {waits}"
    return Plan(
        replicas=replicas,
        restart=replacement or restart,
        resize=size,
        upgrading=upgrading,
        upgrade_blocked=blocked_by(observed) if old else "",
        replacing=replacing,
    )


def _replacement(observed: Observed) -> tuple[Restart | None, str]:
    """The pod whose claim is being deleted: without the pod, Kubernetes removes the claim."""
    health, pods = observed.health, observed.of("storage")
    for pod in pods:
        if pod.ordinal not in observed.ending_claims:
            continue
        what = f"the claim of {pod.name} is being deleted"
        node = None if health is None else health.nodes.get(node_id(pod.ordinal))
        if health is None:
            return None, f"{what}; waiting: mgmtd does not respond"
        if health.unavailable:
            return None, f"{what}; waiting: {health.unavailable} chains have no serving replica"
        if node is not None and node.sole_replicas:
            return (
                None,
                f"{what}; waiting: it has the only serving replica of {node.sole_replicas} chains",
            )
        unready = [other.name for other in pods if other is not pod and not other.ready]
        if unready:
            return None, f"{what}; waiting: {unready[0]} is not ready"
        if pod.deleting or observed.now - pod.started_at < REPLACE_AGAIN_SECONDS:
            return None, f"{what}; waiting for its new pod"
        return Restart(pod, what), what
    return None, ""
