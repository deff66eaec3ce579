"""Observed state of a ThreeFSCluster: pods, StatefulSets, claims, Jobs. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from flyer.api.timestamps import parse_timestamp
from flyer.kube.threefs.names import NODES_ANNOTATION, component

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from flyer.kube.threefs.health import Health

__all__ = [
    "DrainJob",
    "Observed",
    "PendingClaim",
    "Pod",
    "ServiceSet",
    "drain_job_of",
    "pods_of",
    "set_of",
]

Object = dict[str, Any]

# Reasons for which a container waits that end without a change of the pod or of the cluster.
_NORMAL_WAITS: Final = ("ContainerCreating", "PodInitializing")
_MESSAGE_CHARS_MAX: Final = 400


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of a service."""

    name: str
    uid: str
    ordinal: int
    revision: str = ""
    image: str = ""
    address: str = ""
    ready_since: float | None = None
    """None: not ready."""
    unready_since: float = 0.0
    """When it was first observed not to be ready; 0: it is ready."""
    started_at: float = 0.0
    """Time of its creation."""
    running: bool = True
    """Whether its service's process runs."""
    deleting: bool = False
    problem: str = ""
    """Why a container does not run, as the kubelet or the scheduler reports it."""

    @property
    def ready(self) -> bool:
        """Whether it is ready and stays."""
        return self.ready_since is not None and not self.deleting


@dataclass(frozen=True, slots=True)
class ServiceSet:
    """A StatefulSet."""

    replicas: int
    revision: str = ""
    """Revision of the pods that its controller creates now."""
    settled: bool = True
    """Whether its controller has seen the latest specification."""
    problem: str = ""
    """Why it has fewer pods than it should have, if an event reports it."""


@dataclass(frozen=True, slots=True)
class DrainJob:
    """The Job that drains storage services, or keeps them."""

    name: str
    nodes: frozenset[int]
    stopping: bool = False
    """Whether it is to be suspended."""
    stopped: bool = False
    """Whether its controller has suspended it and none of its pods runs."""
    succeeded: bool = False
    failed_at: float | None = None
    message: str = ""

    @property
    def ended(self) -> bool:
        """Whether it has succeeded or failed."""
        return self.succeeded or self.failed_at is not None


@dataclass(frozen=True, slots=True)
class PendingClaim:
    """A claim that a pod of the cluster waits for."""

    name: str
    uid: str
    storage_class: str | None
    """None: the default one."""
    class_missing: bool = False
    """Whether its StorageClass does not exist, so that nothing will ever bind it."""
    why: str = ""
    """Message of its newest event that reports a problem."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One cluster at one moment; times in seconds since the epoch."""

    now: float
    pods: dict[str, tuple[Pod, ...]] = field(default_factory=dict)
    """By service, in the order of ordinals."""
    sets: dict[str, ServiceSet] = field(default_factory=dict)
    health: Health | None = None
    """None: mgmtd does not respond."""
    drain: DrainJob | None = None
    keep: DrainJob | None = None
    """The Job that cancels a drain."""
    ending_claims: frozenset[int] = frozenset()
    """Ordinals of the storage services with a claim that is being deleted."""
    lost_claims: dict[int, str] = field(default_factory=dict)
    """Ordinals of those with a claim that has lost its volume, and the name of the claim."""
    claims: frozenset[int] = frozenset()
    """Ordinals of those that have a claim which is not being deleted."""
    pending_claims: tuple[PendingClaim, ...] = ()
    """Claims of pods of all services that are not bound, in the order of their names."""

    def of(self, kind: str) -> tuple[Pod, ...]:
        """The pods of a service."""
        return self.pods.get(kind, ())

    def revision(self, kind: str) -> str:
        """The revision that pods of a service should have; empty: its controller will set it."""
        service = self.sets.get(kind)
        return service.revision if service is not None and service.settled else ""

    def missing(self, kind: str, desired: int) -> str:
        """How many pods of a service exist and why no more; empty: the desired number."""
        count, service = len(self.of(kind)), self.sets.get(kind)
        if count == desired:
            return ""
        why = f": {service.problem}" if service is not None and service.problem else ""
        return f"{component(kind)}: {count} of {desired} pods exist{why}"

    def after_writing(self, kinds: Collection[str]) -> Observed:
        """The same, when the StatefulSets of these services were written after it was observed."""
        sets = {
            kind: replace(service, settled=service.settled and kind not in kinds)
            for kind, service in self.sets.items()
        }
        return replace(self, sets=sets)


def pods_of(values: Iterable[Object], kind: str, stateful_set: Object | None) -> tuple[Pod, ...]:
    """The pods of a service's StatefulSet. Others may have their labels."""
    if stateful_set is None:
        return ()
    uid = stateful_set["metadata"]["uid"]
    pods = [
        _pod(value, kind)
        for value in values
        if any(
            owner.get("controller") and owner["uid"] == uid
            for owner in value["metadata"].get("ownerReferences") or ()
        )
        and _ordinal(value["metadata"]["name"]) is not None
    ]
    return tuple(sorted(pods, key=lambda pod: pod.ordinal))


def set_of(value: Object) -> ServiceSet:
    """A StatefulSet of the API."""
    status = value.get("status") or {}
    return ServiceSet(
        replicas=value["spec"].get("replicas", 1),
        revision=status.get("updateRevision", ""),
        settled=status.get("observedGeneration", 0) >= value["metadata"].get("generation", 0),
    )


def drain_job_of(value: Object, cluster_pods: Iterable[Object]) -> DrainJob:
    """A drain Job, with the message of its pods."""
    meta = value["metadata"]
    conditions = {
        condition["type"]: condition
        for condition in (value.get("status") or {}).get("conditions") or ()
        if condition.get("status") == "True"
    }
    failed = conditions.get("Failed")
    nodes = (meta.get("annotations") or {}).get(NODES_ANNOTATION, "")
    pods = [
        pod for pod in cluster_pods
        if meta["uid"] in _owners(pod)
    ]  # fmt: skip
    ended = all(pod.get("status", {}).get("phase") in ("Succeeded", "Failed") for pod in pods)
    return DrainJob(
        name=meta["name"],
        nodes=frozenset(int(node) for node in nodes.split(",") if node.isdecimal()),
        stopping=bool(value["spec"].get("suspend")),
        stopped="Suspended" in conditions and ended,
        succeeded="Complete" in conditions,
        failed_at=None if failed is None else _time(failed.get("lastTransitionTime")),
        message=_last_message(pods),
    )


def ordinal_of_claim(name: str) -> int | None:
    """The ordinal of the storage service that has this claim of a disk."""
    match = re.fullmatch(rf"(?:data|disk-[0-9]+)-{component('storage')}-([0-9]+)", name)
    return None if match is None else _ordinal(name)


def _last_message(pods: Iterable[Object]) -> str:
    """The last message of the containers of a Job's pods."""
    ended = [
        (status.get("state") or {}).get("terminated") or {}
        for pod in pods
        for status in (pod.get("status") or {}).get("containerStatuses") or ()
    ]
    messages = [(str(end.get("finishedAt")), str(end.get("message") or "")) for end in ended]
    return max(messages)[1].strip()[-_MESSAGE_CHARS_MAX:] if messages else ""


def _pod(value: Object, kind: str) -> Pod:
    meta, status = value["metadata"], value.get("status") or {}
    conditions = _by("type", status.get("conditions"))
    ready = conditions.get("Ready") or {}
    statuses = _by("name", status.get("containerStatuses"))
    ordinal = _ordinal(meta["name"])
    assert ordinal is not None, meta["name"]
    containers = _by("name", value["spec"]["containers"])
    changed_at = _time(ready.get("lastTransitionTime"))
    is_ready = ready.get("status") == "True"
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        ordinal=ordinal,
        revision=(meta.get("labels") or {}).get("controller-revision-hash", ""),
        image=containers.get(kind, {}).get("image", ""),
        address=status.get("podIP", ""),
        ready_since=changed_at if is_ready else None,
        unready_since=0.0 if is_ready else changed_at,
        started_at=_time(meta.get("creationTimestamp")),
        running="running" in ((statuses.get(kind) or {}).get("state") or {}),
        deleting="deletionTimestamp" in meta,
        problem=_problem(statuses.values(), conditions),
    )


def _problem(statuses: Iterable[Object], conditions: dict[str, Object]) -> str:
    scheduled = conditions.get("PodScheduled") or {}
    if scheduled.get("status") == "False":
        return _text(scheduled.get("reason", "Unschedulable"), scheduled.get("message", ""))
    for status in statuses:
        waiting = (status.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason", "") not in _NORMAL_WAITS:
            ended = (status.get("lastState") or {}).get("terminated") or {}
            words = waiting.get("message", "") or ended.get("message", "")
            return _text(waiting.get("reason", "Waiting"), words)
    return ""


def _text(reason: str, message: str) -> str:
    return f"{reason}: {message}"[:_MESSAGE_CHARS_MAX] if message else reason


def _owners(value: Object) -> list[str]:
    return [owner["uid"] for owner in value["metadata"].get("ownerReferences") or ()]


def _by(key: str, values: Iterable[Object] | None) -> dict[str, Object]:
    return {value[key]: value for value in values or ()}


def _ordinal(name: str) -> int | None:
    last = name.rpartition("-")[2]
    return int(last) if last.isdecimal() and len(last) <= 5 else None


def _time(value: object) -> float:
    try:
        return parse_timestamp(value)
    except ValueError:
        return 0.0
