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
from flyer.engine.engine import explain, quota_usage, rebuild, step
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
from flyer.engine.loads import QuotaLoad, quota_loads
from flyer.engine.nodes import Node, Zones
from flyer.engine.policy import Policy
from flyer.engine.quotas import Quota, Subjects
from flyer.engine.removals import Removals, removals
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
    "Policy",
    "ProgressReported",
    "Quota",
    "QuotaLoad",
    "QuotaObserved",
    "QuotaRemoved",
    "ReleaseToken",
    "Released",
    "Remedy",
    "Removals",
    "ReplayError",
    "RequeueRequested",
    "ResumeRequested",
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
    "quota_loads",
    "quota_usage",
    "rebuild",
    "removals",
    "step",
    "topology_document",
]
