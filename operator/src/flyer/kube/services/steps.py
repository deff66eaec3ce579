"""Steps of the engine that one job's trouble does not stop."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from flyer import engine
from flyer.engine import JobFault, JobQuarantined, JobSubmitted
from flyer.job_events import EVENT_DROPPED, JobEvent
from flyer.kube.services.errors import StaleStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flyer.engine import Action, EngineState, Event
    from flyer.kube.metrics import Metrics
    from flyer.kube.services.apart import LeftAlone
    from flyer.kube.services.quarantine import Quarantine

__all__ = ["JOBS_INLINE_MAX", "Steps"]

# With more jobs the engine steps in a thread.
JOBS_INLINE_MAX: Final = 200

log = logging.getLogger(__name__)


class Steps:
    """Of one term. An event that the engine fails at is dropped, a job that it fails at left."""

    def __init__(
        self,
        left: LeftAlone,
        quarantine: Quarantine,
        metrics: Metrics,
        announce: Callable[[str, JobEvent], None],
    ) -> None:
        self._left = left
        self._quarantine = quarantine
        self._metrics = metrics
        self._announce = announce

    async def step(
        self, state: EngineState, events: Sequence[Event], now: float
    ) -> tuple[EngineState, tuple[Action, ...]]:
        """One step, without the jobs that are left alone: also those that fail in it.

        Each of them costs the step once more. StaleStateError: one fails although it is out.
        """
        while True:
            begun = time.monotonic()
            given = [*self._quarantine.taken_out(state.jobs), *events]
            try:
                # Of a large cluster it takes long enough for the Lease and for signals to wait.
                if len(state.jobs) > JOBS_INLINE_MAX:
                    stepped = asyncio.to_thread(engine.step, state, given, now)
                    return await asyncio.shield(stepped)
                return engine.step(state, given, now)
            except JobFault as fault:
                log.exception("a bug, please report it")
                again = self._left.suspect(fault.job)
                events = self._without(fault, events)
                if again:
                    self._left.spent(time.monotonic() - begun)
                await asyncio.sleep(0)  # the loop serves others in between

    def _without(self, fault: JobFault, events: Sequence[Event]) -> list[Event]:
        why = f"{fault}: {fault.__cause__!r:.400}"
        if fault.event is None or isinstance(fault.event, (JobSubmitted, JobQuarantined)):
            if fault.job in self._left:
                raise StaleStateError(why) from fault
            self._left.leave(fault.job, why)
            return self._quarantine.aside(events)
        self._metrics.faults.labels("event").inc()
        self._announce(fault.job, JobEvent(EVENT_DROPPED, why, warning=True))
        return [one for one in events if one is not fault.event]
