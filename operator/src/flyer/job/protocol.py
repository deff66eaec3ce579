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
WATCH_SECONDS_MAX = 60.0  # a watch is answered at the latest after so long, changed or not
RANK_MAX = 2**20


class SuspendCode(IntEnum):
    """How far a suspension got. It only grows within an attempt."""

    NONE = 0
    SENT = 1
    RECEIVED = 2
    MAY_SUSPEND = 3


@dataclass(frozen=True, slots=True)
class Hello:
    """The first line of every connection: which rank speaks, in which version."""

    op: ClassVar[str] = "hello"
    rank: int
    version: int = VERSION

    @classmethod
    def read(cls, fields: Fields) -> Hello:
        """From the fields of a line."""
        return cls(fields.integer("rank", high=RANK_MAX), fields.integer("version", 1))


@dataclass(frozen=True, slots=True)
class Watch:
    """Answer me when something differs from `revision`, or after `timeout_seconds`."""

    op: ClassVar[str] = "watch"
    revision: int = 0
    timeout_seconds: float = WATCH_SECONDS_MAX

    @classmethod
    def read(cls, fields: Fields) -> Watch:
        """From the fields of a line; the wait is cut to what a server grants."""
        timeout_seconds = fields.number("timeout_seconds", WATCH_SECONDS_MAX)
        return cls(fields.integer("revision"), min(max(timeout_seconds, 0.0), WATCH_SECONDS_MAX))


@dataclass(frozen=True, slots=True)
class Received:
    """The suspension was seen: the job will save and release."""

    op: ClassVar[str] = "received"

    @classmethod
    def read(cls, _fields: Fields) -> Received:
        """From the fields of a line."""
        return cls()


@dataclass(frozen=True, slots=True)
class Progress:
    """A step is done. Restarts the progress deadline and, while suspending, the grace period."""

    op: ClassVar[str] = "progress"
    step: int
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, fields: Fields) -> Progress:
        """From the fields of a line."""
        return cls(fields.integer("step"), fields.metrics("metrics"))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of `step` exists at `path`; only a durable one counts for a restart."""

    op: ClassVar[str] = "checkpoint"
    step: int
    path: str
    durable: bool

    @classmethod
    def read(cls, fields: Fields) -> Checkpoint:
        """From the fields of a line."""
        return cls(
            fields.integer("step"),
            fields.text("path", characters_max=PATH_CHARS_MAX),
            fields.boolean("durable"),
        )


@dataclass(frozen=True, slots=True)
class Release:
    """The job has saved what it wants to keep and gives its nodes back now, all of them."""

    op: ClassVar[str] = "release"
    step: int | None = None

    @classmethod
    def read(cls, fields: Fields) -> Release:
        """From the fields of a line."""
        return cls(fields.integer_or_none("step"))


@dataclass(frozen=True, slots=True)
class Fail:
    """The job gives up, for good: it is not restarted."""

    op: ClassVar[str] = "fail"
    reason: str

    @classmethod
    def read(cls, fields: Fields) -> Fail:
        """From the fields of a line."""
        return cls(fields.words("reason"))


@dataclass(frozen=True, slots=True)
class UserState:
    """Keep this 32-bit word of the user's over all attempts of the chain."""

    op: ClassVar[str] = "user_state"
    state: int

    @classmethod
    def read(cls, fields: Fields) -> UserState:
        """From the fields of a line."""
        return cls(fields.integer("state", -(2**31), 2**32 - 1))


Request = Hello | Watch | Received | Progress | Checkpoint | Release | Fail | UserState
_REQUESTS: dict[str, type[Request]] = {
    kind.op: kind
    for kind in (Hello, Watch, Received, Progress, Checkpoint, Release, Fail, UserState)
}


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `hello`: whose attempt this is and what it starts from."""

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
        """From the fields of a line."""
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
        """From the fields of a line."""
        return cls(
            fields.integer("revision"),
            SuspendCode(fields.integer("suspend_code", 0, 3)),
            fields.number_or_none("seconds_left"),
            fields.text("reason", ""),
        )


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to everything else: heard and acted upon."""

    kind: ClassVar[str] = "done"

    @classmethod
    def read(cls, _fields: Fields) -> Done:
        """From the fields of a line."""
        return cls()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Not done, and why. After a `bad_…` code the server closes the connection."""

    kind: ClassVar[str] = "refusal"
    code: str
    message: str

    @classmethod
    def read(cls, fields: Fields) -> Refusal:
        """From the fields of a line."""
        return cls(fields.text("code"), fields.text("message"))


Reply = Welcome | Change | Done | Refusal
_REPLIES: dict[str, type[Reply]] = {kind.kind: kind for kind in (Welcome, Change, Done, Refusal)}


def encode(message: Request | Reply) -> bytes:
    """One line, its newline included."""
    name = (
        {"kind": message.kind}
        if isinstance(message, Welcome | Change | Done | Refusal)
        else {"op": message.op}
    )
    try:
        line = json.dumps({**name, **asdict(message)}, allow_nan=False).encode() + b"\n"
    except ValueError as error:
        raise ProtocolError(
            "bad_field", f"{message!r:.200} holds a number that is not finite"
        ) from error
    if len(line) > LINE_BYTES_MAX:
        raise ProtocolError(
            "bad_line", f"a message of {len(line)} bytes exceeds the {LINE_BYTES_MAX} of a line"
        )
    return line


def parse_request(line: bytes) -> Request:
    """What a rank said; `ProtocolError` for anything that is no request."""
    body = parse_object(line)
    op = body.get("op")
    kind = _REQUESTS.get(op) if isinstance(op, str) else None
    if kind is None:
        known = ", ".join(_REQUESTS)
        raise ProtocolError("bad_operation", f"unknown operation {op!r:.80}; there are: {known}")
    return kind.read(Fields(kind.op, body))


def parse_reply(line: bytes) -> Reply:
    """What the server answered; `ProtocolError` for anything that is no answer."""
    body = parse_object(line)
    name = body.get("kind")
    kind = _REPLIES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError("bad_reply", f"unknown kind of reply {name!r:.80}")
    return kind.read(Fields(kind.kind, body))
