"""The protocol between sidecar and gateway, version 2: JSON objects, one a line, over TLS.

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
"""First version whose start order has the key of the job's collectives."""
OLDEST_VERSION = 1
"""Sidecars live as long as their pods, so a gateway also supports the version before its own. The
sidecar sends its newest version, the gateway answers with the newest one that both support."""
REPORT_BYTES_MAX = 64 * 1024  # of a line from a sidecar
ORDER_BYTES_MAX = 16 * 1024 * 1024  # of a line from the gateway: the largest gangs' topology


class LauncherState(StrEnum):
    """Progress of the pod's launcher; never goes back."""

    ABSENT = "absent"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Hello:
    """The first line. The projected token identifies and authenticates the pod."""

    kind: ClassVar[str] = "hello"
    token: str = field(repr=False)
    version: int = VERSION

    @classmethod
    def read(cls, fields: Fields) -> Hello:
        """Build it from the fields of a line."""
        return cls(fields.text("token"), fields.integer("version"))


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that the job reported."""

    step: int
    path: str

    @classmethod
    def read(cls, fields: Fields) -> Saved:
        """Build it from the fields of an object."""
        return cls(fields.integer("step"), fields.text("path", characters_max=PATH_CHARS_MAX))


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A rank failed the job without a restart."""

    rank: int
    reason: str

    @classmethod
    def read(cls, fields: Fields) -> GivenUp:
        """Build it from the fields of an object."""
        return cls(fields.integer("rank"), fields.words("reason"))


@dataclass(frozen=True, slots=True)
class End:
    """The end of the launcher: its exit status, and the first rank that failed."""

    code: int
    """Exit status, or the negative number of a signal."""
    rank: int | None = None
    time: float = 0.0
    peer_lost: bool = False
    rank_status: int | None = None
    rank_signal: int | None = None
    error_type: str | None = None
    traceback: str | None = None

    @classmethod
    def read(cls, fields: Fields) -> End:
        """Build it from the fields of an object."""
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
    """Everything that a pod has reported. A higher revision replaces a lower one."""

    kind: ClassVar[str] = "report"
    revision: int
    launcher: LauncherState = LauncherState.ABSENT
    port: int | None = None
    """Port reserved on this pod's addresses for the ranks' rendezvous."""
    ranks_seen: int = 0
    """Ranks that have connected to the job socket."""
    suspended: bool = False
    """The ranks have received the suspend signal."""
    received: bool = False
    released: bool = False
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    durable: Saved | None = None
    """The newest durable checkpoint, and the newest one that is not durable."""
    volatile: Saved | None = None
    user_state: int | None = None
    given_up: GivenUp | None = None
    output: int = 0
    """Grows at intervals while ranks write output."""
    end: End | None = None

    @classmethod
    def read(cls, fields: Fields) -> Report:
        """Build it from the fields of a line."""
        durable, volatile = fields.object_or_none("durable"), fields.object_or_none("volatile")
        given_up, end = fields.object_or_none("given_up"), fields.object_or_none("end")
        state = fields.text("launcher", LauncherState.ABSENT)
        if state not in list(LauncherState):
            raise ProtocolError("bad_field", f"report: invalid `launcher` {state!r:.80}")
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
    """Heartbeat."""

    kind: ClassVar[str] = "beat"

    @classmethod
    def read(cls, _fields: Fields) -> Beat:
        """Build it from the fields of a line."""
        return cls()


@dataclass(frozen=True, slots=True)
class Welcome:
    """The token was accepted. Either side closes after `silence_seconds` without a message."""

    kind: ClassVar[str] = "welcome"
    beat_seconds: float
    silence_seconds: float
    version: int = VERSION

    @classmethod
    def read(cls, fields: Fields) -> Welcome:
        """Build it from the fields of a line."""
        return cls(
            max(fields.number("beat_seconds", 5.0), 0.01),
            max(fields.number("silence_seconds", 15.0), 0.05),
            fields.integer("version", 1),
        )


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Everything up to this revision has reached the scheduler.

    Checkpoints and the user state are in the job's status, so the next leader has them, too.
    """

    kind: ClassVar[str] = "acknowledgement"
    revision: int

    @classmethod
    def read(cls, fields: Fields) -> Acknowledgement:
        """Build it from the fields of a line."""
        return cls(fields.integer("revision"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder:
    """Starts the ranks of this part of the gang."""

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
    """Key of the attempt's collectives, hexadecimal; null if a sidecar does not support it."""

    @classmethod
    def read(cls, fields: Fields) -> StartOrder:
        """Build it from the fields of an object."""
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
    """Asks the job to save and release within this time."""

    seconds_left: float
    reason: str = ""

    @classmethod
    def read(cls, fields: Fields) -> Suspend:
        """Build it from the fields of an object."""
        return cls(max(fields.number("seconds_left", 0.0), 0.0), fields.text("reason", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything that is requested of a pod. Earlier requests are never withdrawn."""

    kind: ClassVar[str] = "order"
    start: StartOrder | None = None
    suspend: Suspend | None = None
    terminate: bool = False
    """SIGTERM to every rank: none implements the job contract, or none responds."""
    kill: bool = False
    """The attempt has ended: SIGTERM to every rank, and SIGKILL a second later."""

    @classmethod
    def read(cls, fields: Fields) -> Order:
        """Build it from the fields of a line."""
        start, suspend = fields.object_or_none("start"), fields.object_or_none("suspend")
        return cls(
            start=StartOrder.read(start) if start else None,
            suspend=Suspend.read(suspend) if suspend else None,
            terminate=fields.boolean("terminate", default=False),
            kill=fields.boolean("kill", default=False),
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """The last line of a stream, with its reason. `code` is for programs and metrics."""

    kind: ClassVar[str] = "refusal"
    code: str
    message: str

    @classmethod
    def read(cls, fields: Fields) -> Refusal:
        """Build it from the fields of a line."""
        return cls(fields.text("code"), fields.text("message"))


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
