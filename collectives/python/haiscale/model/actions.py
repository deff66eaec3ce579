"""Actions of a simulated rank, and the collectives that they name.

Times are in seconds, or in any other unit that all actions of a simulation share.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["Action", "Collective", "Compute", "Finish", "Kind", "Receive", "Send", "Start"]


class Kind(IntEnum):
    """Kinds of traffic, in the order of their priority where transfers take turns."""

    PIPELINE = 0
    """Activations and their gradients: the receiver computes nothing until they arrive."""
    EXPERTS = 1
    """Tokens on the way to their experts and back."""
    GRADIENTS = 2
    """Sums over data-parallel ranks, and gathers of sharded parameters."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Computation."""

    seconds: float
    name: Hashable = ""


@dataclass(frozen=True, slots=True)
class Send:
    """A message to another rank."""

    to: int
    name: Hashable
    """Unique for the pair of ranks within a simulation."""
    seconds: float
    """Time of the transfer with the whole card. Between ranks of one node it uses no card."""
    blocking: bool = False
    """Whether the rank waits until the message has arrived."""
    kind: Kind = Kind.PIPELINE


@dataclass(frozen=True, slots=True)
class Receive:
    """Waits for a message."""

    source: int
    name: Hashable


@dataclass(frozen=True, slots=True)
class Start:
    """Starts this rank's part of a collective, without waiting."""

    collective: Hashable


@dataclass(frozen=True, slots=True)
class Finish:
    """Waits for the end of a collective."""

    collective: Hashable


Action: TypeAlias = Compute | Send | Receive | Start | Finish


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation.

    It starts when all its ranks have started it. On each of their nodes it is one transfer; it ends
    when the last of them has ended.
    """

    ranks: tuple[int, ...]
    seconds: float
    """Time of the transfer of each node with the whole card."""
    kind: Kind = Kind.GRADIENTS
    level: int = 0
    """Order among the waiting transfers of one kind: lower levels first, then by arrival."""
    on_card: bool = True
    """False for an operation inside nodes: it takes its time and no card."""
