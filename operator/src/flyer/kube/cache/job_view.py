"""The view of a FlyerJob: the object without its pod template."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from flyer.api import FlyerJob, PodTemplate, names
from flyer.api.base import Model
from flyer.api.metadata import ObjectMeta

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RELEASE_FINALIZER", "JobView", "mark_of", "shape_job"]

RELEASE_FINALIZER: Final = "fireflyer.dev/release"

_POD_FIELDS: Final = (
    "template", "nodeClass", "zone", "ranksPerNode", "collectives", "preemption", "checkpoint",
)  # fmt: skip


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
    mark: str = ""  # digest of the fields, except the name, that its pods depend on
    kept_nodes: frozenset[str] = frozenset()  # nodes that an unreadable job may occupy

    @property
    def forgettable(self) -> bool:
        """Whether the job has ended and occupies nothing."""
        status = self.job.status if self.job else None
        return status is not None and status.phase.ended and not status.occupied

    def changed_since(self, before: JobView) -> bool:
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
