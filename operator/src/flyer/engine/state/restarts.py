"""Restarts of a job: after a failure, after refused pods, and after its object came back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flyer.api import OccupiedNode, Phase, quantize
from flyer.api.waiting import PODS_REFUSED
from flyer.engine.state import transitions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.engine.settings import SchedulerSettings
    from flyer.engine.state.cycle_state import CycleState

# Failed starts remembered of a node: those of two jobs make it suspect.
_START_FAILURES_MAX = 8


def restart(
    cycle: CycleState,
    key: str,
    *,
    reason: str,
    message: str,
    avoid: Sequence[str] = (),
    counted: bool = True,
    slow: bool = False,
    by_signal: int | None = None,
) -> None:
    """Queue the job again to restart from its last durable checkpoint, possibly after a pause.

    The job ends instead after more than `maxRestarts` consecutive counted restarts without a newer
    checkpoint, or if the same signal ended `same_signal_max` consecutive attempts. `slow`: the
    attempt held its nodes without running, so even the first restart waits. It waits longer if it
    counts: a short outage, for example of a registry, must not use up all restarts.
    """
    job = transitions.flush_progress(cycle, key)
    history, checkpoint, settings = job.status.history, job.status.checkpoint, cycle.settings
    step = checkpoint.step if checkpoint else None
    fruitful = step is not None and (history.restored_step is None or step > history.restored_step)
    fruitless = 0 if fruitful else history.restarts_without_progress
    unblamed = 0 if fruitful or _ran_long(cycle, key) else history.unblamed_restarts
    signals = 0
    if by_signal is not None:
        again = not fruitful and history.signal == by_signal
        signals = (history.same_signal if again else 0) + 1
    fruitless, unblamed = (fruitless + 1, unblamed) if counted else (fruitless, unblamed + 1)
    saved = f"than {'none' if step is None else f'step {step}'}"
    if counted and fruitless > job.spec.max_restarts:
        transitions.end(
            cycle, key, Phase.FAILED, "MaxRestartsExceeded",
            f"{message}; {job.spec.max_restarts} restarts in a row brought no newer durable "
            f"checkpoint {saved}",
        )  # fmt: skip
        return
    if counted and signals >= settings.same_signal_max:
        transitions.end(
            cycle, key, Phase.FAILED, "RankFailed",
            f"{message}; {signals} attempts in a row ended so without a newer durable checkpoint "
            f"{saved}: the job's own code or memory use is the cause",
        )  # fmt: skip
        return
    if slow:
        base = settings.refused_backoff_seconds if counted else settings.start_backoff_seconds
        pause = _start_pause_seconds(cycle, key, base, (fruitless if counted else unblamed) - 1)
    else:
        pause = _pause_seconds(settings, fruitless if counted else unblamed)
    remembered = [name for name in history.avoid if name not in avoid] + list(avoid)
    cycle.update(
        key,
        history=history.replace(
            restarts=history.restarts + 1,
            restarts_without_progress=fruitless,
            unblamed_restarts=unblamed,
            signal=by_signal,
            same_signal=signals,
            refusals=0,
            restored_step=step,
            not_before=quantize(cycle.now + pause) if pause else None,
            avoid=tuple(remembered[-settings.avoid_max :]),
        ),
    )
    transitions.requeue(cycle, key, reason, "", message)


def _ran_long(cycle: CycleState, key: str) -> bool:
    """Whether the attempt ran for a time after which earlier failures say nothing about it."""
    assignment = cycle.jobs[key].status.assignment
    running_at = assignment.running_at if assignment is not None else None
    return running_at is not None and cycle.now - running_at >= cycle.settings.stable_run_seconds


def _start_pause_seconds(cycle: CycleState, key: str, base_seconds: float, times: int) -> float:
    """Pause after a failed start, which doubles with each of the `times` failures before it.

    Many jobs may fail together, because of an outage: then each waits for its turn, so that their
    retries do not overload the API server. Namespaces take turns: the refused jobs of one delay a
    job of another by at most as many turns as there are such namespaces.
    """
    settings, namespace = cycle.settings, key.partition("/")[0]
    paused = cycle.paused_jobs()
    turns_seconds = paused[namespace] * len(paused) / settings.start_retries_per_second
    paused[namespace] += 1
    pause_seconds = max(base_seconds * 2.0 ** min(times, 30), turns_seconds)
    return min(pause_seconds, settings.refused_backoff_seconds_max)


def _pause_seconds(settings: SchedulerSettings, times: int) -> float:
    """Pause before the next attempt, which doubles with each consecutive restart."""
    if times < 2:
        return 0.0
    return min(settings.backoff_seconds * 2.0 ** min(times - 2, 30), settings.backoff_seconds_max)


def suspect_nodes(cycle: CycleState, key: str, nodes: Sequence[str]) -> None:
    """Record that a start failed because of these nodes."""
    for name in nodes:
        state = cycle.nodes.get(name)
        if state is not None:
            other_failures = tuple(
                start_failure for start_failure in state.start_failures if start_failure[0] != key
            )
            failures = (*other_failures, (key, cycle.jobs[key].user, cycle.now))[
                -_START_FAILURES_MAX:
            ]
            cycle.nodes[name] = replace(state, start_failures=failures)


def refuse_start(cycle: CycleState, key: str, why: str, *, transient: bool) -> None:
    """Queue a job whose pods were refused, with a growing pause. No restart is counted."""
    settings, history = cycle.settings, cycle.jobs[key].status.history
    base = settings.start_backoff_seconds if transient else settings.refused_backoff_seconds
    pause_seconds = _start_pause_seconds(cycle, key, base, history.refusals)
    not_before = quantize(cycle.now + pause_seconds)
    cycle.update(key, history=history.replace(refusals=history.refusals + 1, not_before=not_before))
    transitions.requeue(cycle, key, PODS_REFUSED, "", why)


def reset_refusals(cycle: CycleState, key: str) -> None:
    """Reset the count of refusals after a start or a changed specification."""
    history = cycle.jobs[key].status.history
    if history.refusals:
        cycle.update(key, history=history.replace(refusals=0, not_before=None))


def resubmit(cycle: CycleState, key: str, occupied: Sequence[OccupiedNode]) -> None:
    """Requeue a job whose object was deleted and created again; its pods were stopped.

    `occupied`: nodes on which some of them may still exist.
    """
    job = cycle.update(key, occupied=tuple(occupied))
    why = "the job's object was gone for a moment, and its pods were ended"
    if job.status.phase in (Phase.STARTING, Phase.RUNNING):
        restart(cycle, key, reason="ObjectVanished", message=why, counted=False)
    elif job.status.phase is Phase.SUSPENDING:
        transitions.end_suspension(cycle, key)
    elif job.status.phase in (Phase.RESERVED, Phase.DRAINING):
        transitions.drop_reservation(cycle, key)


__all__ = ["refuse_start", "reset_refusals", "restart", "resubmit", "suspect_nodes"]
