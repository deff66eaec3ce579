"""Timestamps: seconds since the epoch in Python, RFC 3339 in UTC with milliseconds in objects.

Milliseconds are exact in both forms, so a time that went through an object compares equal.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema


def quantize(seconds: float) -> float:
    """The time at the resolution that objects keep: whole milliseconds."""
    return round(seconds * 1000) / 1000


def format_timestamp(seconds: float) -> str:
    """`2026-11-20T14:05:00.250Z`."""
    moment = datetime.fromtimestamp(round(seconds * 1000) / 1000, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_timestamp(value: object) -> float:
    """A time from RFC 3339 text, from a datetime with a zone, or from seconds since the epoch."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        moment = None
    if isinstance(moment, datetime) and moment.tzinfo is not None:
        return quantize(moment.timestamp())
    if isinstance(moment, int | float) and not isinstance(moment, bool):
        return quantize(moment)
    raise ValueError("is not a time with a zone: write RFC 3339, such as 2026-11-20T14:05:00Z")


Timestamp = Annotated[
    float,
    BeforeValidator(parse_timestamp),
    PlainSerializer(format_timestamp, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]

__all__ = ["Timestamp", "format_timestamp", "parse_timestamp", "quantize"]
