"""Views of jobs, nodes, queues and events: plain values, and their JSON.

These are the published shapes of `flyer … -o json` (docs/reference/cli.md). Field names are
snake_case in Python and camelCase in JSON; an unknown field from a newer driver is ignored.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

__all__ = [
    "FINISHED_STATES",
    "AttemptView",
    "CheckpointView",
    "EventView",
    "FailureView",
    "JobView",
    "NodeView",
    "PlacedNode",
    "ProgressView",
    "QueueView",
    "QuotaView",
    "WhyReason",
    "WhyView",
    "from_json",
    "to_json",
]

Json = dict[str, Any]
FINISHED_STATES = ("Succeeded", "Failed")
View = TypeVar("View")


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """One node of a gang, in rank order."""

    name: str
    zone: str
    first_rank: int


@dataclass(frozen=True, slots=True)
class ProgressView:
    """The last progress that the job reported."""

    step: int
    time: float
    total_steps: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    exposed_percent: int | None = None
    """Of the step's time: waits for communication."""

    @property
    def fraction(self) -> float | None:
        """Finished share of the work, if the job reports the total."""
        return self.step / self.total_steps if self.total_steps else None


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """The newest durable checkpoint."""

    step: int
    time: float | None
    path: str
    durable: bool


@dataclass(frozen=True, slots=True)
class FailureView:
    """The rank that failed a job, and its traceback."""

    rank: int | None
    node: str
    exit_status: int | None
    signal: int | None
    traceback: str


@dataclass(frozen=True, slots=True)
class AttemptView:
    """One attempt of a job: where it ran, what it resumed from, how it ended."""

    attempt: int
    started_at: float
    ended_at: float | None
    nodes: list[PlacedNode]
    restored_step: int | None
    same_zone_layout: bool | None
    outcome: str
    lost_steps: int | None = None


@dataclass(frozen=True, slots=True)
class JobView:
    """One job as `flyer ps` and `flyer show` print it."""

    name: str
    namespace: str
    state: str
    reason: str
    message: str
    nodes: int
    ranks_per_node: int
    priority: str
    queue: str
    node_class: str
    zone: str
    created_at: float
    history_id: str
    attempt: int
    restarts: int
    suspend_code: int
    suspended: bool
    zones: list[str]
    placement: list[PlacedNode]
    cross_zone_pair: list[str]
    progress: ProgressView | None
    checkpoint: CheckpointView | None
    eta: str
    finished_at: float | None
    exit_status: int | None
    failure: FailureView | None
    attempts: list[AttemptView]
    conditions: list[dict[str, Any]]
    log_folder: str

    @property
    def key(self) -> str:
        """`namespace/name`, unique in a cluster."""
        return f"{self.namespace}/{self.name}"

    @property
    def finished(self) -> bool:
        """Whether the job has ended for good."""
        return self.state in FINISHED_STATES


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node with its job, ranks and processes."""

    name: str
    zone: str
    leaf: str
    node_class: str
    slots: int
    state: str
    reason: str
    job: str
    attempt: int | None
    first_rank: int | None
    last_rank: int | None
    supervisor_pid: int | None
    pids: list[int]
    returns_at: float | None


@dataclass(frozen=True, slots=True)
class QueueView:
    """One queue with its running and waiting jobs."""

    name: str
    running_jobs: int
    waiting_jobs: int
    running_nodes: int
    waiting_nodes: int
    jobs: list[str]


@dataclass(frozen=True, slots=True)
class QuotaView:
    """Usage of one quota by one subject. `subject` is "*" for a total or without usage."""

    name: str
    kind: str  # user, namespace, team or queue
    subject: str
    scope: str  # Each or Total
    priority: str
    node_class: str
    used: int
    nodes: int
    expires_at: float | None
    jobs: list[str]


@dataclass(frozen=True, slots=True)
class EventView:
    """An event with a stable reason; `sequence` grows by one with each event."""

    sequence: int
    time: float
    type: str
    reason: str
    message: str
    job: str = ""
    attempt: int | None = None
    node: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WhyReason:
    """One reason why a job does not start: numbers, holder, start and expected end."""

    reason: str
    message: str
    job: str
    owner: str
    node: str
    since: float | None
    until: float | None


@dataclass(frozen=True, slots=True)
class WhyView:
    """The answer of `flyer why`: a verdict (can, cannot, never, suspended, ended), every reason."""

    job: str
    phase: str
    verdict: str
    summary: str
    position: int | None
    reasons: list[WhyReason]
    preempted_by: str
    preempted_at: float | None
    unblock: list[str]
    eta: float | None
    more: int = 0  # reasons that are not listed
    # When the scheduler wrote the answer. None: computed for this request, or no scheduler has
    # processed the job yet.
    decided_at: float | None = None


def camel(name: str) -> str:
    """`first_rank` → `firstRank`."""
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def to_json(value: Any) -> Any:
    """The JSON form of a view, of a list of views, or of plain JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            camel(item.name): to_json(getattr(value, item.name))
            for item in dataclasses.fields(value)
        }
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    # json writes a string enumeration as its value, YAML writers refuse it.
    return value.value if isinstance(value, enum.Enum) else value


def from_json(kind: type[View], document: Json) -> View:
    """Rebuild a view from its JSON form."""
    arguments = {
        name: _converted(hint, document[camel(name)])
        for name, hint in _hints(_any(kind)).items()
        if camel(name) in document
    }
    return kind(**arguments)


def _any(value: Any) -> Any:
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _converted(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        (inner,) = (item for item in typing.get_args(hint) if item is not type(None))
        return _converted(inner, value)
    if origin is list:
        (inner,) = typing.get_args(hint)
        return [_converted(inner, item) for item in value]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_json(hint, value)
    return value
