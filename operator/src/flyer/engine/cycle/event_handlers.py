"""Event handlers: record what each event changes. `reconcile` decides what follows from it.

Because a handler only records facts, the order of events within one step does not matter, and a
rebuilt state leads to the same decisions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flyer.engine import events
from flyer.engine.cycle.attempt_event_handlers import ATTEMPT_HANDLERS
from flyer.engine.cycle.cluster_event_handlers import CLUSTER_HANDLERS
from flyer.engine.cycle.job_event_handlers import JOB_HANDLERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flyer.engine.state.cycle_state import CycleState


def handle_event(event: events.Event, cycle: CycleState) -> None:
    """Record one event, unless it is about another object with the job's name."""
    if not _is_about_another_object(event, cycle):
        _HANDLERS[type(event)](event, cycle)


def _is_about_another_object(event: events.Event, cycle: CycleState) -> bool:
    uid = getattr(event, "uid", "")
    if not uid:
        return False
    job = cycle.jobs.get(getattr(event, "job", ""))
    return job is not None and job.uid != uid


def handle_tick(_event: events.Tick, _cycle: CycleState) -> None:
    """Nothing to record."""


_HANDLERS: Mapping[type, Callable[[Any, CycleState], None]] = {
    events.Tick: handle_tick,
    **CLUSTER_HANDLERS,
    **JOB_HANDLERS,
    **ATTEMPT_HANDLERS,
}

__all__ = ["handle_event"]
