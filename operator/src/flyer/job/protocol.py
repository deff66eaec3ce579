"""Messages of the job socket, version 1: requests of ranks and their answers.

One JSON object per line, each at most `LINE_BYTES_MAX` long. The rank sends requests; the server
answers each once and in order, and sends nothing unsolicited. Unknown fields are ignored; unknown
operations are refused. Pure: text in, values out; no socket, no clock.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import ClassVar

from flyer.job.fields import LINE_BYTES_MAX, Fields, ProtocolError, parse_object
from flyer.job.limits import PATH_CHARS_MAX

__all__ = [
    "LINE_BYTES_MAX",
    "VERSION",
    "WATCH_SECONDS_MAX",
    "Change",
    "Checkpoint",
    "Done",
    "Fail",
    "Hello",
    "Progress",
    "ProtocolError",
    "Received",
    "Refusal",
    "Release",
    "Reply",
    "Request",
    "SuspendCode",
    "UserState",
    "Watch",
    "Welcome",
    "encode",
    "parse_reply",
    "parse_request",
]

VERSION = 1
WATCH_SECONDS_MAX = 60.0  # longest time until a watch is answered, with or without a change
RANK_MAX = 2**20


class SuspendCode(IntEnum):
    """Progress of a suspension. Never decreases within an attempt."""

    NONE = 0
    SENT = 1
    RECEIVED = 2
    MAY_SUSPEND = 3


@dataclass(frozen=True, slots=True)
class Hello:
    """The first line of every connection: rank and protocol version."""

    op: ClassVar[str] = "hello"
    rank: int
    version: int = VERSION

    @classmethod
    def read(cls, fields: Fields) -> Hello:
        """Build it from the fields of a line."""
        return cls(fields.integer("rank", high=RANK_MAX), fields.integer("version", 1))


@dataclass(frozen=True, slots=True)
class Watch:
    """Wait for a revision other than `revision`, at most `timeout_seconds`."""

    op: ClassVar[str] = "watch"
    revision: int = 0
    timeout_seconds: float = WATCH_SECONDS_MAX

    @classmethod
    def read(cls, fields: Fields) -> Watch:
        """Build it from the fields of a line; limits the timeout to WATCH_SECONDS_MAX."""
        timeout_seconds = fields.number("timeout_seconds", WATCH_SECONDS_MAX)
        return cls(fields.integer("revision"), min(max(timeout_seconds, 0.0), WATCH_SECONDS_MAX))


@dataclass(frozen=True, slots=True)
class Received:
    """Acknowledges the suspension: the job will save and release."""

    op: ClassVar[str] = "received"

    @classmethod
    def read(cls, _fields: Fields) -> Received:
        """Build it from the fields of a line."""
        return cls()


@dataclass(frozen=True, slots=True)
class Progress:
    """Reports a step. Restarts the progress deadline and, while suspending, the grace period."""

    op: ClassVar[str] = "progress"
    step: int
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, fields: Fields) -> Progress:
        """Build it from the fields of a line."""
        return cls(fields.integer("step"), fields.metrics("metrics"))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Reports a checkpoint of `step` at `path`; restarts use only durable ones."""

    op: ClassVar[str] = "checkpoint"
    step: int
    path: str
    durable: bool

    @classmethod
    def read(cls, fields: Fields) -> Checkpoint:
        """Build it from the fields of a line."""
        return cls(
            fields.integer("step"),
            fields.text("path", characters_max=PATH_CHARS_MAX),
            fields.boolean("durable"),
        )


@dataclass(frozen=True, slots=True)
class Release:
    """Releases all nodes of the job, which has saved its state."""

    op: ClassVar[str] = "release"
    step: int | None = None

    @classmethod
    def read(cls, fields: Fields) -> Release:
        """Build it from the fields of a line."""
        return cls(fields.integer_or_none("step"))


@dataclass(frozen=True, slots=True)
class Fail:
    """Fails the job without a restart."""

    op: ClassVar[str] = "fail"
    reason: str

    @classmethod
    def read(cls, fields: Fields) -> Fail:
        """Build it from the fields of a line."""
        return cls(fields.words("reason"))


@dataclass(frozen=True, slots=True)
class UserState:
    """Stores the user's 32-bit state for all attempts."""

    op: ClassVar[str] = "user_state"
    state: int

    @classmethod
    def read(cls, fields: Fields) -> UserState:
        """Build it from the fields of a line."""
        return cls(fields.integer("state", -(2**31), 2**32 - 1))


Request = Hello | Watch | Received | Progress | Checkpoint | Release | Fail | UserState
_REQUESTS: dict[str, type[Request]] = {
    kind.op: kind
    for kind in (Hello, Watch, Received, Progress, Checkpoint, Release, Fail, UserState)
}


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `hello`: the attempt and the checkpoint it starts from."""

    kind: ClassVar[str] = "welcome"
    job: str
    chain: str
    attempt: int
    user_state: int = 0
    restore_step: int | None = None
    restore_path: str | None = None
    version: int = VERSION

    @classmethod
    def read(cls, fields: Fields) -> Welcome:
        """Build it from the fields of a line."""
        return cls(
            fields.text("job"),
            fields.text("chain"),
            fields.integer("attempt"),
            fields.integer("user_state", -(2**31), 2**32 - 1),
            fields.integer_or_none("restore_step"),
            fields.text_or_none("restore_path"),
            fields.integer("version", 1),
        )


@dataclass(frozen=True, slots=True)
class Change:
    """The answer to `watch`. Times are remaining seconds: clocks may differ."""

    kind: ClassVar[str] = "change"
    revision: int
    suspend_code: SuspendCode = SuspendCode.NONE
    seconds_left: float | None = None
    reason: str = ""

    @classmethod
    def read(cls, fields: Fields) -> Change:
        """Build it from the fields of a line."""
        return cls(
            fields.integer("revision"),
            SuspendCode(fields.integer("suspend_code", 0, 3)),
            fields.number_or_none("seconds_left"),
            fields.text("reason", ""),
        )


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to every other request: it was carried out."""

    kind: ClassVar[str] = "done"

    @classmethod
    def read(cls, _fields: Fields) -> Done:
        """Build it from the fields of a line."""
        return cls()


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request was refused. After a `bad_…` code the server closes the connection."""

    kind: ClassVar[str] = "refusal"
    code: str
    message: str

    @classmethod
    def read(cls, fields: Fields) -> Refusal:
        """Build it from the fields of a line."""
        return cls(fields.text("code"), fields.text("message"))


Reply = Welcome | Change | Done | Refusal
_REPLIES: dict[str, type[Reply]] = {kind.kind: kind for kind in (Welcome, Change, Done, Refusal)}


def encode(message: Request | Reply) -> bytes:
    """The message as one line with its newline."""
    name = (
        {"kind": message.kind}
        if isinstance(message, Welcome | Change | Done | Refusal)
        else {"op": message.op}
    )
    try:
        line = json.dumps({**name, **asdict(message)}, allow_nan=False).encode() + b"\n"
    except ValueError as error:
        raise ProtocolError(
            "bad_field", f"{message!r:.200} contains a number that is not finite"
        ) from error
    if len(line) > LINE_BYTES_MAX:
        raise ProtocolError(
            "bad_line", f"a message of {len(line)} bytes exceeds the {LINE_BYTES_MAX} of a line"
        )
    return line


def parse_request(line: bytes) -> Request:
    """Parse a rank's request. Raises ProtocolError."""
    body = parse_object(line)
    op = body.get("op")
    kind = _REQUESTS.get(op) if isinstance(op, str) else None
    if kind is None:
        valid = ", ".join(_REQUESTS)
        raise ProtocolError("bad_operation", f"unknown operation {op!r:.80}; valid: {valid}")
    return kind.read(Fields(kind.op, body))


def parse_reply(line: bytes) -> Reply:
    """Parse a server's reply. Raises ProtocolError."""
    body = parse_object(line)
    name = body.get("kind")
    kind = _REPLIES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError("bad_reply", f"unknown kind of reply {name!r:.80}")
    return kind.read(Fields(kind.kind, body))
