"""Check of one write of a FlyerJob's status by the table of `lifecycle`, without an API server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api.lifecycle import FIRST_PHASES, HAVE_NODES, MOVES, WAIT

if TYPE_CHECKING:
    from flyer.api.status import FlyerJobStatus


def illegal(before: FlyerJobStatus, after: FlyerJobStatus) -> str:
    """The message with which this write would be refused; empty: it is legal."""
    if after.epoch < before.epoch:
        return f"status.epoch: {after.epoch} is lower than {before.epoch}"
    old, new = before.history.attempt, after.history.attempt
    if new not in (old, old + 1):
        return f"status.history.attempt: {new} does not follow {old}"
    new_attempt = new > old
    if new_attempt and (before.phase.ended or after.phase not in FIRST_PHASES):
        return f"status.phase: attempt {new} cannot start in {after.phase} after {before.phase}"
    if not new_attempt and after.phase not in (before.phase, *MOVES[before.phase]):
        return f"status.phase: {before.phase} cannot become {after.phase}"
    if not new_attempt and after.suspend_code < before.suspend_code:
        return f"status.suspendCode: {after.suspend_code} is lower than {before.suspend_code}"
    assignment_before, holds = before.assignment, after.assignment
    if not new_attempt and assignment_before and holds and assignment_before.nodes != holds.nodes:
        return "status.assignment.nodes: change within an attempt"
    if (after.phase in HAVE_NODES and holds is None) or (after.phase in WAIT and holds is not None):
        return f"status.assignment: does not fit {after.phase}"
    return ""


__all__ = ["illegal"]
