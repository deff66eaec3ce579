"""Events: facts that drivers report to the engine, in the past tense.

An event about an attempt names it, so that late events are recognized. Repeated events change
nothing. `job` is always the key, "namespace/name".
"""

# ruff: noqa: TC001 - the decision log resolves the annotations

from __future__ import annotations

from dataclasses import dataclass, field

from flyer.api import FlyerJob
from flyer.engine.state.nodes import Node, Zones
from flyer.engine.state.quotas import Quota


@dataclass(frozen=True, slots=True)
class _AboutObject:
    """`uid` names the object with the key `job`, because a name can be used again.

    An event about another object than the engine's changes nothing. Empty: the driver does not
    use a name again before the engine has forgotten its job.
    """

    uid: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class NodeObserved:
    """A node and its state. A reported loss ends when the node is ready."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node failed: crash, power, network. Ineligible until it is observed ready again."""

    node: str
    cause: str
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class NodeRemoved:
    """The Node object was deleted. With `lost`, its pods are lost, as after a NodeLost.

    Without `lost` the node's labels for the scheduler were removed: a gang that runs there
    continues. Either way it gets no new work, and is forgotten once no job is on it.
    """

    node: str
    lost: bool = True


@dataclass(frozen=True, slots=True)
class NodeEmptied(_AboutObject):
    """Processes of this job's attempts up to `attempt` no longer exist on the node.

    Drivers report it for every node on which a gang was started, whatever ended the gang, and after
    the PodExited of that node, if there was one: a pod that disappears without an exit was lost.
    """

    node: str
    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class ZonesObserved:
    """The FlyerTopology changed. Running gangs keep their nodes."""

    zones: Zones


@dataclass(frozen=True, slots=True)
class QuotaObserved:
    """A FlyerQuota and its specification. Running jobs keep their nodes."""

    quota: Quota


@dataclass(frozen=True, slots=True)
class QuotaRemoved:
    """The FlyerQuota with this name was deleted."""

    quota: str


@dataclass(frozen=True, slots=True)
class TeamObserved:
    """The namespace belongs to this team; empty: to none, or it was deleted."""

    namespace: str
    team: str


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A job exists with this spec. Submitted again, its changed spec is taken over.

    What the spec asks for is done: suspend and resume, `stop`, another priority; and so is the
    requeue of the present attempt that its annotation asks for. The events of the same names below
    are for drivers whose users do not write objects.

    A job that the engine does not know, or whose removal was reported, is a resubmission whatever
    its status says: an attempt that the status calls alive is restarted from its checkpoint. A
    gang that is to be adopted is given to `rebuild`.

    A new object with the name of a known job is ignored: the driver submits it once the engine has
    forgotten that job.
    """

    job: FlyerJob


@dataclass(frozen=True, slots=True)
class JobRemoved(_AboutObject):
    """The object was deleted: end its processes, and forget the job when its nodes are empty."""

    job: str


@dataclass(frozen=True, slots=True)
class JobQuarantined:
    """The driver cannot handle the job: the engine forgets it, and its processes continue.

    Quotas continue to count its nodes, until a rebuild. The driver withholds these nodes with a
    NodeObserved of each in the same step.
    """

    job: str


@dataclass(frozen=True, slots=True)
class SuspendRequested:
    """spec.suspend became true. The driver has stored that; `by` and `reason` are for people."""

    job: str
    by: str = "user"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """spec.suspend became false."""

    job: str


@dataclass(frozen=True, slots=True)
class RequeueRequested(_AboutObject):
    """This attempt is to checkpoint, release its nodes and queue again immediately."""

    job: str
    attempt: int
    by: str = "user"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """End the job permanently: after its grace period, or immediately with `kill`."""

    job: str
    by: str = "user"
    reason: str = ""
    kill: bool = False


@dataclass(frozen=True, slots=True)
class SuspendReceived(_AboutObject):
    """The job acknowledged the signal (or got the fallback SIGTERM): suspend code 2."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Released(_AboutObject):
    """The job has saved and gives its nodes back: suspend code 3; it may be killed now."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class ProgressReported(_AboutObject):
    """The job completed a step. Restarts the progress deadline and extends the grace period."""

    job: str
    attempt: int
    step: int
    exposed_percent: int | None = None  # of the step's time: waits for communication


@dataclass(frozen=True, slots=True)
class LogObserved(_AboutObject):
    """A rank wrote output. Restarts the progress deadline; sent at most every few seconds."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class CheckpointReported(_AboutObject):
    """A checkpoint exists. Only a durable one is ever restored from."""

    job: str
    attempt: int
    step: int
    path: str
    durable: bool = True


@dataclass(frozen=True, slots=True)
class UserStateSet(_AboutObject):
    """The job set its 32-bit user state, which the history keeps."""

    job: str
    attempt: int
    value: int


@dataclass(frozen=True, slots=True)
class GangStarted(_AboutObject):
    """The pods of all nodes are up: the gang runs."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class StartPending(_AboutObject):
    """The start of an attempt still waits for the pods on these nodes; the latest report counts.

    If the start deadline passes, these nodes are the culprits, unless they are the whole gang.
    """

    job: str
    attempt: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartFailed(_AboutObject):
    """The attempt cannot start, and waiting does not help.

    `nodes`: the nodes on which it failed, which the next placement avoids. `job_fault`: the cause
    is the job's own (an image that does not exist, a missing claim or Secret), on any node: it
    counts against `maxRestarts`. A failure of nodes does not.
    """

    job: str
    attempt: int
    reason: str
    nodes: tuple[str, ...] = ()
    job_fault: bool = False


@dataclass(frozen=True, slots=True)
class StreamLost(_AboutObject):
    """No sidecar, or not every sidecar, of the running attempt has a stream to the scheduler.

    Silence says nothing about the job from here on. Drivers report it for each running attempt
    that they adopt and have not heard yet, too.
    """

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class StreamRestored(_AboutObject):
    """Every sidecar of the attempt whose pod has not ended has a stream again."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class StartRefused(_AboutObject):
    """The pods of an attempt cannot be created now, for example because a quota is full.

    Nothing of it runs, or what does is ended by the Stop that follows. It costs no restart.
    `transient`: the cause may pass within seconds (an unavailable API server, nodes that changed).
    """

    job: str
    attempt: int
    reason: str
    transient: bool = False


@dataclass(frozen=True, slots=True)
class Succeeded:
    """All ranks of the pod exited with status 0."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank exited by itself with another status; `reason` is the last line of its traceback."""

    exit_status: int
    reason: str = ""
    # For people: nothing is decided by them.
    rank: int | None = field(default=None, compare=False)
    traceback: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Killed:
    """The pod ended by a signal, or vanished (`signal` 0): nothing that its own code decided."""

    signal: int = 0
    reason: str = ""


Outcome = Succeeded | Failed | Killed


@dataclass(frozen=True, slots=True)
class PodExited(_AboutObject):
    """The pod on this node ended. `NodeEmptied` follows when nothing of it is left."""

    job: str
    attempt: int
    node: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; nothing else events."""


Event = (
    NodeObserved | NodeLost | NodeRemoved | NodeEmptied | QuotaObserved | QuotaRemoved
    | TeamObserved
    | JobSubmitted | JobRemoved | JobQuarantined
    | SuspendRequested | ResumeRequested | RequeueRequested
    | StopRequested | SuspendReceived | Released | ProgressReported | LogObserved
    | CheckpointReported | UserStateSet | GangStarted | StartPending | StartFailed | StartRefused
    | StreamLost | StreamRestored | PodExited | ZonesObserved | Tick
)  # fmt: skip

__all__ = [
    "CheckpointReported",
    "Event",
    "Failed",
    "GangStarted",
    "JobQuarantined",
    "JobRemoved",
    "JobSubmitted",
    "Killed",
    "LogObserved",
    "NodeEmptied",
    "NodeLost",
    "NodeObserved",
    "NodeRemoved",
    "Outcome",
    "PodExited",
    "ProgressReported",
    "QuotaObserved",
    "QuotaRemoved",
    "Released",
    "RequeueRequested",
    "ResumeRequested",
    "StartFailed",
    "StartPending",
    "StartRefused",
    "StopRequested",
    "StreamLost",
    "StreamRestored",
    "Succeeded",
    "SuspendReceived",
    "SuspendRequested",
    "TeamObserved",
    "Tick",
    "UserStateSet",
    "ZonesObserved",
]
