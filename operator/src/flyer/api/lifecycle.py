"""Legal changes of a FlyerJob's status: one table for the API server, the simulator and tests.

The table becomes CEL rules of the CRD, so that a faulty leader, or a second one, cannot write any
other change. For one write of the status:

1. `epoch` never falls: a leader that lost its lease is refused.
2. `history.attempt` grows by at most one; a new attempt starts in Reserved, Draining or Starting.
3. Inside an attempt the phase moves along `MOVES`; Succeeded and Failed are final.
4. Inside an attempt `suspendCode` only grows, and the assignment's nodes do not change.
5. `assignment` is present in the phases that have nodes, absent in those that wait, and names
   exactly `spec.nodes` nodes, with one cross-zone pair if it crosses zones.
"""

from __future__ import annotations

from flyer.api.phases import Phase
from flyer.api.rules import Rule, message_expression

# Next phases within one attempt. One write may combine several moves.
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
# Phases in which an attempt starts, from any phase that is not final.
FIRST_PHASES = (Phase.RESERVED, Phase.DRAINING, Phase.STARTING)
HAVE_NODES = (Phase.RESERVED, Phase.DRAINING, Phase.STARTING, Phase.RUNNING, Phase.SUSPENDING)
WAIT = tuple(phase for phase in Phase if phase.idle)
FINAL = tuple(phase for phase in Phase if phase.ended)


def _cel(phases: tuple[Phase, ...]) -> str:
    return "[" + ", ".join(f"'{phase.value}'" for phase in phases) + "]"


_TABLE = "{" + ", ".join(f"'{phase.value}': {_cel(to)}" for phase, to in MOVES.items()) + "}"
_NEW_ATTEMPT = "self.history.attempt > oldSelf.history.attempt"

# What a rule costs the API server is mostly how often it steps into an object, and how many fields
# that object has: each step copies the descriptions of all of them. So a rule is at the lowest
# place from which it sees what it needs, and asks first what mostly decides. `[x].all(y, …)` is
# how CEL keeps a value.
EPOCH_RULE = Rule(
    "self >= oldSelf",
    "status.epoch: is lower than the one before: a newer leader exists, stop writing and "
    "elect again",
    message_expression(
        "status.epoch: %d is lower than %d: a newer leader exists, stop writing and elect again",
        "self",
        "oldSelf",
    ),
)

HISTORY_RULES = (
    Rule(
        "self.attempt == oldSelf.attempt || self.attempt == oldSelf.attempt + 1",
        "status.history.attempt: attempts are counted one by one: read the job again",
        message_expression(
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
        message_expression(
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
        message_expression(
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
        f" {_NEW_ATTEMPT}"
        f" ? new in {_cel(FIRST_PHASES)} && !(old in {_cel(FINAL)})"
        f" : new == old || new in {_TABLE}[old]))",
        "status.phase: is not a legal move: read the job again and decide from where it is",
        message_expression(
            "status.phase: %s cannot become %s in attempt %d%s: read the job again and decide from "
            "where it is",
            "oldSelf.phase",
            "self.phase",
            "self.history.attempt",
            f"{_NEW_ATTEMPT} ? ' (an attempt starts in {', '.join(FIRST_PHASES)})' : ''",
        ),
        ".phase",
    ),
    Rule(
        "self.suspendCode >= oldSelf.suspendCode"
        " || self.history.attempt != oldSelf.history.attempt",
        "status.suspendCode: only grows within an attempt: read the job again",
        message_expression(
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
        "status.assignment.nodes: do not change within an attempt: start a new one",
        message_expression(
            "status.assignment.nodes: cannot change within attempt %d: give the nodes back "
            "and start a new attempt",
            "self.history.attempt",
        ),
        ".assignment",
    ),
    Rule(
        f"has(self.assignment) || !(self.phase in {_cel(HAVE_NODES)})",
        "status.assignment: is missing: commit the nodes together with the phase",
        message_expression(
            "status.assignment: is missing in phase %s: commit the nodes together with the phase",
            "self.phase",
        ),
        ".phase",
    ),
    Rule(
        f"!has(self.assignment) || !(self.phase in {_cel(WAIT)})",
        "status.assignment: is kept by a job that waits: remove it",
        message_expression(
            "status.assignment: is kept in phase %s: a job that waits has no nodes, remove it",
            "self.phase",
        ),
        ".phase",
    ),
    Rule(
        "!has(self.assignment)"
        " || self.zones.contains('+') == (size(self.assignment.crossZonePair) == 2)",
        "status.assignment.crossZonePair: a gang over two zones has one pair, any other none",
        message_expression(
            "status.assignment.crossZonePair: does not fit zones %s: name the one pair of nodes "
            "that communicates across zones; only jobs in two zones have one",
            "self.zones",
        ),
        ".assignment",
    ),
)

__all__ = [
    "EPOCH_RULE",
    "FINAL",
    "FIRST_PHASES",
    "HAVE_NODES",
    "HISTORY_RULES",
    "MOVES",
    "STATUS_RULES",
    "WAIT",
]
