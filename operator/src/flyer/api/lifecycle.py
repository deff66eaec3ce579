"""Which changes of a FlyerJob's status are legal: one table for server, simulator and tests.

A leader that is confused, or two that believe in themselves, can still not write what is not here:
the table becomes CEL rules of the CRD. What it says, for one write of the status:

1. `epoch` never falls: a leader that lost its lease is refused.
2. `history.attempt` grows by at most one; a new attempt starts in Reserved, Draining or Starting.
3. Inside an attempt the phase moves along `MOVES`; Succeeded and Failed are final.
4. Inside an attempt `suspendCode` only grows, and the assignment's nodes do not change.
5. `assignment` is there in the phases that have nodes, is not in those that wait, and names exactly
   `spec.nodes` nodes, with one cross-zone pair if it crosses zones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api.phases import Phase
from flyer.api.rules import Rule, says

if TYPE_CHECKING:
    from flyer.api.status import FlyerJobStatus

# Where a job may go within one attempt. Several moves may meet in one write.
MOVES: dict[Phase, tuple[Phase, ...]] = {
    Phase.QUEUED: (Phase.SUSPENDED, Phase.FAILED),
    Phase.RESERVED: (
        Phase.DRAINING, Phase.STARTING, Phase.QUEUED, Phase.SUSPENDED, Phase.FAILED,
    ),
    Phase.DRAINING: (
        Phase.RESERVED, Phase.STARTING, Phase.QUEUED, Phase.SUSPENDED, Phase.FAILED,
    ),
    Phase.STARTING: (
        Phase.RUNNING, Phase.SUSPENDING, Phase.QUEUED, Phase.SUSPENDED, Phase.SUCCEEDED,
        Phase.FAILED,
    ),
    Phase.RUNNING: (
        Phase.SUSPENDING, Phase.QUEUED, Phase.SUSPENDED, Phase.SUCCEEDED, Phase.FAILED,
    ),
    Phase.SUSPENDING: (Phase.QUEUED, Phase.SUSPENDED, Phase.SUCCEEDED, Phase.FAILED),
    Phase.SUSPENDED: (Phase.QUEUED, Phase.FAILED),
    Phase.SUCCEEDED: (),
    Phase.FAILED: (),
}  # fmt: skip
# Where an attempt begins, from any phase that is not final.
BEGINNINGS = (Phase.RESERVED, Phase.DRAINING, Phase.STARTING)
HAVE_NODES = (Phase.RESERVED, Phase.DRAINING, Phase.STARTING, Phase.RUNNING, Phase.SUSPENDING)
WAIT = (Phase.QUEUED, Phase.SUSPENDED)
FINAL = (Phase.SUCCEEDED, Phase.FAILED)


def illegal(before: FlyerJobStatus, after: FlyerJobStatus) -> str:
    """Why this write would be refused, in the words of the rule; empty: it is legal."""
    if after.epoch < before.epoch:
        return f"status.epoch: {after.epoch} is lower than {before.epoch}"
    old, new = before.history.attempt, after.history.attempt
    if new not in (old, old + 1):
        return f"status.history.attempt: {new} does not follow {old}"
    begun = new > old
    if begun and (before.phase in FINAL or after.phase not in BEGINNINGS):
        return f"status.phase: attempt {new} cannot begin in {after.phase} after {before.phase}"
    if not begun and after.phase not in (before.phase, *MOVES[before.phase]):
        return f"status.phase: {before.phase} cannot become {after.phase}"
    if not begun and after.suspend_code < before.suspend_code:
        return f"status.suspendCode: {after.suspend_code} is lower than {before.suspend_code}"
    held, holds = before.assignment, after.assignment
    if not begun and held and holds and held.nodes != holds.nodes:
        return "status.assignment.nodes: change within an attempt"
    if (after.phase in HAVE_NODES and holds is None) or (after.phase in WAIT and holds is not None):
        return f"status.assignment: does not fit {after.phase}"
    return ""


def _cel(phases: tuple[Phase, ...]) -> str:
    return "[" + ", ".join(f"'{phase.value}'" for phase in phases) + "]"


_TABLE = "{" + ", ".join(f"'{phase.value}': {_cel(to)}" for phase, to in MOVES.items()) + "}"
_BEGUN = "self.history.attempt > oldSelf.history.attempt"

# What a rule costs the API server is mostly how often it steps into an object, and how many fields
# that object has: each step copies the descriptions of all of them. So a rule is at the lowest
# place from which it sees what it needs, and asks first what mostly decides. `[x].all(y, …)` is
# how CEL keeps a value.
EPOCH_RULE = Rule(
    "self >= oldSelf",
    "status.epoch: is lower than the one before: a newer leader exists, stop writing and "
    "elect again",
    says(
        "status.epoch: %d is lower than %d: a newer leader exists, stop writing and elect again",
        "self",
        "oldSelf",
    ),
)

HISTORY_RULES = (
    Rule(
        "self.attempt == oldSelf.attempt || self.attempt == oldSelf.attempt + 1",
        "status.history.attempt: attempts are counted one by one: read the job again",
        says(
            "status.history.attempt: %d does not follow %d: attempts are counted one by one, "
            "read the job again",
            "self.attempt",
            "oldSelf.attempt",
        ),
        ".attempt",
    ),
    Rule(
        "oldSelf.id == '' || self.id == oldSelf.id",
        "status.history.id: never changes: all attempts of a job have one history",
        says(
            "status.history.id: %s cannot replace %s: all attempts of a job have one history, "
            "keep the id",
            "self.id == '' ? 'nothing' : self.id",
            "oldSelf.id",
        ),
        ".id",
    ),
    Rule(
        "self.restarts >= oldSelf.restarts",
        "status.history.restarts: only grows: read the job again",
        says(
            "status.history.restarts: %d is lower than %d: it only grows, read the job again",
            "self.restarts",
            "oldSelf.restarts",
        ),
        ".restarts",
    ),
)

STATUS_RULES = (
    Rule(
        "[self.phase].all(new, [oldSelf.phase].all(old,"
        f" {_BEGUN}"
        f" ? new in {_cel(BEGINNINGS)} && !(old in {_cel(FINAL)})"
        f" : new == old || new in {_TABLE}[old]))",
        "status.phase: is not a legal move: read the job again and decide from where it is",
        says(
            "status.phase: %s cannot become %s in attempt %d%s: read the job again and decide from "
            "where it is",
            "oldSelf.phase",
            "self.phase",
            "self.history.attempt",
            f"{_BEGUN} ? ' (an attempt begins in {', '.join(BEGINNINGS)})' : ''",
        ),
        ".phase",
    ),
    Rule(
        "self.suspendCode >= oldSelf.suspendCode"
        " || self.history.attempt != oldSelf.history.attempt",
        "status.suspendCode: only grows within an attempt: read the job again",
        says(
            "status.suspendCode: %d is lower than %d within attempt %d: it only grows, read "
            "the job again",
            "self.suspendCode",
            "oldSelf.suspendCode",
            "self.history.attempt",
        ),
        ".suspendCode",
    ),
    Rule(
        "!has(self.assignment) || !has(oldSelf.assignment)"
        " || self.assignment.nodes == oldSelf.assignment.nodes"
        " || self.history.attempt != oldSelf.history.attempt",
        "status.assignment.nodes: do not change within an attempt: begin a new one",
        says(
            "status.assignment.nodes: cannot change within attempt %d: give the nodes back "
            "and begin a new attempt",
            "self.history.attempt",
        ),
        ".assignment",
    ),
    Rule(
        f"has(self.assignment) || !(self.phase in {_cel(HAVE_NODES)})",
        "status.assignment: is missing: commit the nodes together with the phase",
        says(
            "status.assignment: is missing in phase %s: commit the nodes together with the phase",
            "self.phase",
        ),
        ".phase",
    ),
    Rule(
        f"!has(self.assignment) || !(self.phase in {_cel(WAIT)})",
        "status.assignment: is kept by a job that waits: remove it",
        says(
            "status.assignment: is kept in phase %s: a job that waits has no nodes, remove it",
            "self.phase",
        ),
        ".phase",
    ),
    Rule(
        "!has(self.assignment)"
        " || self.zones.contains('+') == (size(self.assignment.crossZonePair) == 2)",
        "status.assignment.crossZonePair: a gang over two zones has one pair, any other none",
        says(
            "status.assignment.crossZonePair: does not fit zones %s: name the one pair of nodes "
            "that talks across, for two zones alone",
            "self.zones",
        ),
        ".assignment",
    ),
)

__all__ = [
    "BEGINNINGS",
    "EPOCH_RULE",
    "FINAL",
    "HAVE_NODES",
    "HISTORY_RULES",
    "MOVES",
    "STATUS_RULES",
    "WAIT",
    "illegal",
]
