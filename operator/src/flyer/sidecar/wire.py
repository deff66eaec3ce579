"""The protocol between sidecar and gateway, version 2: JSON objects, one per line, over TLS.

Both sides send *states*, not events: a sidecar's report has everything that its pod reported so
far, a gateway's order everything that is requested of it. The newest one suffices after messages
were lost, repeated or reordered; after a reconnect both sides send it again.

    sidecar                         gateway
    hello {token}            →
                             ←      welcome, or refusal
    report {revision, …}     →
                             ←      acknowledgement {revision}
                             ←      order {start, suspend, terminate, kill}
    beat                     ⇄      beat

Pure: text in, values out; no socket, no clock. `docs/internals/gateway.md` describes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

from flyer.job.fields import (
    Fields,
    Flag,
    Integer,
    Message,
    Metrics,
    OptionalInteger,
    OptionalText,
    OptionalWords,
    Positive,
    ProtocolError,
    Text,
    Words,
    parse_object,
    part,
)
from flyer.job.limits import PATH_CHARS_MAX

__all__ = [
    "KEY_VERSION",
    "OLDEST_VERSION",
    "ORDER_BYTES_MAX",
    "REPORT_BYTES_MAX",
    "VERSION",
    "Acknowledgement",
    "Beat",
    "End",
    "GivenUp",
    "Hello",
    "LauncherState",
    "Order",
    "Refusal",
    "Report",
    "Saved",
    "StartOrder",
    "Suspend",
    "Welcome",
    "encode",
    "parse_from_gateway",
    "parse_from_sidecar",
]

_T = TypeVar("_T")

VERSION = 2
KEY_VERSION = 2
"""First version whose start order has the key of the job's collectives."""
OLDEST_VERSION = 1
"""Sidecars live as long as their pods, so a gateway also supports the version before its own. The
sidecar sends its newest version, the gateway answers with the newest one that both support."""
REPORT_BYTES_MAX = 64 * 1024  # of a line from a sidecar
ORDER_BYTES_MAX = 16 * 1024 * 1024  # of a line from the gateway: the largest gangs' topology


class LauncherState(StrEnum):
    """Progress of the pod's launcher; never decreases."""

    ABSENT = "absent"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


def _launcher_state(fields: Fields, name: str) -> LauncherState:
    state = fields.text(name, LauncherState.ABSENT)
    if state not in list(LauncherState):
        raise ProtocolError("bad_field", f"report: invalid `{name}` {state!r:.80}")
    return LauncherState(state)


def _topology(fields: Fields, name: str) -> dict[str, Any]:
    topology = fields.raw(name)
    return topology if isinstance(topology, dict) else {}


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """The first line. The projected token identifies and authenticates the pod."""

    kind: ClassVar[str] = "hello"
    token: Text = field(repr=False)
    version: Integer = VERSION


@dataclass(frozen=True, slots=True)
class Saved(Message):
    """A checkpoint that the job reported."""

    step: Integer
    path: Annotated[str, partial(Fields.text, characters_max=PATH_CHARS_MAX)]


@dataclass(frozen=True, slots=True)
class GivenUp(Message):
    """A rank failed the job without a restart."""

    rank: Integer
    reason: Words


@dataclass(frozen=True, slots=True)
class End(Message):
    """The end of the launcher: its exit status, and the first rank that failed."""

    code: Annotated[int, partial(Fields.integer, low=-128, high=255)]
    """Exit status, or the negative number of a signal."""
    rank: OptionalInteger = None
    time: Annotated[float, partial(Fields.number, default=0.0)] = 0.0
    peer_lost: Flag = False
    rank_status: OptionalInteger = None
    rank_signal: OptionalInteger = None
    error_type: OptionalWords = None
    traceback: OptionalWords = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Message):
    """Everything that a pod has reported. A higher revision replaces a lower one."""

    kind: ClassVar[str] = "report"
    revision: Integer
    launcher: Annotated[LauncherState, _launcher_state] = LauncherState.ABSENT
    port: Annotated[int | None, partial(Fields.integer_or_none, low=1, high=65535)] = None
    """Port reserved on this pod's addresses for the ranks' rendezvous."""
    ranks_seen: Integer = 0
    """Ranks that have connected to the job socket."""
    suspended: Flag = False
    """The ranks have received the suspend signal."""
    received: Flag = False
    released: Flag = False
    step: OptionalInteger = None
    metrics: Metrics = field(default_factory=dict)
    durable: Annotated[Saved | None, part(Saved)] = None
    """The newest durable checkpoint, and the newest one that is not durable."""
    volatile: Annotated[Saved | None, part(Saved)] = None
    user_state: Annotated[int | None, partial(Fields.integer_or_none, high=2**32 - 1)] = None
    given_up: Annotated[GivenUp | None, part(GivenUp)] = None
    output: Integer = 0
    """Grows at intervals while ranks write output."""
    end: Annotated[End | None, part(End)] = None


@dataclass(frozen=True, slots=True)
class Beat(Message):
    """Heartbeat."""

    kind: ClassVar[str] = "beat"


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The token was accepted. Either side closes after `silence_seconds` without a message."""

    kind: ClassVar[str] = "welcome"
    beat_seconds: Annotated[float, partial(Fields.seconds, default=5.0, low=0.01)]
    silence_seconds: Annotated[float, partial(Fields.seconds, default=15.0, low=0.05)]
    version: Positive = VERSION


@dataclass(frozen=True, slots=True)
class Acknowledgement(Message):
    """Everything up to this revision has reached the scheduler.

    Checkpoints and the user state are in the job's status, so the next leader has them, too.
    """

    kind: ClassVar[str] = "acknowledgement"
    revision: Integer


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder(Message):
    """Starts the ranks of this part of the gang."""

    job: Text
    """`namespace/name`."""
    chain: Text
    attempt: Integer
    node: Text
    zone: Text
    node_rank: Integer
    nodes: Positive
    ranks_per_node: Positive
    master_addr: Text
    master_port: Annotated[int, partial(Fields.integer, low=1, high=65535)]
    user_state: Annotated[int, partial(Fields.integer, high=2**32 - 1)] = 0
    restore_step: OptionalInteger = None
    restore_path: OptionalText = None
    stop_grace_seconds: Annotated[float, partial(Fields.number, default=30.0)] = 30.0
    output_seconds: Annotated[float, partial(Fields.number, default=30.0)] = 30.0
    topology: Annotated[dict[str, Any], _topology] = field(default_factory=dict)
    key: OptionalText = field(default=None, repr=False)
    """Key of the attempt's collectives, hexadecimal; null if a sidecar does not support it."""


@dataclass(frozen=True, slots=True)
class Suspend(Message):
    """Asks the job to save and release within this time."""

    seconds_left: Annotated[float, partial(Fields.seconds, default=0.0)]
    reason: Annotated[str, partial(Fields.text, default="")] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(Message):
    """Everything that is requested of a pod. Earlier requests are never withdrawn."""

    kind: ClassVar[str] = "order"
    start: Annotated[StartOrder | None, part(StartOrder)] = None
    suspend: Annotated[Suspend | None, part(Suspend)] = None
    terminate: Flag = False
    """SIGTERM to every rank: none implements the job contract, or none responds."""
    kill: Flag = False
    """The attempt has ended: SIGTERM to every rank, and SIGKILL a second later."""


@dataclass(frozen=True, slots=True)
class Refusal(Message):
    """The last line of a stream, with its reason. `code` is for programs and metrics."""

    kind: ClassVar[str] = "refusal"
    code: Text
    message: Text


FromSidecar = Hello | Report | Beat
FromGateway = Welcome | Acknowledgement | Order | Beat | Refusal
_FROM_SIDECAR: dict[str, type[FromSidecar]] = {item.kind: item for item in (Hello, Report, Beat)}
_FROM_GATEWAY: dict[str, type[FromGateway]] = {
    entry.kind: entry for entry in (Welcome, Acknowledgement, Order, Beat, Refusal)
}


def encode(message: FromSidecar | FromGateway) -> bytes:
    """The message as one line with its newline."""
    body = {"kind": message.kind, **_fields(message)}
    text = json.dumps(body, allow_nan=False, separators=(",", ":"), default=_fields)
    return text.encode() + b"\n"


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a message without a deep copy: topologies are large and sent to every node."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def parse_from_sidecar(line: bytes) -> FromSidecar:
    """Parse a message of a sidecar. Raises ProtocolError."""
    body = parse_object(line, REPORT_BYTES_MAX)
    return _kind(_FROM_SIDECAR, body).read(Fields(str(body["kind"]), body))


def parse_from_gateway(line: bytes) -> FromGateway:
    """Parse a message of the gateway. Raises ProtocolError."""
    body = parse_object(line, ORDER_BYTES_MAX)
    return _kind(_FROM_GATEWAY, body).read(Fields(str(body["kind"]), body))


def _kind(kinds: dict[str, _T], body: dict[str, Any]) -> _T:
    name = body.get("kind")
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        valid = ", ".join(kinds)
        raise ProtocolError("bad_operation", f"unknown kind {name!r:.80}; known kinds: {valid}")
    return kind
