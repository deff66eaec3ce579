"""Exceptions.

`CollectiveError` is raised by the engine when an operation fails; its fields name the rank, the
phase and the peer that caused it. The others are raised before a group exists.
"""

from __future__ import annotations

from hfreduce._native import CollectiveError

TYPE_CHECKING = False  # as typing's, which takes longer to load than all the rest
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CollectiveError", "RendezvousError", "SettingError", "TopologyError"]


class TopologyError(ValueError):
    """An invalid topology file; the text names the file, the field and the value."""

    def __init__(self, source: str, field: str, problem: str) -> None:
        super().__init__(f"{source}: {field}: {problem}")
        self.source = source
        self.field = field
        self.problem = problem


class SettingError(ValueError):
    """An environment variable with an invalid value."""

    def __init__(self, name: str, value: str, expected: str) -> None:
        super().__init__(f"{name}={value!r}: expected {expected}")
        self.name = name
        self.value = value


class RendezvousError(RuntimeError):
    """The rendezvous of a group failed; `absent` are the ranks that did not arrive."""

    def __init__(self, detail: str, *, rank: int, phase: str, absent: Sequence[int] = ()) -> None:
        super().__init__(f"rank {rank}, {phase}: {detail}")
        self.rank = rank
        self.phase = phase
        self.absent = tuple(absent)
        self.detail = detail
