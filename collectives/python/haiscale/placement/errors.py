"""Rules of placement, and the error of a layout that breaks one."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LayoutError", "Rule", "named"]

NAMED_MAX: Final = 8
"""Ranks or nodes that a message names before it counts the others."""


class Rule(StrEnum):
    """The rules of placement."""

    SIZES = "sizes-fill-the-world"
    TENSOR = "tp-in-nvlink"
    STAGE = "stage-per-node"
    SHARD = "shard-in-zone"
    EXPERT = "ep-in-nodes"
    CROSSING = "one-crossing"
    EVEN = "even-nodes"


class LayoutError(ValueError):
    """A layout that breaks a rule; `rule`, `ranks`, `nodes`, `problem` and `remedy` say which."""

    def __init__(
        self,
        rule: Rule,
        problem: str,
        remedy: str,
        *,
        ranks: Sequence[int] = (),
        nodes: Sequence[str] = (),
    ) -> None:
        super().__init__(f"rule {rule}: {problem}: {remedy}")
        self.rule = rule
        self.problem = problem
        self.remedy = remedy
        self.ranks = tuple(ranks)
        self.nodes = tuple(nodes)


def named(items: Sequence[object]) -> str:
    """The items, the first ones if there are many."""
    shown = ", ".join(str(item) for item in items[:NAMED_MAX])
    return shown if len(items) <= NAMED_MAX else f"{shown} and {len(items) - NAMED_MAX} more"
