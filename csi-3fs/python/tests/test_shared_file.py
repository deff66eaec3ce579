"""Results that the oracle of a file with several writers accepts and rejects."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from shared_file import CELL_BYTES, Cell

OLD, NEW, NEWEST = (bytes([number]) * CELL_BYTES for number in (1, 2, 3))
ZEROS = bytes(CELL_BYTES)


def test_a_read_may_return_a_concurrent_write_or_the_last_completed_one() -> None:
    cell = Cell()
    started = time.monotonic()
    cell.check(ZEROS, started, "unwritten")
    write = cell.start(OLD)
    for _ in range(2):
        cell.check(ZEROS, time.monotonic(), "not acknowledged")
    cell.acknowledged(write)
    cell.check(OLD, time.monotonic(), "acknowledged")
    cell.check(ZEROS, started, "a read that started before the write")
    first, second = cell.start(NEW), cell.start(NEWEST)
    cell.acknowledged(first)
    cell.acknowledged(second)
    for value in (NEWEST, NEW):
        cell.check(value, time.monotonic(), "either of two concurrent writes")


def test_a_replaced_write_and_unwritten_bytes_are_errors() -> None:
    cell = Cell()
    for value in (OLD, NEW):
        cell.acknowledged(cell.start(value))
    for content in (OLD, ZEROS):
        with pytest.raises(AssertionError, match="had replaced"):
            cell.check(content, time.monotonic(), "stale")
    for content in (NEWEST, NEW[:100] + OLD[100:]):
        with pytest.raises(AssertionError, match="bytes of no write"):
            cell.check(content, time.monotonic(), "invented")


def test_a_write_that_was_read_has_taken_effect_even_without_an_acknowledgement() -> None:
    cell = Cell()
    cell.acknowledged(cell.start(OLD))
    cell.start(NEW)
    cell.check(OLD, time.monotonic(), "not yet")
    cell.check(NEW, time.monotonic(), "now")
    with pytest.raises(AssertionError, match="had replaced"):
        cell.check(OLD, time.monotonic(), "back in time")
