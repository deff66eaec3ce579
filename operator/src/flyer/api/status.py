"""FlyerJob's status: the scheduler's complete per-job state; the process keeps no other.

The scheduler writes the status as a whole, in one compare-and-swap, before it acts; a scheduler
that starts reads it and continues. A node is *reserved* for the job whose `assignment` names it
(while the phase is Reserved, Draining, Starting, Running or Suspending) and *occupied* by the job
whose `occupied` names it: processes of that job may still exist there, whatever its phase.

`epoch` is the fencing epoch of the leader that made the commit (the Lease's `leaseTransitions` + 1;
the driver of one machine counts its starts). A leader writes it with each change, and once per term
into one job to mark the start of the term. The API server refuses a lower one, so a leader that
lost its lease cannot undo decisions of the next leader. `assignment.epoch` stays what it was when
the nodes were assigned.
"""

# ruff: noqa: TC001 - pydantic resolves the annotations, and copies the defaults

from __future__ import annotations

from pydantic import ConfigDict, Field

from flyer.api.assignment import Assignment, OccupiedNode, Suspension
from flyer.api.attempts import Checkpoint, Eviction, Exit, JobHistory, PastAttempt, Progress
from flyer.api.base import Model
from flyer.api.conditions import MESSAGE_CHARS_MAX, Condition, Conditions
from flyer.api.lifecycle import EPOCH_RULE, STATUS_RULES
from flyer.api.limits import NODES_MAX, PAST_ATTEMPTS_MAX
from flyer.api.pending import Pending
from flyer.api.phases import Phase, SuspendCode
from flyer.api.priorities import Priority
from flyer.api.rules import atomic_map, rules


class FlyerJobStatus(Model):
    """Observed state of the job. Only the scheduler writes it."""

    epoch: int = Field(
        default=0,
        ge=0,
        description="Fencing epoch of the leader that wrote this status.",
        json_schema_extra=rules(EPOCH_RULE),
    )
    phase: Phase = Field(
        default=Phase.QUEUED,
        description="Summary of the state of the job. The conditions have the reasons. Default: "
        "Queued.",
    )
    reason: str = Field(
        default="", max_length=128, description="Reason of the phase as one word in CamelCase."
    )
    message: str = Field(
        default="",
        max_length=MESSAGE_CHARS_MAX,
        description="Human-readable details of the phase, with names and numbers.",
    )
    suspend_code: SuspendCode = Field(
        default=SuspendCode.NONE,
        description="Progress of a suspension. 0: none. 1: the signal was sent. 2: the job "
        "received it. 3: the job has saved a checkpoint and may be suspended. It only grows within "
        "an attempt.",
    )
    priority: Priority | None = Field(
        default=None,
        description="Priority at which the job holds its nodes: spec.priority if its quota has "
        "room there, and the selected one if spec.priority is auto.",
    )
    zones: str = Field(
        default="",
        max_length=160,
        description="Names of the zones of the gang, joined by +, for example A+B.",
    )
    assignment: Assignment | None = Field(
        default=None,
        description="Nodes of the current attempt, in the order of ranks. They are stored before "
        "they are used.",
    )
    suspension: Suspension | None = Field(
        default=None, description="The suspension in progress. Absent if there is none."
    )
    history: JobHistory = Field(
        default=JobHistory(), description="State that all attempts of the job share."
    )
    occupied: tuple[OccupiedNode, ...] = Field(
        default=(),
        max_length=2 * NODES_MAX,
        description="Nodes on which processes of the job may still exist, whatever its phase.",
    )
    exits: tuple[Exit, ...] = Field(
        default=(),
        max_length=NODES_MAX,
        description="How the pods of the current attempt ended.",
    )
    eviction: Eviction | None = Field(
        default=None,
        description="The latest time that the job lost its nodes without having ended.",
    )
    past_attempts: tuple[PastAttempt, ...] = Field(
        default=(),
        max_length=PAST_ATTEMPTS_MAX,
        description=f"The latest {PAST_ATTEMPTS_MAX} attempts that lost their nodes, the oldest "
        "first.",
    )
    progress: Progress | None = Field(
        default=None,
        description="The latest progress that the job reported. By default it is written at most "
        "every 5 s.",
    )
    checkpoint: Checkpoint | None = Field(
        default=None,
        description="The newest durable checkpoint, from which a restart continues.",
    )
    pending: Pending | None = Field(
        default=None, description="Why the job has no nodes. Absent if it has nodes."
    )
    conditions: Conditions = ()
    observed_generation: int | None = Field(
        default=None, ge=0, description="The metadata.generation that this status describes."
    )

    # The status has one writer, which replaces it as a whole.
    model_config = ConfigDict(json_schema_extra={**rules(*STATUS_RULES), **atomic_map()})

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, if it has been set."""
        return next((condition for condition in self.conditions if condition.type == kind), None)


__all__ = ["FlyerJobStatus"]
