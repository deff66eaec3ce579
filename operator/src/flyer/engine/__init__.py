"""The scheduling engine: pure functions over values.

`step(state, events, now)` returns the next state and the actions that drivers perform. The package
reads no clock, draws no random number and does no I/O: the same events give the same actions, byte
for byte. Everything that outlives the process is in the jobs' statuses; `rebuild` makes from them a
state that continues.

A step runs the stages of `cycle` in this order:

1. events: `event_handlers` record each event;
2. reconcile: each job moves to the phase that its facts and the time call for;
3. schedule: waiting jobs get nodes in the order of the queue, by preemption if necessary;
4. actions: changed statuses are committed, then `actions_due` derives what drivers have to do.

| module | holds |
|---|---|
| `engine` | entry: `step`, `rebuild`, `explain`, `quota_holdings` |
| `events`, `actions`, `settings`, `errors` | the interface to drivers |
| `cycle` | the stages of a step |
| `explain` | why a job waits, and what would give it nodes |
| `victim_search` | the cheapest set of jobs to preempt |
| `quota` | usage of quotas, admission of waiting jobs |
| `placement` | which nodes are available to a job, and which of them it gets |
| `scheduling_policy` | order of the queue; which jobs may be preempted when, and the cost |
| `state` | the values that a step reads and replaces, and the transitions of a job |
| `decision_log` | recording and replay of steps |

Imports point down this table, from `engine` to `state` (a contract of import-linter).

A driver rebuilds the state, reports what it observes, and then repeats: collect events, `step`,
perform the actions in order, and step again at the time of `WakeAt` at the latest. After a rebuild
it reports NodeObserved for every node, and NodeLost for nodes that are lost. For every node that a
job's status names as occupied, and on which nothing of that attempt exists, it reports the
PodExited if it is known, and NodeEmptied (not for a gang in phase Starting: its Start is repeated).
It reports GangStarted for gangs that are up, and what their jobs repeat when they reconnect (the
newest durable checkpoint, received, released).
"""

from flyer.engine.actions import (
    Action,
    Commit,
    Finish,
    HoldToken,
    ReleaseToken,
    Signal,
    Start,
    Stop,
    WakeAt,
)
from flyer.engine.engine import explain, quota_holdings, rebuild, step
from flyer.engine.errors import EngineError, JobFault, ReplayError, UnknownJob
from flyer.engine.events import (
    CheckpointReported,
    Event,
    Failed,
    GangStarted,
    JobQuarantined,
    JobRemoved,
    JobSubmitted,
    Killed,
    LogObserved,
    NodeEmptied,
    NodeLost,
    NodeObserved,
    NodeRemoved,
    Outcome,
    PodExited,
    ProgressReported,
    QuotaObserved,
    QuotaRemoved,
    Released,
    RequeueRequested,
    ResumeRequested,
    StartFailed,
    StartPending,
    StartRefused,
    StopRequested,
    StreamLost,
    StreamRestored,
    Succeeded,
    SuspendReceived,
    SuspendRequested,
    TeamObserved,
    Tick,
    UserStateSet,
    ZonesObserved,
)
from flyer.engine.placement.topology_file import topology_document
from flyer.engine.quota.usage import QuotaUsage, quota_usage
from flyer.engine.settings import SchedulerSettings
from flyer.engine.state.engine_state import EngineState
from flyer.engine.state.explanation import Blocker, Explanation, Remedy
from flyer.engine.state.jobs import JobState
from flyer.engine.state.nodes import Node, NodeState, Zones
from flyer.engine.state.quotas import Quota, Subjects
from flyer.engine.state.removal_budget import RemovalBudget, removal_budgets

__all__ = [
    "Action",
    "Blocker",
    "CheckpointReported",
    "Commit",
    "EngineError",
    "EngineState",
    "Event",
    "Explanation",
    "Failed",
    "Finish",
    "GangStarted",
    "HoldToken",
    "JobFault",
    "JobQuarantined",
    "JobRemoved",
    "JobState",
    "JobSubmitted",
    "Killed",
    "LogObserved",
    "Node",
    "NodeEmptied",
    "NodeLost",
    "NodeObserved",
    "NodeRemoved",
    "NodeState",
    "Outcome",
    "PodExited",
    "ProgressReported",
    "Quota",
    "QuotaObserved",
    "QuotaRemoved",
    "QuotaUsage",
    "ReleaseToken",
    "Released",
    "Remedy",
    "RemovalBudget",
    "ReplayError",
    "RequeueRequested",
    "ResumeRequested",
    "SchedulerSettings",
    "Signal",
    "Start",
    "StartFailed",
    "StartPending",
    "StartRefused",
    "Stop",
    "StopRequested",
    "StreamLost",
    "StreamRestored",
    "Subjects",
    "Succeeded",
    "SuspendReceived",
    "SuspendRequested",
    "TeamObserved",
    "Tick",
    "UnknownJob",
    "UserStateSet",
    "WakeAt",
    "Zones",
    "ZonesObserved",
    "explain",
    "quota_holdings",
    "quota_usage",
    "rebuild",
    "removal_budgets",
    "step",
    "topology_document",
]
