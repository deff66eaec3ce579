"""What the oracle of a file with several writers lets pass, and what it does not."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from shared_file import CELL_BYTES, Cell

OLD, NEW, NEWEST = (bytes([number]) * CELL_BYTES for number in (1, 2, 3))
ZEROS = bytes(CELL_BYTES)


def test_a_read_gives_any_write_that_runs_and_the_last_that_has_ended() -> None:
    cell = Cell()
    begun = time.monotonic()
    cell.check(ZEROS, begun, "unwritten")
    write = cell.begin(OLD)
    for _ in range(2):
        cell.check(ZEROS, time.monotonic(), "not acknowledged")
    cell.acknowledged(write)
    cell.check(OLD, time.monotonic(), "acknowledged")
    cell.check(ZEROS, begun, "a read that began before the write")
    one, other = cell.begin(NEW), cell.begin(NEWEST)
    cell.acknowledged(one)
    cell.acknowledged(other)
    for value in (NEWEST, NEW):
        cell.check(value, time.monotonic(), "either of two that ran side by side")


def test_what_was_replaced_or_nobody_wrote_is_an_error() -> None:
    cell = Cell()
    for value in (OLD, NEW):
        cell.acknowledged(cell.begin(value))
    for read in (OLD, ZEROS):
        with pytest.raises(AssertionError, match="had replaced"):
            cell.check(read, time.monotonic(), "stale")
    for read in (NEWEST, NEW[:100] + OLD[100:]):
        with pytest.raises(AssertionError, match="nobody wrote"):
            cell.check(read, time.monotonic(), "invented")


def test_a_write_that_was_read_has_taken_effect_also_if_it_was_never_acknowledged() -> None:
    cell = Cell()
    cell.acknowledged(cell.begin(OLD))
    cell.begin(NEW)
    cell.check(OLD, time.monotonic(), "not yet")
    cell.check(NEW, time.monotonic(), "now")
    with pytest.raises(AssertionError, match="had replaced"):
        cell.check(OLD, time.monotonic(), "back in time")
