"""Durations, times and statuses keep their values through objects and back."""

from __future__ import annotations

import copy
import pickle

import hypothesis.strategies as st
import pytest
from flyer.api import (
    AssignedNode,
    Assignment,
    Duration,
    FlyerJobStatus,
    JobHistory,
    Priority,
    SuspendCode,
    format_timestamp,
    parse_timestamp,
    quantize,
)
from hypothesis import given, settings
from pydantic import ValidationError


@pytest.mark.parametrize(
    ("text", "seconds", "canonical"),
    [
        ("30m", 1800, "30m"),
        ("24h", 86_400, "24h"),
        ("90m", 5400, "1h30m"),
        ("1h30m", 5400, "1h30m"),
        ("500ms", 0.5, "500ms"),
        ("60s", 60, "1m"),
        ("0", 0, "0s"),
    ],
)
def test_durations(text: str, seconds: float, canonical: str) -> None:
    assert Duration(text).seconds == seconds
    assert str(Duration(text)) == canonical
    assert Duration(canonical) == Duration(text)


@pytest.mark.parametrize("text", ["", "30", "m", "1.5h", "-1h", "1d", "30m1h", "1h ", "9999999h"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration|is too long"):
        Duration(text)


@settings(max_examples=200, derandomize=True)
@given(st.integers(0, 10**12))
def test_every_duration_has_one_text(milliseconds: int) -> None:
    duration = Duration.of_seconds(milliseconds / 1000)
    if milliseconds <= 10 * 366 * 24 * 3_600_000:
        assert Duration(str(duration)) == duration


def test_durations_are_values() -> None:
    minute = Duration("1m")
    assert pickle.loads(pickle.dumps(minute)) == copy.deepcopy(minute) == minute
    assert Duration("1s") < minute
    assert len({minute, Duration("60s")}) == 1
    with pytest.raises(AttributeError):
        minute.milliseconds = 3


@settings(max_examples=300, derandomize=True)
@given(st.floats(0, 4_000_000_000, allow_nan=False))
def test_times_are_the_same_after_an_object(seconds: float) -> None:
    now = quantize(seconds)
    assert parse_timestamp(format_timestamp(now)) == now


@pytest.mark.parametrize("value", ["yesterday", "2026-11-20T14:05:00", True, None, "", []])
def test_invalid_times_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a time with a zone"):
        parse_timestamp(value)


def test_a_status_survives_an_object() -> None:
    status = FlyerJobStatus(
        suspend_code=SuspendCode.RECEIVED,
        assignment=Assignment(
            epoch=3,
            nodes=(AssignedNode(name="a0", zone="A", first_rank=0),),
            reserved_at=1_800_000_000.25,
        ),
        history=JobHistory(id="x", attempt=2, user_state=2**32 - 1, submitted_at=1.5),
    )
    stored = status.to_object()
    assert stored["assignment"]["reservedAt"] == "2027-01-15T08:00:00.250Z"
    assert stored["suspendCode"] == 2
    assert "exits" in stored
    assert "pending" not in stored
    assert FlyerJobStatus.model_validate(stored) == status


def test_a_user_state_has_32_bits() -> None:
    with pytest.raises(ValidationError):
        JobHistory(user_state=2**32)


def test_priorities_are_in_the_order_of_their_numbers() -> None:
    levels = [priority.level for priority in Priority]
    assert levels == sorted(levels, reverse=True) == [50, 40, 30, 20, 10, 8, 5, 0, -1]
