"""Reported facts of one gang that its job's status does not contain yet. Pure.

A sidecar ends once its last report is acknowledged, and cannot repeat it to the next leader.
Therefore durable facts are acknowledged when they are stored, not when they arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.engine import CheckpointReported, UserStateSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flyer.engine import Event

__all__ = ["Unstored"]

_Key = tuple[int, type]


class Unstored:
    """At most one event of each kind for each node rank: a newer one replaces the older."""

    def __init__(self) -> None:
        self._newest: dict[_Key, Event] = {}
        self._keys: dict[Event, set[_Key]] = {}

    def __bool__(self) -> bool:
        return bool(self._newest)

    def add(self, node_rank: int, events: Iterable[Event]) -> None:
        """A pod's report became these events. Only durable facts count."""
        for event in events:
            durable = isinstance(event, CheckpointReported) and event.durable
            if durable or isinstance(event, UserStateSet):
                key = (node_rank, type(event))
                if (older := self._newest.get(key)) is not None:
                    self._forget(older, {key})
                self._newest[key] = event
                self._keys.setdefault(event, set()).add(key)

    def stored(self, event: Event) -> set[int]:
        """The effects of an event are stored. Returns the node ranks that reported it."""
        keys = set(self._keys.get(event, ()))
        self._forget(event, keys)
        for key in keys:
            del self._newest[key]
        return {node_rank for node_rank, _ in keys}

    def has(self, node_rank: int) -> bool:
        """Whether a pod has reported something that is not stored."""
        return any((node_rank, kind) in self._newest for kind in (CheckpointReported, UserStateSet))

    def _forget(self, event: Event, keys: set[_Key]) -> None:
        remaining = self._keys.get(event, set()) - keys
        if remaining:
            self._keys[event] = remaining
        else:
            self._keys.pop(event, None)
