"""The scheduling engine: pure functions over values.

`step(state, events, now)` returns the next state and the actions that drivers take. The package
reads no clock, draws no random number, and does no I/O: the same events give the same actions,
byte for byte. Everything that outlives the process is in the jobs' statuses, from which `rebuild`
makes a state that continues.

A driver's loop: rebuild from what is stored; tell what it sees; then, for ever: collect events,
step, do the actions in order, and step again at `WakeAt` at the latest. What a driver that starts
has to tell: NodeObserved for every node, and NodeLost for those that are dead; for every node that
a job's status says is occupied and where nothing of that attempt exists, the PodExited if it is
known and NodeEmptied (a gang in phase Starting needs neither: its Start is told again); GangStarted
for gangs that are up; and what their jobs say again when they connect again (the newest durable
checkpoint, received, released).
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
from flyer.engine.explanation import Blocker, Explanation, Remedy
from flyer.engine.loads import QuotaUsage, quota_usage
from flyer.engine.nodes import Node, Zones
from flyer.engine.quotas import Quota, Subjects
from flyer.engine.removals import RemovalBudget, removal_budgets
from flyer.engine.settings import SchedulerSettings
from flyer.engine.state import EngineState, JobState, NodeState
from flyer.engine.topology import topology_document

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
