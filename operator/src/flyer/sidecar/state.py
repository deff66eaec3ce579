"""Sidecar state: the reports of the pod and the orders to it, persistent over restarts.

Every change gets the next revision and wakes waiting readers. State that must survive a kill of
this process is in two small files of the pod's shared folder; progress is not stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from flyer.job.failure import write_atomically
from flyer.job.fields import ProtocolError
from flyer.job.key_file import write_private
from flyer.sidecar.wire import (
    Order,
    Report,
    StartOrder,
    Suspend,
    encode,
    parse_from_gateway,
    parse_from_sidecar,
)

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SidecarState"]

REPORT_FILE: Final = "sidecar-report.json"
ORDER_FILE: Final = "sidecar-order.json"
FILE_BYTES_MAX: Final = 32 * 1024 * 1024
# Changes that do not cause a report by themselves.
_IDLE_FIELDS: Final = frozenset({"step", "metrics", "output", "ranks_seen"})


class SidecarState:
    """The newest report and the union of the orders so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.report = Report(revision=1)
        self.acknowledged = 0
        self.urgent = asyncio.Event()
        """Set after a change that must be reported immediately."""
        self.changed = asyncio.Event()
        self.acknowledgement = asyncio.Event()
        self.start: StartOrder | None = None
        self.terminate = self.kill = False
        self._suspend: Suspend | None = None
        self._suspend_until = 0.0

    @property
    def suspend(self) -> Suspend | None:
        """The requested suspension, with its remaining time."""
        if self._suspend is None:
            return None
        return replace(self._suspend, seconds_left=max(self._suspend_until - time.time(), 0.0))

    def own_rank(self, rank: int) -> int | None:
        """The rank if it is one of this pod, otherwise the pod's first; None before the start.

        Programs may number their ranks themselves. The gateway disconnects a pod that reports
        another pod's rank, and would disconnect it again after each reconnect.
        """
        if self.start is None:
            return None
        first = self.start.node_rank * self.start.ranks_per_node
        return rank if first <= rank < first + self.start.ranks_per_node else first

    def load(self) -> None:
        """Load the state that an earlier sidecar stored, if any. Invalid files are ignored."""
        report = self._read(REPORT_FILE)
        with contextlib.suppress(ProtocolError):
            stored = parse_from_sidecar(report) if report else None
            if isinstance(stored, Report):
                self.report = replace(stored, revision=stored.revision + 1)
        order = self._read(ORDER_FILE)
        with contextlib.suppress(ProtocolError):
            parsed = parse_from_gateway(order) if order else None
            if isinstance(parsed, Order):
                self.start, self._suspend = parsed.start, parsed.suspend
                if parsed.suspend is not None:
                    # The elapsed time is unknown: the gateway sends the deadline again.
                    self._suspend_until = time.time() + parsed.suspend.seconds_left

    def update(self, **changes: Any) -> None:
        """Apply a message of the pod; a repeated one is not a change."""
        old = self.report
        new = replace(old, **changes)
        if new == old:
            return
        self.report = replace(new, revision=old.revision + 1)
        self.changed.set()
        if any(
            getattr(new, name) != getattr(old, name) for name in changes.keys() - _IDLE_FIELDS
        ) or (not old.ranks_seen and new.ranks_seen):
            self.urgent.set()
            self._write(REPORT_FILE, encode(self.report))

    def acknowledge(self, revision: int) -> None:
        """The gateway has received everything up to this revision."""
        self.acknowledged = max(self.acknowledged, min(revision, self.report.revision))
        self.acknowledgement.set()

    def apply(self, order: Order) -> None:
        """Apply an order. Requests of earlier orders remain in force."""
        if self.start is None:
            self.start = order.start
        if order.suspend is not None:
            self._suspend = order.suspend
            self._suspend_until = time.time() + order.suspend.seconds_left
        self.terminate = self.terminate or order.terminate
        self.kill = self.kill or order.kill
        line = encode(Order(start=self.start, suspend=self.suspend)).decode()
        with contextlib.suppress(OSError):  # a full volume: the gateway sends it again
            write_private(self._folder / ORDER_FILE, line)  # contains the key of the collectives

    async def flush(self, seconds: float) -> bool:
        """Wait until the gateway acknowledged the newest report. Returns whether it did."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.acknowledged < self.report.revision:
                    self.acknowledgement.clear()
                    await self.acknowledgement.wait()
        return self.acknowledged >= self.report.revision

    def _read(self, name: str) -> bytes | None:
        try:
            path = self._folder / name
            return path.read_bytes() if path.stat().st_size <= FILE_BYTES_MAX else None
        except OSError:
            return None

    def _write(self, name: str, line: bytes) -> None:
        write_atomically(self._folder / name, line.decode())
