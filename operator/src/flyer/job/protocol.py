"""The words of the job socket, version 1: what a rank may say and what it is answered.

One JSON object a line, each at most `LINE_BYTES_MAX` long. The rank asks, the server answers every
request once and in order, and nobody speaks unasked. A field that a side does not know is ignored;
an operation that it does not know is refused. Pure: text in, values out; no socket, no clock.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

__all__ = [
    "LINE_BYTES_MAX",
    "VERSION",
    "WATCH_SECONDS_MAX",
    "Change",
    "Checkpoint",
    "Done",
    "Fail",
    "Hello",
    "LifeState",
    "Progress",
    "ProtocolError",
    "Received",
    "Refusal",
    "Release",
    "Reply",
    "Request",
    "SuspendCode",
    "Watch",
    "Welcome",
    "encode",
    "parse_reply",
    "parse_request",
]

VERSION = 1
LINE_BYTES_MAX = 64 * 1024
WATCH_SECONDS_MAX = 60.0  # a watch is answered at the latest after so long, changed or not
TEXT_CHARACTERS_MAX = 8 * 1024  # so that any message fits a line, escaped
METRICS_MAX = 32
INTEGER_MAX = 2**63 - 1
RANK_MAX = 2**20


class ProtocolError(Exception):
    """A line that is no message: `code` is for programs, the text names what is wrong."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class SuspendCode(IntEnum):
    """How far a suspension got. It only grows within an attempt."""

    NONE = 0
    SENT = 1
    RECEIVED = 2
    MAY_SUSPEND = 3


class _Fields:
    """The object of one line, read field by field; each error names operation, field and value."""

    def __init__(self, op: str, body: dict[str, Any]) -> None:
        self._op = op
        self._body = body

    def integer(self, name: str, low: int = 0, high: int = INTEGER_MAX) -> int:
        value = self._body.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._bad(name, f"an integer from {low} to {high}")
        return value

    def integer_or_none(self, name: str) -> int | None:
        return None if self._body.get(name) is None else self.integer(name)

    def number_or_none(self, name: str) -> float | None:
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._bad(name, "a number or null")
        return self._finite(name, value)

    def number(self, name: str, default: float) -> float:
        value = self.number_or_none(name)
        return default if value is None else value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._body.get(name, default)
        if not isinstance(value, str) or len(value) > TEXT_CHARACTERS_MAX:
            raise self._bad(name, f"a string of at most {TEXT_CHARACTERS_MAX} characters")
        return value

    def text_or_none(self, name: str) -> str | None:
        return None if self._body.get(name) is None else self.text(name)

    def boolean(self, name: str) -> bool:
        value = self._body.get(name)
        if not isinstance(value, bool):
            raise self._bad(name, "true or false")
        return value

    def metrics(self, name: str) -> dict[str, float]:
        value = self._body.get(name, {})
        if not isinstance(value, dict) or len(value) > METRICS_MAX:
            raise self._bad(name, f"an object of at most {METRICS_MAX} numbers")
        metrics = {}
        for key, number in value.items():
            if isinstance(number, bool) or not isinstance(number, int | float) or len(key) > 64:
                raise self._bad(f"{name}.{key[:64]}", "a number under a name of at most 64 letters")
            metrics[key] = self._finite(f"{name}.{key}", number)
        return metrics

    def _finite(self, name: str, value: float) -> float:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._bad(name, "a finite number")
        return number

    def _bad(self, name: str, expected: str) -> ProtocolError:
        value = self._body.get(name.partition(".")[0], "nothing")
        return ProtocolError("bad_field", f"{self._op}: `{name}` is {value!r:.80}, not {expected}")


@dataclass(frozen=True, slots=True)
class Hello:
    """The first line of every connection: which rank speaks, in which version."""

    op: ClassVar[str] = "hello"
    rank: int
    version: int = VERSION

    @classmethod
    def read(cls, fields: _Fields) -> Hello:
        """From the fields of a line."""
        return cls(fields.integer("rank", high=RANK_MAX), fields.integer("version", 1))


@dataclass(frozen=True, slots=True)
class Watch:
    """Answer me when something differs from `revision`, or after `timeout_seconds`."""

    op: ClassVar[str] = "watch"
    revision: int = 0
    timeout_seconds: float = WATCH_SECONDS_MAX

    @classmethod
    def read(cls, fields: _Fields) -> Watch:
        """From the fields of a line; the wait is cut to what a server grants."""
        timeout_seconds = fields.number("timeout_seconds", WATCH_SECONDS_MAX)
        return cls(fields.integer("revision"), min(max(timeout_seconds, 0.0), WATCH_SECONDS_MAX))


@dataclass(frozen=True, slots=True)
class Received:
    """The suspension was seen: the job will save and release."""

    op: ClassVar[str] = "received"

    @classmethod
    def read(cls, _fields: _Fields) -> Received:
        """From the fields of a line."""
        return cls()


@dataclass(frozen=True, slots=True)
class Progress:
    """A step is done. Extends the grace while suspending and feeds the watchdog."""

    op: ClassVar[str] = "progress"
    step: int
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, fields: _Fields) -> Progress:
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
    def read(cls, fields: _Fields) -> Checkpoint:
        """From the fields of a line."""
        return cls(fields.integer("step"), fields.text("path"), fields.boolean("durable"))


@dataclass(frozen=True, slots=True)
class Release:
    """The job has saved what it wants to keep and gives its nodes back now, all of them."""

    op: ClassVar[str] = "release"
    step: int | None = None

    @classmethod
    def read(cls, fields: _Fields) -> Release:
        """From the fields of a line."""
        return cls(fields.integer_or_none("step"))


@dataclass(frozen=True, slots=True)
class Fail:
    """The job gives up, for good: it is not restarted."""

    op: ClassVar[str] = "fail"
    reason: str

    @classmethod
    def read(cls, fields: _Fields) -> Fail:
        """From the fields of a line."""
        return cls(fields.text("reason"))


@dataclass(frozen=True, slots=True)
class LifeState:
    """Keep this 32-bit word of the user's over all attempts of the chain."""

    op: ClassVar[str] = "life_state"
    state: int

    @classmethod
    def read(cls, fields: _Fields) -> LifeState:
        """From the fields of a line."""
        return cls(fields.integer("state", -(2**31), 2**32 - 1))


Request = Hello | Watch | Received | Progress | Checkpoint | Release | Fail | LifeState
_REQUESTS: dict[str, type[Request]] = {
    kind.op: kind
    for kind in (Hello, Watch, Received, Progress, Checkpoint, Release, Fail, LifeState)
}


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `hello`: whose attempt this is and what it starts from."""

    kind: ClassVar[str] = "welcome"
    job: str
    chain: str
    attempt: int
    life_state: int = 0
    restore_step: int | None = None
    restore_path: str | None = None
    version: int = VERSION

    @classmethod
    def read(cls, fields: _Fields) -> Welcome:
        """From the fields of a line."""
        return cls(
            fields.text("job"),
            fields.text("chain"),
            fields.integer("attempt"),
            fields.integer("life_state", -(2**31), 2**32 - 1),
            fields.integer_or_none("restore_step"),
            fields.text_or_none("restore_path"),
            fields.integer("version", 1),
        )


@dataclass(frozen=True, slots=True)
class Change:
    """The answer to `watch`. Time is told as what is left of it: clocks may differ."""

    kind: ClassVar[str] = "change"
    revision: int
    suspend_code: SuspendCode = SuspendCode.NONE
    seconds_left: float | None = None
    reason: str = ""

    @classmethod
    def read(cls, fields: _Fields) -> Change:
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
    def read(cls, _fields: _Fields) -> Done:
        """From the fields of a line."""
        return cls()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Not done, and why. After a `bad_…` code the server closes the connection."""

    kind: ClassVar[str] = "refusal"
    code: str
    message: str

    @classmethod
    def read(cls, fields: _Fields) -> Refusal:
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
    body = _object(line)
    op = body.get("op")
    kind = _REQUESTS.get(op) if isinstance(op, str) else None
    if kind is None:
        known = ", ".join(_REQUESTS)
        raise ProtocolError("bad_operation", f"unknown operation {op!r:.80}; there are: {known}")
    return kind.read(_Fields(kind.op, body))


def parse_reply(line: bytes) -> Reply:
    """What the server answered; `ProtocolError` for anything that is no answer."""
    body = _object(line)
    name = body.get("kind")
    kind = _REPLIES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError("bad_reply", f"unknown kind of reply {name!r:.80}")
    return kind.read(_Fields(kind.kind, body))


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > LINE_BYTES_MAX:
        raise ProtocolError("bad_line", f"a line exceeds {LINE_BYTES_MAX} bytes")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("bad_line", f"{line[:60]!r} is no JSON object") from error
    if not isinstance(body, dict):
        raise ProtocolError("bad_line", f"{line[:60]!r} is no JSON object")
    return body
