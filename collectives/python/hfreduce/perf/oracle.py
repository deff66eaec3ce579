"""Inputs of every rank and expected results, element by element, in exact arithmetic.

Element i of a rank's data depends only on i modulo `PERIOD`, so one period of exact arithmetic
determines the whole buffer. The numbers are chosen so that every partial sum can be
written in the type: any order of additions gives the same bits, and one wrong bit is an error.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hfreduce.perf.formats import Format

__all__ = ["OPERATIONS", "PERIOD", "data", "expected", "fill", "supports", "wrong"]

PERIOD = 251
"""A prime: consecutive chunks, blocks and vectors start at different elements."""

OPERATIONS = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor")
_BITWISE = OPERATIONS[5:]

_FACTORS_MAX = 2
"""Ranks that bring another factor than one to a product: 4 can be written in every type."""

_TILE_PERIODS = 1024


def supports(kind: Format, op: str) -> bool:
    """True where the reduction is defined for the type."""
    if op == "avg":
        return kind.is_float
    return op not in _BITWISE or not kind.is_float


@lru_cache(maxsize=256)
def data(kind: Format, op: str, rank: int, ranks: int) -> tuple[Fraction, ...]:
    """One period of a rank's input."""
    return tuple(Fraction(_value(kind, op, rank, ranks, at)) for at in range(PERIOD))


@lru_cache(maxsize=64)
def expected(kind: Format, op: str, ranks: int) -> tuple[Fraction, ...]:
    """One period of the reduction over all ranks, not rounded."""
    columns = zip(*(data(kind, op, rank, ranks) for rank in range(ranks)), strict=True)
    return tuple(_COMBINE[op](column) for column in columns)


def fill(buffer: memoryview, kind: Format, values: Sequence[Fraction], start: int = 0) -> None:
    """Writes elements `start`, `start` + 1, … of the periodic values into the buffer."""
    tile = _tile(kind, tuple(values), start % PERIOD)
    for at in range(0, len(buffer), len(tile)):
        end = min(at + len(tile), len(buffer))
        buffer[at:end] = tile[: end - at]


def wrong(buffer: memoryview, kind: Format, values: Sequence[Fraction], start: int = 0) -> int:
    """Number of elements that differ from the result of `fill`."""
    tile = _tile(kind, tuple(values), start % PERIOD)
    count = 0
    for at in range(0, len(buffer), len(tile)):
        part = buffer[at : at + len(tile)]
        if part == tile[: len(part)]:
            continue
        step = kind.item_bytes
        count += sum(part[i : i + step] != tile[i : i + step] for i in range(0, len(part), step))
    return count


@lru_cache(maxsize=64)
def _tile(kind: Format, values: tuple[Fraction, ...], start: int) -> bytes:
    turned = values[start:] + values[:start]
    return b"".join(map(kind.encode, turned)) * _TILE_PERIODS


def _value(kind: Format, op: str, rank: int, ranks: int, at: int) -> int:
    mixed = at * 31 + rank * 7
    if op in _BITWISE:
        return mixed * 2654435761 % (kind.exact_max + 1)
    if op in ("min", "max"):
        most = min(kind.exact_max, 100)
        return mixed % (2 * most + 1) - most if kind.signed else mixed % (most + 1)
    if op == "prod":
        if (at + rank) % -(-ranks // _FACTORS_MAX):
            return 1
        return -2 if kind.signed and mixed % 2 else 2
    # Of many ranks only some bring something, so that no partial sum outgrows the type.
    limit = min(kind.exact_max, 1 << 12)
    bringing = min(ranks, limit // 2)
    if (at + rank) % -(-ranks // bringing):
        return 0
    amount = mixed % (limit // bringing) + 1
    return -amount if kind.signed and mixed % 3 == 0 else amount


def _product(column: Sequence[Fraction]) -> Fraction:
    result = Fraction(1)
    for value in column:
        result *= value
    return result


def _bitwise(combine: Callable[[int, int], int]) -> Callable[[Sequence[Fraction]], Fraction]:
    def over(column: Sequence[Fraction]) -> Fraction:
        result = int(column[0])
        for value in column[1:]:
            result = combine(result, int(value))
        return Fraction(result)

    return over


_COMBINE: dict[str, Callable[[Sequence[Fraction]], Fraction]] = {
    "sum": lambda column: sum(column, Fraction()),
    "avg": lambda column: sum(column, Fraction()) / len(column),
    "prod": _product,
    "min": min,
    "max": max,
    "band": _bitwise(int.__and__),
    "bor": _bitwise(int.__or__),
    "bxor": _bitwise(int.__xor__),
}
