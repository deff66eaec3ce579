"""Messages of the job socket, version 1: requests of ranks and their answers.

One JSON object per line, each at most `LINE_BYTES_MAX` long. The rank sends requests; the server
answers each once and in order, and sends nothing unsolicited. Unknown fields are ignored; unknown
operations are refused. Pure: text in, values out; no socket, no clock.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from flyer.job.fields import (
    LINE_BYTES_MAX,
    Boolean,
    Fields,
    Integer,
    Message,
    Metrics,
    OptionalInteger,
    OptionalText,
    Positive,
    ProtocolError,
    Text,
    Words,
    parse_object,
)
from flyer.job.limits import PATH_CHARS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "EXPOSED",
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
    "exposed_percent",
    "parse_reply",
    "parse_request",
]

VERSION = 1
WATCH_SECONDS_MAX = 60.0  # longest time until a watch is answered, with or without a change
RANK_MAX = 2**20
EXPOSED = "exposed"
"""Metric of a job: share of the time since its last report in which it waited for communication."""
State = Annotated[int, partial(Fields.integer, low=-(2**31), high=2**32 - 1)]
"""The user's 32 bits, signed or unsigned."""


class SuspendCode(IntEnum):
    """Progress of a suspension. Never decreases within an attempt."""

    NONE = 0
    SENT = 1
    RECEIVED = 2
    MAY_SUSPEND = 3


def _suspend_code(fields: Fields, name: str) -> SuspendCode:
    return SuspendCode(fields.integer(name, 0, 3))


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """The first line of every connection: rank and protocol version."""

    op: ClassVar[str] = "hello"
    rank: Annotated[int, partial(Fields.integer, high=RANK_MAX)]
    version: Positive = VERSION


@dataclass(frozen=True, slots=True)
class Watch(Message):
    """Wait for a revision other than `revision`, at most `timeout_seconds`, which is limited."""

    op: ClassVar[str] = "watch"
    revision: Integer = 0
    timeout_seconds: Annotated[
        float, partial(Fields.seconds, default=WATCH_SECONDS_MAX, high=WATCH_SECONDS_MAX)
    ] = WATCH_SECONDS_MAX


@dataclass(frozen=True, slots=True)
class Received(Message):
    """Acknowledges the suspension: the job will save and release."""

    op: ClassVar[str] = "received"


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """Reports a step. Restarts the progress deadline and, while suspending, the grace period."""

    op: ClassVar[str] = "progress"
    step: Integer
    metrics: Metrics = field(default_factory=dict)


def exposed_percent(metrics: Mapping[str, float]) -> int | None:
    """The metric `exposed`, a share from 0 to 1, in percent; None for any other number."""
    share = metrics.get(EXPOSED)
    return round(100 * share) if share is not None and 0 <= share <= 1 else None


@dataclass(frozen=True, slots=True)
class Checkpoint(Message):
    """Reports a checkpoint of `step` at `path`; restarts use only durable ones."""

    op: ClassVar[str] = "checkpoint"
    step: Integer
    path: Annotated[str, partial(Fields.text, characters_max=PATH_CHARS_MAX)]
    durable: Boolean


@dataclass(frozen=True, slots=True)
class Release(Message):
    """Releases all nodes of the job, which has saved its state."""

    op: ClassVar[str] = "release"
    step: OptionalInteger = None


@dataclass(frozen=True, slots=True)
class Fail(Message):
    """Fails the job without a restart."""

    op: ClassVar[str] = "fail"
    reason: Words


@dataclass(frozen=True, slots=True)
class UserState(Message):
    """Stores the user's 32-bit state for all attempts."""

    op: ClassVar[str] = "user_state"
    state: State


Request = Hello | Watch | Received | Progress | Checkpoint | Release | Fail | UserState
_REQUESTS: dict[str, type[Request]] = {
    kind.op: kind
    for kind in (Hello, Watch, Received, Progress, Checkpoint, Release, Fail, UserState)
}


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The answer to `hello`: the attempt and the checkpoint it starts from."""

    kind: ClassVar[str] = "welcome"
    job: Text
    chain: Text
    attempt: Integer
    user_state: State = 0
    restore_step: OptionalInteger = None
    restore_path: OptionalText = None
    version: Positive = VERSION


@dataclass(frozen=True, slots=True)
class Change(Message):
    """The answer to `watch`. Times are remaining seconds: clocks may differ."""

    kind: ClassVar[str] = "change"
    revision: Integer
    suspend_code: Annotated[SuspendCode, _suspend_code] = SuspendCode.NONE
    seconds_left: Annotated[float | None, Fields.number_or_none] = None
    reason: Annotated[str, partial(Fields.text, default="")] = ""


@dataclass(frozen=True, slots=True)
class Done(Message):
    """The answer to every other request: it was carried out."""

    kind: ClassVar[str] = "done"


@dataclass(frozen=True, slots=True)
class Refusal(Message):
    """The request was refused. After a `bad_…` code the server closes the connection."""

    kind: ClassVar[str] = "refusal"
    code: Text
    message: Text


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
