"""The scheduler's settings: one frozen value, part of the state, written into the decision log."""

from __future__ import annotations

from dataclasses import dataclass

from flyer.api import Priority


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Times in seconds. The defaults suit a cluster; one machine uses shorter ones."""

    # A rank that fails takes its peers down with errors of their own, and a lost node does so too:
    # wait this long for evidence of the infrastructure before the job is blamed.
    failure_window_seconds: float = 5.0
    # A hardware fault that was over this long before a rank failed still explains the failure.
    hardware_fault_seconds: float = 120.0
    # So many attempts in a row that the same signal ended without a newer checkpoint are the
    # job's own fault: a SIGSEGV of its code, a SIGKILL for its memory use.
    same_signal_max: int = 3
    # Circuit breaker: so many jobs that are interrupted within this time, and more than the others,
    # say something about the cluster and not about the jobs.
    outage_jobs_min: int = 3
    outage_seconds: float = 120.0
    # From Start to GangStarted; then rolled back (images may have to be pulled).
    start_deadline_seconds: float = 600.0
    # Stop is told again after so long, and a node that is not empty after the deadline is not
    # waited for any longer: whoever waits for it is placed anew.
    stop_retry_seconds: float = 10.0
    stop_deadline_seconds: float = 120.0
    # A resumed job waits so long for nodes that give the same split over the zones (and so the
    # same bits) before it takes others.
    same_zone_layout_seconds: float = 60.0
    # What a restart costs on top of the work since the last checkpoint, per node.
    restart_cost_seconds: float = 60.0
    # What it costs that a node is taken from a job, on top: the job is displaced as a whole, and
    # the nodes that nobody needs stand idle until somebody fits on them.
    displaced_seconds: float = 900.0
    # A job that was preempted so many times within this time is taken only if no others suffice.
    # A status keeps the times of eight: more than that is not counted. The end of a time slice is
    # no preemption, and what jobs of the same user take does not count.
    preemptions_max: int = 3
    preemptions_seconds: float = 86_400.0
    # A job that has not saved for so many of its checkpoint intervals loses the protection of its
    # unsaved work: otherwise those that never save would be preempted last.
    unsaved_intervals: int = 3
    # No running job is interrupted for a job that has waited for less: what arrives together (a job
    # and its deletion, the ends of others) is known by then, and nobody has to be called off.
    preemption_delay_seconds: float = 0.5
    # Among equal priorities a waiting job has its turn when another ran for so long; 0: never.
    # One that saved nothing in its attempt keeps its nodes for so many slices.
    time_slice_seconds: float = 14_400.0
    unsaved_slices: int = 6
    # A job with so many restarts in a row without a newer checkpoint preempts no equal.
    crash_loop_restarts: int = 3
    # Pause before the second, third … restart in a row without a newer checkpoint: doubling.
    backoff_seconds: float = 1.0
    backoff_seconds_max: float = 60.0
    # Pause after a job's pods were refused, doubling each time: every attempt asks the API server
    # for a whole gang, and holds its nodes meanwhile.
    refused_backoff_seconds: float = 60.0
    refused_backoff_seconds_max: float = 600.0
    # From then on it interrupts nobody for so long, doubling each time: they may be refused again,
    # and those that it interrupts lose work for nothing.
    refusal_cooldown_seconds: float = 600.0
    refusal_cooldown_seconds_max: float = 86_400.0
    # Progress is written into the job's status at most so often.
    progress_commit_seconds: float = 5.0
    # Nodes are given out again after so long although nothing has changed that decides it.
    reschedule_seconds: float = 30.0
    # Why jobs wait is written again at most so often over all jobs, after a burst.
    pending_writes_per_second: float = 10.0
    pending_writes_burst: int = 100
    # Numbers that changed are written after so long; behind in the queue after one second for each
    # place. Then the rate grows with the logarithm of the queue: 4 a second for 1,000 jobs.
    pending_renew_seconds: float = 30.0
    # The ways out change with the work that would be lost: they are looked at again after so long.
    unblock_renew_seconds: float = 600.0
    # What `priority: auto` means while no quota says otherwise.
    auto_priority: Priority = Priority.NORMAL
    # Other jobs avoid a node for so long after the starts of two jobs failed there.
    suspect_seconds: float = 1800.0
    # Nodes remembered as having failed a job.
    avoid_max: int = 8


__all__ = ["SchedulerSettings"]
