"""Parser of untrusted protocol lines: one JSON object each, every field checked. Pure.

A `Message` is a dataclass whose annotations name the checks of its fields, such as `Integer`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, get_type_hints

from flyer.job.limits import is_text, readable

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "LINE_BYTES_MAX",
    "Boolean",
    "Fields",
    "Flag",
    "Integer",
    "Message",
    "Metrics",
    "OptionalInteger",
    "OptionalText",
    "OptionalWords",
    "Positive",
    "ProtocolError",
    "Text",
    "Words",
    "parse_object",
    "part",
]

_T = TypeVar("_T", bound="Message")

LINE_BYTES_MAX = 64 * 1024
TEXT_CHARACTERS_MAX = 8 * 1024  # so that any escaped message fits a line
METRICS_MAX = 32
INTEGER_MAX = 2**63 - 1


class ProtocolError(Exception):
    """An invalid message: `code` is for programs, the text names the field and the value."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Fields:
    """The object of a line, or a nested one, read field by field.

    Each error names operation, field and value.
    """

    def __init__(self, op: str, body: dict[str, Any]) -> None:
        self._op = op
        self._body = body

    def integer(self, name: str, low: int = 0, high: int = INTEGER_MAX) -> int:
        """A whole number within bounds."""
        value = self._body.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._bad(name, f"an integer from {low} to {high}")
        return value

    def object_or_none(self, name: str) -> Fields | None:
        """A nested object; errors name its fields `op.name`."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._bad(name, "an object or null")
        return Fields(f"{self._op}.{name}", value)

    def raw(self, name: str) -> Any:
        """The unchecked value."""
        return self._body.get(name)

    def integer_or_none(self, name: str, low: int = 0, high: int = INTEGER_MAX) -> int | None:
        """The same, or null, or absent."""
        return None if self._body.get(name) is None else self.integer(name, low, high)

    def number_or_none(self, name: str) -> float | None:
        """A finite number, or null, or absent."""
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._bad(name, "a number or null")
        return self._finite(name, value)

    def number(self, name: str, default: float) -> float:
        """A finite number; the default for null or absent."""
        value = self.number_or_none(name)
        return default if value is None else value

    def seconds(self, name: str, default: float, low: float = 0.0, high: float = math.inf) -> float:
        """A number, limited to a range; the default for null or absent."""
        return min(max(self.number(name, default), low), high)

    def text(
        self, name: str, default: str | None = None, characters_max: int = TEXT_CHARACTERS_MAX
    ) -> str:
        """A string of bounded length, unchanged."""
        value = self._string(name, default, characters_max)
        if not is_text(value):
            raise self._bad(name, "valid UTF-8 text")
        return value

    def text_or_none(self, name: str, characters_max: int = TEXT_CHARACTERS_MAX) -> str | None:
        """The same, or null, or absent."""
        return None if self._body.get(name) is None else self.text(name, None, characters_max)

    def words(self, name: str, characters_max: int = TEXT_CHARACTERS_MAX) -> str:
        """A string for display: characters that UTF-8 cannot encode are replaced."""
        return readable(self._string(name, None, characters_max))

    def words_or_none(self, name: str, characters_max: int = TEXT_CHARACTERS_MAX) -> str | None:
        """The same, or null, or absent."""
        return None if self._body.get(name) is None else self.words(name, characters_max)

    def boolean(self, name: str, *, default: bool | None = None) -> bool:
        """True or false."""
        value = self._body.get(name, default)
        if not isinstance(value, bool):
            raise self._bad(name, "true or false")
        return value

    def metrics(self, name: str) -> dict[str, float]:
        """At most METRICS_MAX finite numbers by name."""
        value = self._body.get(name, {})
        if not isinstance(value, dict) or len(value) > METRICS_MAX:
            raise self._bad(name, f"an object of at most {METRICS_MAX} numbers")
        metrics = {}
        for key, number in value.items():
            if isinstance(number, bool) or not isinstance(number, int | float) or len(key) > 64:
                raise self._bad(f"{name}.{key[:64]}", "a number under a name of at most 64 letters")
            if not is_text(key):
                raise self._bad(name, "an object whose names are valid UTF-8 text")
            metrics[key] = self._finite(f"{name}.{key}", number)
        return metrics

    def _string(self, name: str, default: str | None, characters_max: int) -> str:
        value = self._body.get(name, default)
        if not isinstance(value, str) or len(value) > characters_max:
            raise self._bad(name, f"a string of at most {characters_max} characters")
        return value

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


def parse_object(line: bytes, bytes_max: int = LINE_BYTES_MAX) -> dict[str, Any]:
    """The JSON object of a line; `ProtocolError` for anything else."""
    if len(line) > bytes_max:
        raise ProtocolError("bad_line", f"a line exceeds {bytes_max} bytes")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("bad_line", f"{line[:60]!r} is not a JSON object") from error
    if not isinstance(body, dict):
        raise ProtocolError("bad_line", f"{line[:60]!r} is not a JSON object")
    return body


class Message:
    """A dataclass that is read from the fields of an object."""

    __slots__ = ()

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """Check each field. ProtocolError: one is invalid."""
        checks = _checks(cls)  # type: ignore[arg-type]  # a class is hashable
        return cls(**{name: check(fields, name) for name, check in checks})


@functools.cache
def _checks(kind: type[Message]) -> list[tuple[str, Callable[[Fields, str], Any]]]:
    """The names of the fields, and the methods of `Fields` that their annotations name."""
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return [(name, hints[name].__metadata__[0]) for name in names]


def part(kind: type[_T]) -> Callable[[Fields, str], _T | None]:
    """The check of a field that is a nested message, or null, or absent."""

    def check(fields: Fields, name: str) -> _T | None:
        nested = fields.object_or_none(name)
        return None if nested is None else kind.read(nested)

    return check


Integer = Annotated[int, Fields.integer]
Positive = Annotated[int, partial(Fields.integer, low=1)]
OptionalInteger = Annotated[int | None, Fields.integer_or_none]
Text = Annotated[str, Fields.text]
OptionalText = Annotated[str | None, Fields.text_or_none]
Words = Annotated[str, Fields.words]
OptionalWords = Annotated[str | None, Fields.words_or_none]
Boolean = Annotated[bool, Fields.boolean]
Flag = Annotated[bool, partial(Fields.boolean, default=False)]
Metrics = Annotated[dict[str, float], Fields.metrics]
