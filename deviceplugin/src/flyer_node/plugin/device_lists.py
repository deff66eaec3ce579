"""Device lists of all resources: the current snapshot and its subscribers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from flyer_node.plugin.resources import resources_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flyer_node.plugin.node_view import NodeView
    from flyer_node.plugin.resources import Device, Resource

__all__ = ["DeviceLists"]


class DeviceLists:
    """Holds one snapshot; a stream that lags behind skips to the newest, which is whole."""

    def __init__(self, view: NodeView) -> None:
        self._view = view
        self._resources = resources_of(view)
        self._changed = asyncio.Event()

    @property
    def view(self) -> NodeView:
        """Inventory from which the current lists were created."""
        return self._view

    def resource(self, name: str) -> Resource:
        """The present offer of a resource."""
        return self._resources[name]

    def publish(self, view: NodeView) -> bool:
        """Replaces the offer and wakes all streams; False if nothing is different."""
        if view == self._view:
            return False
        self._view = view
        self._resources = resources_of(view)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return True

    async def lists(self, name: str, closing: asyncio.Event) -> AsyncIterator[tuple[Device, ...]]:
        """The list of a resource now and after every change, until `closing`."""
        last_devices: tuple[Device, ...] | None = None
        while not closing.is_set():
            changed = self._changed
            devices = self._resources[name].devices()
            if devices != last_devices:
                last_devices = devices
                yield devices
            await _first_of(changed, closing)


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
