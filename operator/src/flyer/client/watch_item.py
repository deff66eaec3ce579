"""One change that a client's `watch` reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flyer.views import EventView, JobView, NodeView

__all__ = ["WatchItem"]


@dataclass(frozen=True, slots=True)
class WatchItem:
    """One change: at most one of the fields is set, or `ended` is true."""

    event: EventView | None = None
    job: JobView | None = None
    nodes: list[NodeView] | None = None
    ended: bool = False
