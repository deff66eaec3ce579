"""NodeHealth reporter: writes the object when it changes, never periodically."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import structlog

from flyer_node.report.client import ApiError, NodeHealthClient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flyer_node.metrics import Metrics

__all__ = ["Reporter"]

BATCH_SECONDS = 0.2
"""Changes within this time are written together."""
RETRY_SECONDS, RETRY_SECONDS_MAX = 0.5, 60.0

log = structlog.get_logger()


class Reporter:
    """Writes the document after each change; an unchanged document is not written."""

    def __init__(
        self,
        client: NodeHealthClient,
        document: Callable[[Mapping[str, Any], float], dict[str, Any]],
        metrics: Metrics,
    ) -> None:
        self._client = client
        self._document = document
        self._metrics = metrics
        self._changed = asyncio.Event()
        self.written: dict[str, Any] = {}

    def changed(self) -> None:
        """Requests a comparison with the last written document."""
        self._changed.set()

    async def run(self) -> None:
        """Runs until cancelled. A failed write is retried with the current state."""
        retry = RETRY_SECONDS
        while True:
            await self._changed.wait()
            await asyncio.sleep(BATCH_SECONDS)
            self._changed.clear()
            document = self._document(self.written, time.time())
            if document == self.written:
                continue
            try:
                await asyncio.to_thread(self._client.write, document)
            except ApiError as error:
                self._metrics.reports.labels("failed").inc()
                log.warning("NodeHealth not written", error=str(error), again_seconds=retry)
                await asyncio.sleep(retry)
                retry = min(RETRY_SECONDS_MAX, retry * 2)
                self._changed.set()
                continue
            retry = RETRY_SECONDS
            self.written = document
            self._metrics.reports.labels("ok").inc()
