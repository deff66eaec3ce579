"""The scheduler's settings: one frozen value, part of the state, written into the decision log."""

from __future__ import annotations

from dataclasses import dataclass

from flyer.api import Priority


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Times in seconds. The defaults suit a cluster; one machine uses shorter ones."""

    # A failing rank or a lost node makes other ranks fail, too: wait this long for evidence of an
    # infrastructure failure before the failure counts against the job.
    failure_window_seconds: float = 5.0
    # A hardware fault that was over this long before a rank failed still explains the failure.
    hardware_fault_seconds: float = 120.0
    # Consecutive attempts that the same signal ended without a newer checkpoint after which the job
    # fails: a SIGSEGV of its code, a SIGKILL for its memory use.
    same_signal_max: int = 3
    # Circuit breaker: if this many jobs fail within this time, and more than other jobs, the cause
    # is the cluster and not the jobs.
    outage_jobs_min: int = 3
    outage_seconds: float = 120.0
    # From Start to GangStarted, including image pulls. The attempt is restarted afterwards.
    start_deadline_seconds: float = 600.0
    # Stop is repeated at this interval. A node that is not empty after the deadline is not waited
    # for: jobs that wait for it are placed again.
    stop_retry_seconds: float = 10.0
    stop_deadline_seconds: float = 120.0
    # Time for which a resumed job waits for nodes with the same zone layout (and therefore
    # bit-identical results) before it accepts others.
    same_zone_layout_seconds: float = 60.0
    # Cost of a restart per node, in addition to the work since the last checkpoint.
    restart_cost_seconds: float = 60.0
    # Additional cost per preempted node: the job is displaced as a whole, and nodes that the
    # preempting job does not need are idle until another job fits.
    displaced_seconds: float = 900.0
    # A job that was preempted this often within this time is preempted only if no others suffice.
    # A status keeps at most eight times. Ended time slices and preemptions by jobs of the same user
    # do not count.
    preemptions_max: int = 3
    preemptions_seconds: float = 86_400.0
    # After this many checkpoint intervals without a checkpoint, unsaved work is not protected.
    # Otherwise jobs without checkpoints would be preempted last.
    unsaved_intervals: int = 3
    # A job preempts running jobs only after this delay, so that simultaneous events (its deletion,
    # the ends of other jobs) are known first.
    preemption_delay_seconds: float = 0.5
    # Run time after which a job may be preempted by a job of the same priority; 0: never. A job
    # without a checkpoint in its attempt has several time slices.
    time_slice_seconds: float = 14_400.0
    unsaved_slices: int = 6
    # Consecutive restarts without a newer checkpoint after which a job preempts no job of its
    # priority.
    crash_loop_restarts: int = 3
    # Pause before consecutive restarts without a newer checkpoint, from the second one on. It
    # doubles each time.
    backoff_seconds: float = 1.0
    backoff_seconds_max: float = 60.0
    # Pause after a failed start that does not count, and after a transient refusal of pods. It
    # doubles each time, up to the maximum of refused pods.
    start_backoff_seconds: float = 2.0
    # If many starts fail together, their retries are spread to this rate.
    start_retries_per_second: float = 20.0
    # A job that ran for this long restarts as after its first uncounted failure.
    stable_run_seconds: float = 600.0
    # Pause after refused pods, and after a failed start that counts. It doubles each time: every
    # attempt requests a whole gang from the API server and holds its nodes meanwhile.
    refused_backoff_seconds: float = 60.0
    refused_backoff_seconds_max: float = 600.0
    # Time after refused pods in which the job preempts no other job, which doubles each time: its
    # pods may be refused again, and the preemption would be in vain. Shorter in proportion after a
    # shorter pause.
    refusal_cooldown_seconds: float = 600.0
    refusal_cooldown_seconds_max: float = 86_400.0
    # Minimum interval between writes of a job's progress.
    progress_commit_seconds: float = 5.0
    # Maximum interval between two scheduling passes, also without changes.
    reschedule_seconds: float = 30.0
    # Rate of writes of `status.pending` over all jobs, after a burst.
    pending_writes_per_second: float = 10.0
    pending_writes_burst: int = 100
    # Minimum interval of writes of changed numbers; far behind in the queue it is one second per
    # position. The rate grows with the logarithm of the queue: 4 per second for 1,000 jobs.
    pending_renew_seconds: float = 30.0
    # Remedies change with the work that would be lost: they are renewed at this interval.
    unblock_renew_seconds: float = 600.0
    # Priority of `priority: auto` unless a quota names another one.
    auto_priority: Priority = Priority.NORMAL
    # Time for which other jobs avoid a node after the starts of two jobs failed there.
    suspect_seconds: float = 1800.0
    # Maximum number of nodes that a job avoids because it failed there.
    avoid_max: int = 8


__all__ = ["SchedulerSettings"]
