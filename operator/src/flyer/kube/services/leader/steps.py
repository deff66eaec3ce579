"""Engine steps with fault isolation: a job at which the engine fails is quarantined."""

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
    from flyer.kube.services.jobs.quarantine import Quarantine
    from flyer.kube.services.jobs.quarantine_controller import QuarantineController

__all__ = ["JOBS_INLINE_MAX", "EngineSteps"]

# With more jobs the engine steps in a thread.
JOBS_INLINE_MAX: Final = 200

log = logging.getLogger(__name__)


class EngineSteps:
    """The steps of one term. A failing event is dropped, a failing job quarantined."""

    def __init__(
        self,
        quarantine: Quarantine,
        quarantine_controller: QuarantineController,
        metrics: Metrics,
        announce: Callable[[str, JobEvent], None],
    ) -> None:
        self._quarantine = quarantine
        self._quarantine_controller = quarantine_controller
        self._metrics = metrics
        self._announce = announce

    async def step(
        self, state: EngineState, events: Sequence[Event], now: float
    ) -> tuple[EngineState, tuple[Action, ...]]:
        """One step, without quarantined jobs, including those that fail in it.

        Each failing job repeats the step. StaleStateError: a job fails although it is removed.
        """
        while True:
            started = time.monotonic()
            step_events = [*self._quarantine_controller.removals(state.jobs), *events]
            try:
                # On a large cluster a step takes long enough to delay the Lease and signals.
                if len(state.jobs) > JOBS_INLINE_MAX:
                    stepped = asyncio.to_thread(engine.step, state, step_events, now)
                    return await asyncio.shield(stepped)
                return engine.step(state, step_events, now)
            except JobFault as fault:
                log.exception("a bug, please report it")
                repeated = self._quarantine.is_suspect(fault.job)
                events = self._without(fault, events)
                if repeated:
                    self._quarantine.record_rebuild(time.monotonic() - started)
                await asyncio.sleep(0)  # let other tasks run in between

    def _without(self, fault: JobFault, events: Sequence[Event]) -> list[Event]:
        why = f"{fault}: {fault.__cause__!r:.400}"
        if fault.event is None or isinstance(fault.event, (JobSubmitted, JobQuarantined)):
            if fault.job in self._quarantine:
                raise StaleStateError(why) from fault
            self._quarantine.add(fault.job, why)
            return self._quarantine_controller.hold_back(events)
        self._metrics.faults.labels("event").inc()
        self._announce(fault.job, JobEvent(EVENT_DROPPED, why, warning=True))
        return [event for event in events if event is not fault.event]
