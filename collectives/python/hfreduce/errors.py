"""What goes wrong, as types.

`CollectiveError` comes from the engine: an operation failed, and its fields say where and because
of whom. The others are raised before there is an operation.
"""

from __future__ import annotations

from hfreduce._native import CollectiveError

TYPE_CHECKING = False  # as typing's, which takes longer to load than all the rest
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CollectiveError", "RendezvousError", "SettingError", "TopologyError"]


class TopologyError(ValueError):
    """The topology file cannot be used; the text names the file, the field and the value."""

    def __init__(self, source: str, field: str, problem: str) -> None:
        super().__init__(f"{source}: {field}: {problem}")
        self.source = source
        self.field = field
        self.problem = problem


class SettingError(ValueError):
    """An environment variable of ours has a value that cannot be used."""

    def __init__(self, name: str, value: str, expected: str) -> None:
        super().__init__(f"{name}={value!r}: expected {expected}")
        self.name = name
        self.value = value


class RendezvousError(RuntimeError):
    """The ranks of a group did not find each other; `absent` are the ranks that never came."""

    def __init__(self, detail: str, *, rank: int, phase: str, absent: Sequence[int] = ()) -> None:
        super().__init__(f"rank {rank}, {phase}: {detail}")
        self.rank = rank
        self.phase = phase
        self.absent = tuple(absent)
        self.detail = detail
