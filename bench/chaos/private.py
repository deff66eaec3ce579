"""Contents that private directories must have: exactly the acknowledged changes. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bench.chaos.linearizability import Operation

__all__ = ["expected", "lost"]


def expected(operations: Iterable[Operation]) -> list[dict[str, int]]:
    """The possible contents of a directory of one worker: path and value of each file.

    More than one if the outcome of the last operation is unknown. A `put` has two steps, the
    creation and the data: its file may be there without data, with the value 0.
    """
    contents: dict[str, int] = {}
    for operation in operations:
        before, contents = contents, _after(contents, operation)
        if operation.result is None:
            created = {str(operation.call[1]): 0} if operation.call[0] == "put" else {}
            return [before, contents, before | created]
    return [contents]


def _after(contents: dict[str, int], operation: Operation) -> dict[str, int]:
    kind, path = str(operation.call[0]), str(operation.call[1])
    after = dict(contents)
    if kind == "put":
        after[path] = int(operation.call[2])
    elif kind == "drop":
        del after[path]
    elif (destination := str(operation.call[2])) != path:
        after[destination] = after.pop(path)
    return after


def lost(possible: list[dict[str, int]], found: Mapping[str, int]) -> list[str]:
    """Differences from the closest of the possible contents."""
    differences = [_differences(each, found) for each in possible]
    return min(differences, key=len)


def _differences(wanted: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    return [
        f"`{path}` is {found.get(path, 'absent')}, it must be {wanted.get(path, 'absent')}"
        for path in sorted({*wanted, *found})
        if wanted.get(path) != found.get(path)
    ]
