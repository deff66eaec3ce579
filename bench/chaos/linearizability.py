"""Linearizability checker: the search of Wing and Gong, one object at a time. Pure.

A history of an object is linearizable if its operations can be ordered so that each takes effect
at one moment between its call and its return, with the result that it had (Herlihy and Wing 1990).
Histories of separate objects are checked separately, because linearizability is local.

The search passes over calls and returns in the order of time and keeps every *configuration* that
is possible: a state, and the open operations that have taken effect in it (Lowe, "Testing for
linearizability", 2017). A returned operation must have taken effect, so configurations without it
are extended by open operations until it has. Three rules keep their number small, and lose none:

- An operation that changes no state (a lookup, a refusal) takes effect at once in a state that it
  fits: whatever could follow without it can follow with it.
- A configuration is kept once, however it was reached (Wing and Gong's search with the memory of
  Lowe's).
- An operation without a known outcome, because its caller was killed or its deadline passed, never
  returns: it may take effect at any later moment, or never. So of two configurations with the same
  state, one whose operations of this kind are among those of the other replaces it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

__all__ = ["CONFIGURATIONS_MAX", "Check", "Model", "Operation", "check"]

CONFIGURATIONS_MAX = 200_000
"""Configurations of one moment; more are reported as undecided."""
CONTEXT_OPERATIONS = 12
"""Operations before a violation that its report shows."""

State = TypeVar("State", bound="Hashable")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on one object."""

    client: int
    call: tuple[str | int, ...]
    result: str | int | None
    """None: the outcome is unknown."""
    called_ns: int
    returned_ns: int
    """Without meaning if the outcome is unknown."""


class Model(Protocol[State]):
    """A sequential object."""

    initial: State

    def apply(self, state: State, operation: Operation) -> State | None:
        """The state after an operation; None if it cannot have its result in this state.

        An operation without a known outcome is possible in every state.
        """
        ...

    def only_reads(self, operation: Operation) -> bool:
        """Whether it changes none of the states in which it has its result."""
        ...


@dataclass(frozen=True, slots=True)
class Check:
    """The result for one object."""

    operations: int
    linearizable: bool | None
    """None: more than `CONFIGURATIONS_MAX` configurations."""
    detail: str = ""
    """The operation that does not fit, and what preceded it."""


class _Smallest(Generic[State]):
    """Configurations without those that another one replaces."""

    def __init__(self, unknown: int) -> None:
        self._unknown = unknown
        self._sets: dict[tuple[State, int], list[int]] = {}
        self.count = 0

    def add(self, state: State, done: int) -> bool:
        """Adds a configuration, unless there is one that replaces it."""
        unknown = done & self._unknown
        sets = self._sets.setdefault((state, done & ~self._unknown), [])
        if any(each & unknown == each for each in sets):
            return False
        before = len(sets)
        sets[:] = [each for each in sets if each & unknown != unknown]
        sets.append(unknown)
        self.count += len(sets) - before
        return True

    def all(self) -> Iterator[tuple[State, int]]:
        """The configurations."""
        for (state, known), sets in self._sets.items():
            for unknown in sets:
                yield state, known | unknown


class _Search(Generic[State]):
    def __init__(self, model: Model[State], operations: Sequence[Operation]) -> None:
        self._model = model
        self._operations = operations
        self._configurations: set[tuple[State, int]] = {(model.initial, 0)}
        # Each open operation has a bit; bits are used again.
        self._open: dict[int, Operation] = {}
        self._free: list[int] = []
        self._unknown = 0
        """Bits of the open operations without a known outcome."""
        self._reads = 0
        """Bits of the open operations that change no state."""

    def call(self, operation: Operation) -> int:
        """Opens an operation; returns its bit."""
        bit = self._free.pop() if self._free else 1 << len(self._open)
        self._open[bit] = operation
        apply = self._model.apply
        if operation.result is None:
            self._unknown |= bit
        elif self._model.only_reads(operation):
            self._reads |= bit
            self._configurations = {
                (state, done | bit if apply(state, operation) == state else done)
                for state, done in self._configurations
            }
        return bit

    def returns(self, bit: int) -> bool | None:
        """Closes an operation: whether it can have taken effect; None if undecided."""
        kept: _Smallest[State] = _Smallest(self._unknown)
        seen: _Smallest[State] = _Smallest(self._unknown)
        waiting = []
        for each in self._configurations:
            if each[1] & bit:
                kept.add(*each)
            elif seen.add(*each):
                waiting.append(each)
        while waiting:
            for following in self._followers(*waiting.pop()):
                if following[1] & bit:
                    kept.add(*following)
                elif seen.add(*following):
                    waiting.append(following)
            if seen.count + kept.count > CONFIGURATIONS_MAX:
                return None
        if not kept.count:
            return False
        del self._open[bit]
        self._reads &= ~bit
        self._free.append(bit)
        self._configurations = {(state, done & ~bit) for state, done in kept.all()}
        return True

    def _followers(self, state: State, done: int) -> list[tuple[State, int]]:
        """Configurations after one more open operation."""
        following = []
        for bit, operation in self._open.items():
            if done & bit:
                continue
            after = self._model.apply(state, operation)
            if after is not None:
                following.append((after, self._with_reads_that_fit(after, done | bit)))
        return following

    def _with_reads_that_fit(self, state: State, done: int) -> int:
        """Adds the open operations that have their result in this state and change none."""
        for bit, operation in self._open.items():
            is_read = self._reads & bit and not done & bit
            # A lookup of an unknown inode changes what is known about the state.
            if is_read and self._model.apply(state, operation) == state:
                done |= bit
        return done

    def describe(self, number: int) -> str:
        """The operation that does not fit, the possible states, and the operations before it."""
        failed = self._operations[number]
        before = sorted(
            (each for each in self._operations if each.called_ns < failed.returned_ns),
            key=lambda each: each.called_ns,
        )[-CONTEXT_OPERATIONS:]
        states = sorted({str(state) for state, _ in self._configurations})[:8]
        lines = [_line(each, failed) for each in before]
        return "\n".join([f"possible states: {'; '.join(states)}", *lines])


def _line(operation: Operation, failed: Operation) -> str:
    def time(ns: int) -> str:
        return f"{(ns - failed.called_ns) / 1e6:+.3f}"

    returned = "" if operation.result is None else time(operation.returned_ns)
    call = " ".join(map(str, operation.call))
    mark = " <- impossible" if operation is failed else ""
    return (
        f"client {operation.client}: {call} = {operation.result} "
        f"[{time(operation.called_ns)} .. {returned}] ms{mark}"
    )


def check(model: Model[State], operations: Sequence[Operation]) -> Check:
    """Checks the history of one object."""
    events = []
    for number, operation in enumerate(operations):
        # Of equal times the call comes first: the operations were concurrent.
        events.append((operation.called_ns, 0, number))
        if operation.result is not None:
            events.append((operation.returned_ns, 1, number))
    events.sort()
    search = _Search(model, operations)
    bits: dict[int, int] = {}
    for _, returns, number in events:
        if not returns:
            bits[number] = search.call(operations[number])
            continue
        possible = search.returns(bits.pop(number))
        if possible is None:
            return Check(len(operations), None, "too many configurations")
        if not possible:
            return Check(len(operations), False, search.describe(number))
    return Check(len(operations), True)
