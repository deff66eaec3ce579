"""Views of watched objects: the fields of jobs, pods, nodes and namespaces that are cached."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from flyer.api import GROUP, KIND_JOB, FlyerJob, Phase, PodTemplate, names
from flyer.api.base import Model
from flyer.api.metadata import ObjectMeta
from flyer.engine import Node
from flyer.kube.pods.names import RESOURCE_GPU, pod_place
from flyer.kube.pods.pod_problems import PodProblem, pod_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flyer.engine import Outcome

__all__ = [
    "CORDONED",
    "JobView",
    "NamespaceView",
    "NodeView",
    "PodView",
    "Strings",
    "controller_of",
    "mark_of",
    "shape_job",
    "shape_node",
    "shape_pods",
]

CORDONED: Final = "cordoned"  # reason of a cordoned node

LABEL_ZONE: Final = "fireflyer.dev/zone"
LABEL_ZONE_COMMON: Final = "topology.kubernetes.io/zone"
LABEL_LEAF: Final = "fireflyer.dev/leaf"
LABEL_NODE_CLASS: Final = "fireflyer.dev/node-class"
LABEL_DEDICATED: Final = "fireflyer.dev/dedicated"
RELEASE_FINALIZER: Final = "fireflyer.dev/release"

# Taints that do not make a node not ready, and taints of a lost node.
_OUR_TAINTS: Final = frozenset({"fireflyer.dev/dedicated"})
_LOST_TAINTS: Final = frozenset(
    {"node.kubernetes.io/unreachable", "node.kubernetes.io/out-of-service"}
)
# Resources that determine a node's rank slots, in this order; otherwise its cores do.
_SLOT_RESOURCES: Final = (RESOURCE_GPU, "nvidia.com/gpu")

_OVER: Final = (Phase.SUCCEEDED, Phase.FAILED)

# Default port of a kubelet.
KUBELET_PORT: Final = 10250
_POD_FIELDS: Final = (
    "template", "nodeClass", "zone", "ranksPerNode", "collectives", "preemption", "checkpoint",
)  # fmt: skip

Strings = dict[str, str]


@dataclass(frozen=True, slots=True)
class JobView:
    """A FlyerJob, without its pod template.

    `job` is None if the object is invalid (see `problem`) or managed by another controller (without
    a problem).
    """

    key: str
    uid: str
    version: str
    job: FlyerJob | None
    problem: str = ""
    deleting: bool = False
    finalizers: tuple[str, ...] = ()
    mark: str = ""  # digest of everything that its pods depend on except its name
    kept_nodes: frozenset[str] = frozenset()  # nodes that an unreadable job may occupy

    @property
    def forgettable(self) -> bool:
        """Whether the job has ended and occupies nothing."""
        status = self.job.status if self.job else None
        return status is not None and status.phase in _OVER and not status.occupied

    def asks_otherwise(self, before: JobView) -> bool:
        """Whether a field that the engine reads has changed, apart from the status."""
        old, new = before.job, self.job
        if old is None or new is None:
            return True
        return (
            old.metadata.generation != new.metadata.generation
            or old.metadata.annotations != new.metadata.annotations
            or old.spec != new.spec
        )


# Views omit the pod template, which is most of an object: it is read again to build pods.
_NO_TEMPLATE: Final = PodTemplate.model_validate(
    {"spec": {"containers": [{"name": "unread", "command": ["unread"]}]}}
)


# Other metadata is of unbounded size: managed fields, owner references.
_METADATA: Final = frozenset({info.alias or name for name, info in ObjectMeta.model_fields.items()})


def _kept(metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata fields of the models, without foreign annotations and labels."""
    selected = {name: entry for name, entry in metadata.items() if name in _METADATA}
    for name in ("annotations", "labels"):
        if name in selected:
            selected[name] = {
                key: entry
                for key, entry in (selected[name] or {}).items()
                if key.startswith(f"{names.GROUP}/") or key == names.QUEUE_LABEL
            }
    return selected


def shape_job(value: dict[str, Any]) -> JobView:
    """The view of a FlyerJob's JSON."""
    whole = value["metadata"]
    metadata = _kept(whole)
    job, problem = None, ""
    spec = value.get("spec") or {}
    if "template" in spec:
        spec = {**spec, "template": _NO_TEMPLATE}
    try:
        job = FlyerJob.model_validate({**value, "metadata": metadata, "spec": spec})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        problem = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    except Exception as error:  # noqa: BLE001 - one object's content must not stop the others
        problem = f"{type(error).__name__}: {error}"
    if job is not None and job.others:
        job = None
    if job is not None:
        _share_field_sets(job)
    return JobView(
        key=f"{metadata.get('namespace', '')}/{metadata.get('name', '')}",
        uid=metadata.get("uid", ""),
        version=metadata.get("resourceVersion", ""),
        job=job,
        problem=problem,
        deleting="deletionTimestamp" in metadata,
        finalizers=tuple(whole.get("finalizers") or ()),
        mark=mark_of(value),
        kept_nodes=_kept_nodes(value) if problem else frozenset(),
    )


_FIELD_SETS: Final[dict[frozenset[str], set[str]]] = {}
_FIELD_SETS_MAX: Final = 4096  # further sets are not shared: users choose which fields they give


def _share_field_sets(model: Model) -> None:
    """Share the sets of given fields, half of a model's memory, among immutable models."""
    fields_set = model.__pydantic_fields_set__
    key = frozenset(fields_set)
    if len(_FIELD_SETS) < _FIELD_SETS_MAX:
        _FIELD_SETS.setdefault(key, fields_set)
    object.__setattr__(model, "__pydantic_fields_set__", _FIELD_SETS.get(key, fields_set))
    for value in model.__dict__.values():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Model):
                _share_field_sets(part)


def _kept_nodes(job: Mapping[str, Any]) -> frozenset[str]:
    """The nodes named by a status of any shape, for example of another operator version."""
    status = job.get("status")
    node_names: set[str] = set()
    if not isinstance(status, dict):
        return frozenset()
    assignment = status.get("assignment")
    listed = [status.get("occupied")]
    if isinstance(assignment, dict) and status.get("phase") not in ("Succeeded", "Failed"):
        listed.append(assignment.get("nodes"))
    for nodes in listed:
        for node in nodes if isinstance(nodes, list) else ():
            name = node.get("name") if isinstance(node, dict) else None
            if isinstance(name, str):
                node_names.add(name)
    return frozenset(node_names)


def mark_of(job: Mapping[str, Any]) -> str:
    """A digest of the fields that a job's pods and their eligible nodes depend on."""
    spec = job.get("spec") or {}
    parts = [job["metadata"].get("namespace"), *(spec.get(name) for name in _POD_FIELDS)]
    try:
        text = json.dumps(parts, sort_keys=True)
    except (ValueError, RecursionError):
        text = repr(job["metadata"].get("uid"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def controller_of(metadata: Mapping[str, Any]) -> Strings | None:
    """The controller reference of an object, if it names a FlyerJob."""
    for owner_reference in metadata.get("ownerReferences") or ():
        group = str(owner_reference.get("apiVersion", "")).rpartition("/")[0]
        is_flyerjob = (
            owner_reference.get("controller") is True
            and owner_reference.get("kind") == KIND_JOB
            and group == GROUP
        )
        if is_flyerjob and owner_reference.get("name") and owner_reference.get("uid"):
            return {"name": str(owner_reference["name"]), "uid": str(owner_reference["uid"])}
    return None


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod whose controller is a FlyerJob. Its labels are not trusted: any user can write them."""

    namespace: str
    name: str
    uid: str
    owner: str  # uid of the FlyerJob
    job: str  # its key
    attempt: int  # 0: the operator did not create a pod of this name
    rank: int
    node: str  # empty: not bound
    phase: str
    ip: str
    deleting: bool
    outcome: Outcome | None  # in a terminal phase
    problem: PodProblem | None = None  # why the kubelet does not start it

    @property
    def ended(self) -> bool:
        """Whether all its processes have ended."""
        return self.outcome is not None


def shape_pods(
    outcome_of: Callable[[Mapping[str, Any] | None], Outcome],
) -> Callable[[dict[str, Any]], PodView | None]:
    """A function that returns the view of a pod's JSON; `outcome_of` reads a terminal phase.

    It returns None for a pod whose controller is not a FlyerJob, whatever its labels are.
    """

    def shape(value: dict[str, Any]) -> PodView | None:
        metadata, status = value["metadata"], value.get("status") or {}
        owner = controller_of(metadata)
        if owner is None:
            return None
        attempt, rank = pod_place(owner["name"], metadata["name"]) or (0, 0)
        phase = status.get("phase", "Pending")
        return PodView(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            owner=owner["uid"],
            job=f"{metadata['namespace']}/{owner['name']}",
            attempt=attempt,
            rank=rank,
            node=value["spec"].get("nodeName") or "",
            phase=phase,
            ip=status.get("podIP") or "",
            deleting="deletionTimestamp" in metadata,
            outcome=outcome_of(value) if phase in ("Succeeded", "Failed") else None,
            problem=pod_problem(value),
        )

    return shape


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node: its engine state, the properties its pods depend on, and whether it is lost."""

    node: Node
    ours: bool  # managed by Fire-Flyer
    dedicated: bool
    lost: str  # the cause; empty: not lost
    allocatable: Strings = field(default_factory=dict)
    labels: Strings = field(default_factory=dict)
    address: str = ""  # empty: unknown
    port: int = KUBELET_PORT


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """A namespace, with a label that may name its jobs' team."""

    name: str
    labels: Strings


def shape_node(value: dict[str, Any]) -> NodeView:
    """The view of a Node's JSON."""
    metadata, spec, status = value["metadata"], value.get("spec") or {}, value.get("status") or {}
    labels = metadata.get("labels") or {}
    taints = spec.get("taints") or []
    allocatable = {
        str(key): str(amount) for key, amount in (status.get("allocatable") or {}).items()
    }
    conditions = status.get("conditions") or ()
    ready: Strings = next(
        (condition for condition in conditions if condition["type"] == "Ready"), {}
    )
    loss = _lost(ready, taints)
    reason = loss or _unready(ready, spec, taints)
    capacity = status.get("capacity") or {}
    # Without devices (capacity 0) a node's cores count. A node whose devices are all unhealthy
    # (allocatable 0, capacity above) has no slots.
    slots = next(
        (
            _number(allocatable[name])
            for name in _SLOT_RESOURCES
            if name in allocatable
            and (_number(allocatable[name]) or _number(str(capacity.get(name, "0"))))
        ),
        _cores(allocatable.get("cpu", "1")),
    )
    if not slots:
        reason = reason or "no allocatable device"
    dedicated = labels.get(LABEL_DEDICATED) == "true"
    return NodeView(
        node=Node(
            name=metadata["name"],
            zone=labels.get(LABEL_ZONE) or labels.get(LABEL_ZONE_COMMON) or "default",
            leaf=labels.get(LABEL_LEAF, ""),
            node_class=labels.get(LABEL_NODE_CLASS) or "default",
            slots=slots,
            ready=not reason,
            reason=reason,
        ),
        ours=dedicated or LABEL_NODE_CLASS in labels,
        dedicated=dedicated,
        lost=loss,
        allocatable=allocatable,
        labels=labels,
        address=_address(status),
        port=_port(status),
    )


def _address(status: dict[str, Any]) -> str:
    addresses = status.get("addresses") or ()
    return next(
        (address["address"] for address in addresses if address.get("type") == "InternalIP"), ""
    )


def _port(status: dict[str, Any]) -> int:
    kubelet = (status.get("daemonEndpoints") or {}).get("kubeletEndpoint") or {}
    return int(kubelet.get("Port") or KUBELET_PORT)


def _lost(ready: Strings, taints: list[dict[str, Any]]) -> str:
    """The control plane sets Ready to Unknown when a kubelet is silent."""
    if ready.get("status") == "Unknown":
        return ready.get("reason") or "NodeStatusUnknown"
    lost_taints = [taint["key"] for taint in taints if taint.get("key") in _LOST_TAINTS]
    return lost_taints[0] if lost_taints else ""


def _unready(ready: Strings, spec: dict[str, Any], taints: list[dict[str, Any]]) -> str:
    if ready.get("status") != "True":
        return f"not ready: {ready.get('reason', 'no Ready condition')}"
    if spec.get("unschedulable"):
        return CORDONED
    for taint in taints:
        if taint.get("key") not in _OUR_TAINTS and taint.get("effect") in (
            "NoSchedule",
            "NoExecute",
        ):
            return f"tainted {taint.get('key')}"
    return ""


def _cores(text: str) -> int:
    """Whole cores of a quantity such as 64 or 63500m."""
    return int(text[:-1]) // 1000 if text.endswith("m") else _number(text)


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0
