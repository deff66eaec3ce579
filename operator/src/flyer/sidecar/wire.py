"""The protocol between sidecar and gateway, version 2: JSON objects, one a line, over TLS.

Both sides report *states*, not events: a sidecar's report is all that its pod has said so far, a
gateway's order all that is wanted of it. Whatever is lost, repeated or overtaken, the newest one is
enough, and after a reconnect both simply say it again.

    sidecar                         gateway
    hello {token}            →
                             ←      welcome, or refusal
    report {revision, …}     →
                             ←      acknowledgement {revision}
                             ←      order {start, suspend, terminate, kill}
    beat                     ⇄      beat

Pure: text in, values out; no socket, no clock. `docs/internals/gateway.md` says it in words.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

from flyer.job.fields import Fields, ProtocolError, parse_object
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
"""From this version on the start order has the key of the job's collectives."""
OLDEST_VERSION = 1
"""Sidecars live as long as their pods: a gateway speaks with those of the version before it. The
sidecar says its newest version, the gateway answers with the one that both speak."""
REPORT_BYTES_MAX = 64 * 1024  # of a line that a sidecar says
ORDER_BYTES_MAX = 16 * 1024 * 1024  # of a received line: the topology of the largest gangs


class LauncherState(StrEnum):
    """How far the pod's launcher is; it only moves on."""

    ABSENT = "absent"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Hello:
    """The first line: the projected token says who this is; nothing else would be believed."""

    kind: ClassVar[str] = "hello"
    token: str = field(repr=False)
    version: int = VERSION

    @classmethod
    def read(cls, fields: Fields) -> Hello:
        """From the fields of a line."""
        return cls(fields.text("token"), fields.integer("version"))


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that the job reported."""

    step: int
    path: str

    @classmethod
    def read(cls, fields: Fields) -> Saved:
        """From the fields of an object."""
        return cls(fields.integer("step"), fields.text("path", characters_max=PATH_CHARS_MAX))


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A rank said `fail`."""

    rank: int
    reason: str

    @classmethod
    def read(cls, fields: Fields) -> GivenUp:
        """From the fields of an object."""
        return cls(fields.integer("rank"), fields.words("reason"))


@dataclass(frozen=True, slots=True)
class End:
    """The launcher has ended, or is about to: its exit status, and the first rank that failed."""

    code: int
    """Exit status; a signal's number below zero."""
    rank: int | None = None
    time: float = 0.0
    peer_lost: bool = False
    rank_status: int | None = None
    rank_signal: int | None = None
    error_type: str | None = None
    traceback: str | None = None

    @classmethod
    def read(cls, fields: Fields) -> End:
        """From the fields of an object."""
        return cls(
            fields.integer("code", -128, 255),
            fields.integer_or_none("rank"),
            fields.number("time", 0.0),
            fields.boolean("peer_lost", default=False),
            fields.integer_or_none("rank_status"),
            fields.integer_or_none("rank_signal"),
            fields.words_or_none("error_type"),
            fields.words_or_none("traceback"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that a pod has said so far. A higher revision replaces a lower one."""

    kind: ClassVar[str] = "report"
    revision: int
    launcher: LauncherState = LauncherState.ABSENT
    port: int | None = None
    """Free on this pod's addresses and held for the ranks' rendezvous."""
    ranks_seen: int = 0
    """Ranks that ever said hello on the job socket."""
    suspended: bool = False
    """The ranks have received the suspend signal."""
    received: bool = False
    released: bool = False
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    durable: Saved | None = None
    """The newest durable checkpoint, and the newest one that is not."""
    volatile: Saved | None = None
    user_state: int | None = None
    given_up: GivenUp | None = None
    output: int = 0
    """Grows when ranks wrote something, slowly."""
    end: End | None = None

    @classmethod
    def read(cls, fields: Fields) -> Report:
        """From the fields of a line."""
        durable, volatile = fields.object_or_none("durable"), fields.object_or_none("volatile")
        given_up, end = fields.object_or_none("given_up"), fields.object_or_none("end")
        state = fields.text("launcher", LauncherState.ABSENT)
        if state not in list(LauncherState):
            raise ProtocolError("bad_field", f"report: `launcher` is {state!r:.80}, no state")
        user_state = fields.raw("user_state")
        return cls(
            revision=fields.integer("revision"),
            launcher=LauncherState(state),
            port=None if fields.raw("port") is None else fields.integer("port", 1, 65535),
            ranks_seen=fields.integer("ranks_seen"),
            suspended=fields.boolean("suspended", default=False),
            received=fields.boolean("received", default=False),
            released=fields.boolean("released", default=False),
            step=fields.integer_or_none("step"),
            metrics=fields.metrics("metrics"),
            durable=Saved.read(durable) if durable else None,
            volatile=Saved.read(volatile) if volatile else None,
            user_state=None if user_state is None else fields.integer("user_state", 0, 2**32 - 1),
            given_up=GivenUp.read(given_up) if given_up else None,
            output=fields.integer("output"),
            end=End.read(end) if end else None,
        )


@dataclass(frozen=True, slots=True)
class Beat:
    """I am here."""

    kind: ClassVar[str] = "beat"

    @classmethod
    def read(cls, _fields: Fields) -> Beat:
        """From the fields of a line."""
        return cls()


@dataclass(frozen=True, slots=True)
class Welcome:
    """The token was accepted: who says nothing for `silence_seconds` is dropped, on both sides."""

    kind: ClassVar[str] = "welcome"
    beat_seconds: float
    silence_seconds: float
    version: int = VERSION

    @classmethod
    def read(cls, fields: Fields) -> Welcome:
        """From the fields of a line."""
        return cls(
            max(fields.number("beat_seconds", 5.0), 0.01),
            max(fields.number("silence_seconds", 15.0), 0.05),
            fields.integer("version", 1),
        )


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Everything up to this revision has reached the scheduler.

    Checkpoints and the life state are in the job's status: the next leader knows them too.
    """

    kind: ClassVar[str] = "acknowledgement"
    revision: int

    @classmethod
    def read(cls, fields: Fields) -> Acknowledgement:
        """From the fields of a line."""
        return cls(fields.integer("revision"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder:
    """Start the ranks now, as this part of the gang."""

    job: str
    """`namespace/name`."""
    chain: str
    attempt: int
    node: str
    zone: str
    node_rank: int
    nodes: int
    ranks_per_node: int
    master_addr: str
    master_port: int
    user_state: int = 0
    restore_step: int | None = None
    restore_path: str | None = None
    stop_grace_seconds: float = 30.0
    output_seconds: float = 30.0
    topology: dict[str, Any] = field(default_factory=dict)
    key: str | None = field(default=None, repr=False)
    """Key of the attempt's collectives, hexadecimal; null where some sidecar cannot take it."""

    @classmethod
    def read(cls, fields: Fields) -> StartOrder:
        """From the fields of an object."""
        topology = fields.raw("topology")
        return cls(
            job=fields.text("job"),
            chain=fields.text("chain"),
            attempt=fields.integer("attempt"),
            node=fields.text("node"),
            zone=fields.text("zone"),
            node_rank=fields.integer("node_rank"),
            nodes=fields.integer("nodes", 1),
            ranks_per_node=fields.integer("ranks_per_node", 1),
            master_addr=fields.text("master_addr"),
            master_port=fields.integer("master_port", 1, 65535),
            user_state=fields.integer("user_state", 0, 2**32 - 1),
            restore_step=fields.integer_or_none("restore_step"),
            restore_path=fields.text_or_none("restore_path"),
            stop_grace_seconds=fields.number("stop_grace_seconds", 30.0),
            output_seconds=fields.number("output_seconds", 30.0),
            topology=topology if isinstance(topology, dict) else {},
            key=fields.text_or_none("key"),
        )


@dataclass(frozen=True, slots=True)
class Suspend:
    """The job shall save and release within so long."""

    seconds_left: float
    reason: str = ""

    @classmethod
    def read(cls, fields: Fields) -> Suspend:
        """From the fields of an object."""
        return cls(max(fields.number("seconds_left", 0.0), 0.0), fields.text("reason", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """All that is wanted of a pod now. What an earlier order asked is never taken back."""

    kind: ClassVar[str] = "order"
    start: StartOrder | None = None
    suspend: Suspend | None = None
    terminate: bool = False
    """SIGTERM to every rank: none implements the job contract, or none answers."""
    kill: bool = False
    """The attempt is over: SIGTERM to every rank, and SIGKILL a second later."""

    @classmethod
    def read(cls, fields: Fields) -> Order:
        """From the fields of a line."""
        start, suspend = fields.object_or_none("start"), fields.object_or_none("suspend")
        return cls(
            start=StartOrder.read(start) if start else None,
            suspend=Suspend.read(suspend) if suspend else None,
            terminate=fields.boolean("terminate", default=False),
            kill=fields.boolean("kill", default=False),
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """The last line of a stream: why it ends. `code` is for programs and metrics."""

    kind: ClassVar[str] = "refusal"
    code: str
    message: str

    @classmethod
    def read(cls, fields: Fields) -> Refusal:
        """From the fields of a line."""
        return cls(fields.text("code"), fields.text("message"))


FromSidecar = Hello | Report | Beat
FromGateway = Welcome | Acknowledgement | Order | Beat | Refusal
_FROM_SIDECAR: dict[str, type[FromSidecar]] = {item.kind: item for item in (Hello, Report, Beat)}
_FROM_GATEWAY: dict[str, type[FromGateway]] = {
    entry.kind: entry for entry in (Welcome, Acknowledgement, Order, Beat, Refusal)
}


def encode(message: FromSidecar | FromGateway) -> bytes:
    """One line, its newline included."""
    body = {"kind": message.kind, **_fields(message)}
    text = json.dumps(body, allow_nan=False, separators=(",", ":"), default=_fields)
    return text.encode() + b"\n"


def _fields(value: Any) -> dict[str, Any]:
    """Of one of our values, uncopied: a topology names every node, and goes to every node."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def parse_from_sidecar(line: bytes) -> FromSidecar:
    """What a sidecar said; `ProtocolError` for anything else."""
    body = parse_object(line, REPORT_BYTES_MAX)
    return _kind(_FROM_SIDECAR, body).read(Fields(str(body["kind"]), body))


def parse_from_gateway(line: bytes) -> FromGateway:
    """What the gateway said; `ProtocolError` for anything else."""
    body = parse_object(line, ORDER_BYTES_MAX)
    return _kind(_FROM_GATEWAY, body).read(Fields(str(body["kind"]), body))


def _kind(kinds: dict[str, _T], body: dict[str, Any]) -> _T:
    name = body.get("kind")
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        known = ", ".join(kinds)
        raise ProtocolError("bad_operation", f"unknown kind {name!r:.80}; there are: {known}")
    return kind
