"""Sequential models of what the clients share: names of a few directories, and blocks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.chaos.linearizability import Operation

__all__ = ["DONE", "Block", "Names", "Slots"]

DONE = 0
"""Result of a successful operation that returns nothing."""
UNKNOWN_INODES = 1 << 62
"""Inode numbers from here stand for inodes whose number no client has seen yet."""

Slots = tuple[int, ...]
"""The inode of each name: 0 if it does not exist, negative for a directory."""


class Names:
    """The names of some directories, as one object: renames and links concern two of them.

    The directories themselves stay. Each has `names_each` names; a call names its slot.
    """

    def __init__(self, directories: int, names_each: int) -> None:
        self.initial: Slots = (0,) * (directories * names_each)
        self._names_each = names_each
        self._calls: dict[str, Callable[[Slots, Operation], tuple[Slots, str | int]]] = {
            "create": self._create,
            "mkdir": self._create,
            "unlink": self._unlink,
            "rmdir": self._rmdir,
            "rename": self._rename,
            "link": self._link,
            "stat": self._stat,
            "list": self._list,
        }

    def apply(self, state: Slots, operation: Operation) -> Slots | None:
        """See `Model`."""
        after, expected = self._calls[str(operation.call[0])](state, operation)
        result = operation.result
        if result is None or result == expected:
            return after
        return self._identified(state, operation, expected)

    def only_reads(self, operation: Operation) -> bool:
        """See `Model`."""
        return isinstance(operation.result, str) or operation.call[0] in ("stat", "list")

    def _identified(self, state: Slots, operation: Operation, expected: str | int) -> Slots | None:
        """The state in which an inode that no client had seen yet is the one that this one saw."""
        result = operation.result
        if operation.call[0] != "stat" or isinstance(result, str) or isinstance(expected, str):
            return None
        assert result is not None
        same_kind = (result < 0) == (expected < 0)
        known = abs(expected) < UNKNOWN_INODES or result in state
        if known or not same_kind:
            return None
        return tuple(result if slot == expected else slot for slot in state)

    def _create(self, state: Slots, operation: Operation) -> tuple[Slots, str | int]:
        kind, slot = str(operation.call[0]), int(operation.call[1])
        if state[slot]:
            return state, "exists"
        result = operation.result
        if result is None:
            # One number for each call: a client has one operation at a time.
            inode = UNKNOWN_INODES + (operation.called_ns << 8) + (operation.client & 0xFF)
            result = -inode if kind == "mkdir" else inode
        if isinstance(result, str):
            return state, "success"
        return _put(state, slot, result), result

    def _unlink(self, state: Slots, operation: Operation) -> tuple[Slots, str | int]:
        slot = int(operation.call[1])
        if not state[slot]:
            return state, "missing"
        if state[slot] < 0:
            return state, "is a directory"
        return _put(state, slot, 0), DONE

    def _rmdir(self, state: Slots, operation: Operation) -> tuple[Slots, str | int]:
        slot = int(operation.call[1])
        if not state[slot]:
            return state, "missing"
        if state[slot] > 0:
            return state, "not a directory"
        return _put(state, slot, 0), DONE

    def _rename(self, state: Slots, operation: Operation) -> tuple[Slots, str | int]:
        source, destination = int(operation.call[1]), int(operation.call[2])
        moved, replaced = state[source], state[destination]
        if not moved:
            return state, "missing"
        if moved == replaced:
            return state, DONE  # The same name, or two names of one file.
        if replaced and (moved < 0) != (replaced < 0):
            return state, "not a directory" if moved < 0 else "is a directory"
        return _put(_put(state, destination, moved), source, 0), DONE

    def _link(self, state: Slots, operation: Operation) -> tuple[Slots, str | int]:
        source, destination = int(operation.call[1]), int(operation.call[2])
        if not state[source]:
            return state, "missing"
        if state[source] < 0:
            return state, "not permitted"
        if state[destination]:
            return state, "exists"
        return _put(state, destination, state[source]), DONE

    def _stat(self, state: Slots, operation: Operation) -> tuple[Slots, str | int]:
        return state, state[int(operation.call[1])] or "missing"

    def _list(self, state: Slots, operation: Operation) -> tuple[Slots, str | int]:
        """The names that exist, as bits."""
        first = int(operation.call[1]) * self._names_each
        slots = state[first : first + self._names_each]
        return state, sum(1 << number for number, slot in enumerate(slots) if slot)


def _put(state: Slots, slot: int, value: int) -> Slots:
    return (*state[:slot], value, *state[slot + 1 :])


class Block:
    """A part of a file that is written and read as a whole; every write has another value."""

    initial = 0

    def apply(self, state: int, operation: Operation) -> int | None:
        """See `Model`."""
        if operation.call[0] == "write":
            return int(operation.call[1])
        return state if operation.result in (state, None) else None

    def only_reads(self, operation: Operation) -> bool:
        """See `Model`."""
        return operation.call[0] == "read"
