"""Tables of the in-memory API server: the versions of objects and the history of changes."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from fakekube.apiserver.kinds import Kind

__all__ = ["Change", "Entry", "Object", "Table"]

Object = dict[str, Any]

HISTORY_MAX = 100_000


class Entry:
    """One version of one object, with its encoding once that was requested."""

    __slots__ = ("_encoded", "object", "version")

    def __init__(self, value: Object, version: int) -> None:
        self.object = value
        self.version = version
        self._encoded: bytes | None = None

    @property
    def encoded(self) -> bytes:
        """The object as JSON."""
        if self._encoded is None:
            self._encoded = json.dumps(self.object, separators=(",", ":")).encode()
        return self._encoded


@dataclass(frozen=True, slots=True)
class Change:
    """One change; `before` is None for a new object, `after` holds the last version."""

    version: int
    deleted: bool
    before: Entry | None
    after: Entry


@dataclass(slots=True)
class Table:
    """All objects of one kind, and their latest changes."""

    kind: Kind
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    history: deque[Change] = field(default_factory=lambda: deque(maxlen=HISTORY_MAX))
    forgotten: int = 0  # versions up to this one are no longer in the history
    watchers: set[Callable[[Change], None]] = field(default_factory=set)
    checks: list[Callable[[Object | None, Object], str]] = field(default_factory=list)
