"""Watchers of a driver, each with a bounded queue of changes."""

from __future__ import annotations

import os
from typing import Any

from flyer.local.control import Subscription

__all__ = ["Watchers"]


class Watchers:
    """The watchers of one driver."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()

    @property
    def has_external(self) -> bool:
        """Whether another process than this one watches."""
        return any(subscription.pid != os.getpid() for subscription in self._subscriptions)

    def add(self, items: list[dict[str, Any]], pid: int | None) -> Subscription:
        """Add a watcher, which first receives `items`; its process may be unknown."""
        subscription = Subscription(pid)
        for item in items:
            subscription.offer(item)
        self._subscriptions.add(subscription)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Remove a watcher."""
        self._subscriptions.discard(subscription)

    def offer(self, item: dict[str, Any]) -> None:
        """Send an item to every watcher."""
        for subscription in self._subscriptions:
            subscription.offer(item)

    def end(self) -> None:
        """Report the end of the driver to every watcher, and end its stream."""
        for subscription in self._subscriptions:
            subscription.offer({"kind": "end"})
            subscription.offer(None)
