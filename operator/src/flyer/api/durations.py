"""Durations as manifests write them: "30m", "24h", "1h30m", "500ms".

One value has one canonical text, which is also a duration of Go and therefore of Kubernetes' CEL.
A bare number is refused: seconds and minutes look alike in a manifest.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError, core_schema

from flyer.api.rules import Rule, message_expression, rules

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue

_UNIT_MS = {"h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
# These digit limits keep every sum inside 64 bits of nanoseconds, which is what CEL computes with.
_PATTERN = r"^(0|([0-9]{1,5}h)?([0-9]{1,7}m)?([0-9]{1,9}s)?([0-9]{1,12}ms)?)$"
_TERM = re.compile(r"([0-9]+)(ms|h|m|s)")
# Longer is a mistake (an extra digit), and keeps every sum inside 64 bits of nanoseconds.
_HOURS_MAX = 10 * 366 * 24


@functools.total_ordering
class Duration:
    """A length of time, whole milliseconds, never negative."""

    __slots__ = ("milliseconds",)
    milliseconds: int

    def __init__(self, text: str) -> None:
        """Parse `text`; raises ValueError naming the value and the remedy."""
        object.__setattr__(self, "milliseconds", _parse_ms(text))

    @classmethod
    def of_seconds(cls, seconds: float) -> Duration:
        """The duration of `seconds`, rounded to milliseconds."""
        duration = cls.__new__(cls)
        object.__setattr__(duration, "milliseconds", round(seconds * 1000))
        return duration

    @property
    def seconds(self) -> float:
        """The length in seconds."""
        return self.milliseconds / 1000

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Duration is immutable: cannot set {name!r} to {value!r}")

    def __str__(self) -> str:
        if self.milliseconds == 0:
            return "0s"
        rest, parts = self.milliseconds, []
        for unit, unit_ms in _UNIT_MS.items():
            count, rest = divmod(rest, unit_ms)
            if count:
                parts.append(f"{count}{unit}")
        return "".join(parts)

    def __repr__(self) -> str:
        return f"Duration({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Duration) and self.milliseconds == other.milliseconds

    def __lt__(self, other: Duration) -> bool:
        return self.milliseconds < other.milliseconds

    def __hash__(self) -> int:
        return hash(self.milliseconds)

    def __reduce__(self) -> tuple[type[Duration], tuple[str]]:
        return (Duration, (str(self),))

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                str, return_schema=core_schema.str_schema(), when_used="always"
            ),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string", "pattern": _PATTERN, "minLength": 1, "maxLength": 40}

    @classmethod
    def _validate(cls, value: object) -> Duration:
        if isinstance(value, Duration):
            return value
        if not isinstance(value, str):
            raise PydanticCustomError(
                "duration_type", "is not a duration: write a text with a unit, such as 30m or 24h"
            )
        try:
            return cls(value)
        except ValueError as error:
            raise PydanticCustomError("duration_text", "{why}", {"why": str(error)}) from error


def _parse_ms(text: str) -> int:
    if not text or not re.fullmatch(_PATTERN, text):
        raise ValueError(
            "is not a duration: write hours, minutes, seconds or milliseconds in this order, "
            "such as 30m, 24h, 1h30m or 500ms"
        )
    total_ms = sum(int(count) * _UNIT_MS[unit] for count, unit in _TERM.findall(text))
    if total_ms > _HOURS_MAX * _UNIT_MS["h"]:
        raise ValueError(f"is too long: the longest duration is {_HOURS_MAX}h")
    return total_ms


@dataclass(frozen=True, slots=True)
class AboveZero:
    """Marks a limit that may not be nothing: `Annotated[Duration, AboveZero(...)]`."""

    field: str
    unlimited: str  # what to do for no limit

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        rule = Rule(
            "duration(self) > duration('0s')",
            f"{self.field}: {self._why}",
            message_expression(f"{self.field}: %s {self._why}", "self"),
        )
        return {**handler(schema), **rules(rule)}

    @property
    def _why(self) -> str:
        return f"would end immediately: {self.unlimited} for no limit"

    def _check(self, duration: Duration) -> Duration:
        if duration.milliseconds == 0:
            raise ValueError(self._why)
        return duration


__all__ = ["AboveZero", "Duration"]
