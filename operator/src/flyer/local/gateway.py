"""Gateway of an attempt: turns messages on the job socket into events of the engine.

Progress is frequent and rarely needed, so the newest step is reported at intervals, and always
before any other report of the same job.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from flyer.engine import (
    CheckpointReported,
    Failed,
    PodExited,
    ProgressReported,
    Released,
    SuspendReceived,
    UserStateSet,
)
from flyer.job.protocol import Welcome, exposed_percent
from flyer.job.server import JobServer
from flyer.views import ProgressView

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from flyer.api import FlyerJob
    from flyer.engine import Event, Start

__all__ = ["Gateway"]

PROGRESS_INTERVAL_SECONDS: Final = 0.2
# Names under which a job may report its total number of steps.
TOTAL_STEPS_METRICS: Final = ("total_steps", "steps_total")


class Gateway:
    """Serves the ranks of one attempt until closed."""

    def __init__(
        self,
        job: FlyerJob,
        start: Start,
        path: Path,
        report: Callable[[Event], None],
        show: Callable[[], None],
    ) -> None:
        self.path = path
        self.progress_view: ProgressView | None = None
        self.released = False
        self._job = start.job
        self._attempt = start.attempt
        self._ranks_per_node = job.spec.ranks_per_node
        self._nodes = start.assignment.names
        self._report = report
        self._show = show
        self._step_reported: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        restore = start.restore_from
        welcome = Welcome(
            job=start.job,
            chain=(job.status.history.id if job.status else ""),
            attempt=start.attempt,
            user_state=start.user_state,
            restore_step=restore.step if restore else None,
            restore_path=restore.path if restore else None,
        )
        self._server = JobServer(path, welcome, self)

    async def start(self) -> None:
        """Listen."""
        await self._server.start()

    async def close(self) -> None:
        """Send pending reports and close the socket."""
        self.flush()
        await self._server.close()

    def signal(self, deadline: float, reason: str) -> bool:
        """Ask the ranks to suspend. False when no rank has ever connected."""
        self._server.signal(max(0.0, deadline - time.time()), reason)
        return bool(self._server.ranks_seen)

    def flush(self) -> None:
        """Report the newest progress, unless it was already reported."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        view = self.progress_view
        if view is not None and view.step != self._step_reported:
            self._step_reported = view.step
            self._report(
                ProgressReported(self._job, self._attempt, view.step, view.exposed_percent)
            )
            self._show()

    # -- requests of ranks (flyer.job.server.JobHandler) ---------------------------------------

    async def received(self, rank: int) -> None:  # noqa: ARG002 - any rank reports for the job
        """Report that the job has received the suspend request."""
        self._report(SuspendReceived(self._job, self._attempt))

    async def progress(self, rank: int, step: int, metrics: dict[str, float]) -> None:
        """Record a finished step; clients see the metrics of rank 0."""
        old = self.progress_view
        if old is not None and (step < old.step or (step == old.step and rank != 0)):
            return
        total, visible = _total_steps(metrics, old.total_steps if old else None)
        if not visible and old is not None:
            visible = old.metrics
        exposed = exposed_percent(visible)
        self.progress_view = ProgressView(step, round(time.time(), 3), total, visible, exposed)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PROGRESS_INTERVAL_SECONDS, self.flush)

    async def checkpoint(self, rank: int, step: int, path: str, durable: bool) -> None:  # noqa: ARG002, FBT001
        """Report a checkpoint."""
        self.flush()
        self._report(CheckpointReported(self._job, self._attempt, step, path, durable))

    async def release(self, rank: int, step: int | None) -> None:  # noqa: ARG002
        """The job releases all its nodes."""
        self.flush()
        self.released = True
        self._report(Released(self._job, self._attempt))

    async def fail(self, rank: int, reason: str) -> None:
        """The job fails, like after a failure of that rank's pod."""
        self.flush()
        node = self._nodes[min(rank // self._ranks_per_node, len(self._nodes) - 1)]
        self._report(PodExited(self._job, self._attempt, node, Failed(1, reason)))

    async def user_state(self, rank: int, state: int) -> None:  # noqa: ARG002
        """Store the user's 32-bit state."""
        self._report(UserStateSet(self._job, self._attempt, state & 0xFFFFFFFF))


def _total_steps(
    metrics: dict[str, float], previous_total: int | None
) -> tuple[int | None, dict[str, float]]:
    total = previous_total
    for name in TOTAL_STEPS_METRICS:
        if metrics.get(name, 0) >= 1:
            total = int(metrics[name])
    return total, {key: value for key, value in metrics.items() if key not in TOTAL_STEPS_METRICS}
