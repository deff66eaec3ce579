"""One case per rule and branch: an object, an edit that breaks the rule, and the response.

`before` is stored first (its status by the status subresource), then `edit` is sent as a merge
patch. `message` is the rule's message: field, value, remedy. `path` is the field that the error
is reported at; that which the message names, unless `at` names another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

TEMPLATE = {"spec": {"containers": [{"name": "trainer", "command": ["true"]}]}}
TIME = "2026-11-20T14:05:00.000Z"
NODES = [{"name": "a1", "zone": "A", "firstRank": 0}, {"name": "a2", "zone": "A", "firstRank": 1}]
HOLDER = {"namespace": "ml", "job": "gpt", "epoch": 4, "since": TIME}
DEVICE = {"id": "gpu-1", "kind": "GPU", "since": TIME}


@dataclass(frozen=True)
class Case:
    name: str
    plural: str
    edit: Json
    message: str
    before: Json = field(default_factory=dict)
    subresource: str = ""
    fixed_name: str = ""  # otherwise made up
    policy: bool = False  # an admission policy's, not the CRD's
    at: str | None = None

    @property
    def path(self) -> str:
        return self.message.partition(": ")[0] if self.at is None else self.at


def job(*, status: Json | None = None, **spec: Any) -> Json:
    fields: Json = {"spec": {"nodes": 2, "template": TEMPLATE, **spec}}
    return fields if status is None else {**fields, "status": status}


def status(phase: str, *, attempt: int = 1, nodes: Any = NODES, **more: Any) -> Json:
    fields: Json = {"phase": phase, "epoch": 3, "history": {"id": "c", "attempt": attempt}, **more}
    if nodes and phase not in ("Queued", "Suspended"):
        fields["assignment"] = {"epoch": 3, "nodes": nodes, "reservedAt": TIME}
    return fields


RUNNING = job(status=status("Running"))


def on_status(
    name: str, message: str, edit: Json, before: Json = RUNNING, at: str | None = None
) -> Case:
    return Case(name, "flyerjobs", {"status": edit}, message, before, "status", at=at)


def on_topology(
    name: str, message: str, edit: Json, before: Json | None = None, at: str | None = None
) -> Case:
    holder = {"epoch": 4, "holder": HOLDER} if before is None else before
    return Case(
        name, "flyertopologies", {"status": edit}, message, {"spec": {}, "status": holder},
        "status", "cluster", at=at,
    )  # fmt: skip


def on_spec(
    name: str, message: str, edit: Json, before: Json = RUNNING, *, policy: bool = False
) -> Case:
    return Case(name, "flyerjobs", {"spec": edit}, message, before, policy=policy)


def fixed(field_name: str, value: Any, current: str) -> Case:
    message = (
        f"spec.{field_name}: {current} cannot replace what the job has while it is Running: "
        "suspend it first (spec.suspend: true) and change it once it is Suspended, "
        "or create another job"
    )
    name = f"{field_name} is fixed while the job runs"
    return on_spec(name, message, {field_name: value}, policy=field_name != "nodes")


CASES = [
    fixed("nodes", 3, "3"),
    fixed("ranksPerNode", 8, "8"),
    fixed("nodeClass", "a100", "a100"),
    fixed("zone", "A", "A"),
    fixed("crossZone", "Never", "Never"),
    fixed(
        "template",
        {"spec": {"hostNetwork": True, "containers": [{"name": "trainer"}]}},
        "this template",
    ),
    on_spec(
        "activeDeadline is not raised while the job runs",
        "spec.activeDeadline: 2h is more than the 90m that the job has while it is Running: lower "
        "it, or suspend the job first (spec.suspend: true) and raise it once it is Suspended",
        {"activeDeadline": "2h"},
        job(activeDeadline="90m", status=status("Running")),
        policy=True,
    ),
    on_spec(
        "activeDeadline is not taken away while the job runs",
        "spec.activeDeadline: nothing is more than the 90m that the job has while it is Running: "
        "lower it, or suspend the job first (spec.suspend: true) and raise it once it is Suspended",
        {"activeDeadline": None},
        job(activeDeadline="90m", status=status("Running")),
        policy=True,
    ),
    on_spec(
        "checkpointGracePeriod is at most maxCheckpointGracePeriod",
        "spec.preemption.maxCheckpointGracePeriod: 10m is shorter than checkpointGracePeriod 1h: "
        "set maxCheckpointGracePeriod to 1h or more",
        {"preemption": {"checkpointGracePeriod": "1h"}},
    ),
    on_spec(
        "no daemon without what it is part of",
        "spec.collectives.daemon: is part of what inject adds: set inject too, or neither",
        {"collectives": {"inject": False, "daemon": True}},
    ),
    on_spec(
        "a limit of nothing",
        "spec.activeDeadline: 0s would end immediately: leave the field out for no limit",
        {"activeDeadline": "0s"},
    ),
    on_spec(
        "a watchdog that barks at once",
        "spec.progressDeadline: 0m0s would end immediately: write null for no limit",
        {"progressDeadline": "0m0s"},
    ),
    on_spec(
        "another controller cannot take a job over",
        "spec.managedBy: lab.example/other cannot replace nothing: it is fixed when a job is "
        "created, create another job",
        {"managedBy": "lab.example/other"},
        job(),
    ),
    on_spec(
        "another controller cannot give a job to a third",
        "spec.managedBy: lab.example/other cannot replace lab.example/one: it is fixed when a job "
        "is created, create another job",
        {"managedBy": "lab.example/other"},
        job(managedBy="lab.example/one"),
    ),
    on_spec(
        "a stop cannot be taken back",
        "spec.stop: nothing cannot replace Graceful: a stop cannot be taken back, create another "
        "job",
        {"stop": None},
        job(stop="Graceful"),
        policy=True,
    ),
    Case(
        "a name too long for pods",
        "flyerjobs",
        {},
        f"metadata.name: {'x' * 52} (52 characters) must be at most 51 "
        "lower-case letters, digits and dashes: pod names are derived from it",
        job(),
        fixed_name="x" * 52,
        at="",
    ),
    Case(
        "a name that host names cannot have",
        "flyerjobs",
        {},
        "metadata.name: gpt.2 (5 characters) must be at most 51 "
        "lower-case letters, digits and dashes: pod names are derived from it",
        job(),
        fixed_name="gpt.2",
        at="",
    ),
    Case(
        "the status cannot be removed",
        "flyerjobs",
        {"status": None},
        "status: cannot be removed: it is what the scheduler knows; delete the job instead",
        RUNNING,
        "status",
    ),
    on_status(
        "a gang in part",
        "status.assignment.nodes: names 1 nodes, spec.nodes is 2: a gang is all or nothing, name "
        "all or none",
        {
            "phase": "Reserved",
            "history": {"attempt": 2},
            "assignment": {"nodes": NODES[:1]},
        },
        at="status.assignment",
    ),
    on_status(
        "a cross-zone pair in one zone",
        "status.assignment.crossZonePair: does not fit zones A: name the one pair of nodes that "
        "communicates across zones; only jobs in two zones have one",
        {"zones": "A", "assignment": {"crossZonePair": ["a1", "a2"]}},
        at="status.assignment",
    ),
    on_status(
        "two zones without a cross-zone pair",
        "status.assignment.crossZonePair: does not fit zones A+B: name the one pair of nodes that "
        "communicates across zones; only jobs in two zones have one",
        {"zones": "A+B"},
        at="status.assignment",
    ),
    on_status(
        "half a cross-zone pair",
        "status.assignment.crossZonePair: has 1 nodes: a gang crosses zones over one pair, write "
        "two names or none",
        {"assignment": {"crossZonePair": ["a1"]}},
    ),
    on_status(
        "a lower epoch",
        "status.epoch: 2 is lower than 3: a newer leader exists, stop writing and elect again",
        {"epoch": 2},
    ),
    on_status(
        "no epoch",
        "status.epoch: 0 is lower than 3: a newer leader exists, stop writing and elect again",
        {"epoch": None},
    ),
    on_status(
        "an attempt is skipped",
        "status.history.attempt: 3 does not follow 1: attempts are counted one by one, read the "
        "job again",
        {"phase": "Reserved", "history": {"attempt": 3}},
    ),
    on_status(
        "an illegal move",
        "status.phase: Running cannot become Starting in attempt 1: read the job again and decide "
        "from where it is",
        {"phase": "Starting"},
    ),
    on_status(
        "what has ended stays so",
        "status.phase: Failed cannot become Queued in attempt 1: read the job again and decide "
        "from where it is",
        {"phase": "Queued", "assignment": None},
        job(status=status("Failed")),
    ),
    on_status(
        "an attempt starts in its first phase",
        "status.phase: Queued cannot become Running in attempt 2 (an attempt starts in Reserved, "
        "Draining, Starting): read the job again and decide from where it is",
        {
            "phase": "Running",
            "history": {"attempt": 2},
            "assignment": {"epoch": 3, "nodes": NODES, "reservedAt": TIME},
        },
        job(status=status("Queued")),
    ),
    on_status(
        "the suspend code falls",
        "status.suspendCode: 1 is lower than 2 within attempt 1: it only grows, read the job again",
        {"suspendCode": 1},
        job(status=status("Suspending", suspendCode=2)),
    ),
    on_status(
        "nodes change under a job",
        "status.assignment.nodes: cannot change within attempt 1: give the nodes back and start a "
        "new attempt",
        {"assignment": {"nodes": [NODES[1], NODES[0]]}},
        at="status.assignment",
    ),
    on_status(
        "running on nothing",
        "status.assignment: is missing in phase Running: commit the nodes together with the phase",
        {"assignment": None},
        at="status.phase",
    ),
    on_status(
        "waiting with nodes",
        "status.assignment: is kept in phase Queued: a job that waits has no nodes, remove it",
        {"phase": "Queued"},
        at="status.phase",
    ),
    on_status(
        "another history",
        "status.history.id: d cannot replace c: all attempts of a job have one history, keep the "
        "id",
        {"history": {"id": "d"}},
    ),
    on_status(
        "a history without a name",
        "status.history.id: nothing cannot replace c: all attempts of a job have one history, keep "
        "the id",
        {"history": {"id": ""}},
    ),
    on_status(
        "restarts are forgotten",
        "status.history.restarts: 1 is lower than 2: it only grows, read the job again",
        {"history": {"restarts": 1}},
        job(status={**status("Running"), "history": {"id": "c", "attempt": 1, "restarts": 2}}),
    ),
    Case(
        "a quota of another user",
        "flyerquotas",
        {"spec": {"user": "ben"}},
        "spec: ben/*/* cannot replace anna/*/*: subject, scope, priority and nodeClass are "
        "immutable, create another FlyerQuota",
        {"spec": {"user": "anna", "nodes": 4}},
    ),
    Case(
        "a quota with two subjects",
        "flyerquotas",
        {"spec": {"team": "vision"}},
        "spec: names more than one subject: set one of user, namespace, team and queue",
        {"spec": {"user": "anna", "nodes": 4}},
        at="spec.user",
    ),
    Case(
        "the total of one namespace",
        "flyerquotas",
        {"spec": {"scope": "Total"}},
        'spec.scope: Total needs the subject "*": a limit by name is a total already',
        {"spec": {"namespace": "lab", "nodes": 4}},
    ),
    Case(
        "a quota's status from an earlier leader",
        "flyerquotas",
        {"status": {"epoch": 2}},
        "status.epoch: 2 is lower than 3: a newer leader exists, stop writing and elect again",
        {"spec": {"nodes": 4}, "status": {"epoch": 3}},
        "status",
    ),
    Case(
        "a quota's status without an epoch",
        "flyerquotas",
        {"status": {"epoch": None}},
        "status.epoch: 0 is lower than 3: a newer leader exists, stop writing and elect again",
        {"spec": {"nodes": 4}, "status": {"epoch": 3}},
        "status",
    ),
    Case(
        "a second topology",
        "flyertopologies",
        {},
        "metadata.name: other is a second FlyerTopology: a cluster has one, call it cluster",
        {"spec": {}},
        fixed_name="other",
        at="",
    ),
    on_topology(
        "a topology's status from an earlier leader",
        "status.epoch: 2 is lower than 4: a newer leader exists, stop writing and elect again",
        {"epoch": 2},
        {"epoch": 4},
    ),
    on_topology(
        "a topology's status without an epoch",
        "status.epoch: 0 is lower than 4: a newer leader exists, stop writing and elect again",
        {"epoch": None},
        {"epoch": 4},
    ),
    on_topology(
        "a second job crosses zones",
        "status.holder: ml/bert cannot cross zones while ml/gpt does (epoch 4): release it first, "
        "once its nodes are empty",
        {"epoch": 5, "holder": {**HOLDER, "job": "bert", "epoch": 5}},
    ),
    on_topology(
        "a job of that name elsewhere crosses zones",
        "status.holder: nlp/gpt cannot cross zones while ml/gpt does (epoch 4): release it first, "
        "once its nodes are empty",
        {"epoch": 5, "holder": {**HOLDER, "namespace": "nlp", "epoch": 5}},
    ),
    on_topology(
        "an earlier leader changes the holder",
        "status.holder: ml/gpt got the token in epoch 4 and epoch 3 is earlier: elect again and "
        "write with an epoch that is not lower",
        {"epoch": 5, "holder": {**HOLDER, "epoch": 3}},
    ),
    on_topology(
        "an earlier leader takes the token back",
        "status.holder: ml/gpt got the token in epoch 4 and epoch 3 is earlier: elect again and "
        "write with an epoch that is not lower",
        {"epoch": 3, "holder": None},
    ),
    on_topology(
        "a write without an epoch takes the token back",
        "status.holder: ml/gpt got the token in epoch 4 and epoch 0 is earlier: elect again "
        "and write with an epoch that is not lower",
        {"epoch": None, "holder": None},
    ),
    on_topology(
        "a holder of the future",
        "status.holder.epoch: 9 is above status.epoch 4: write both with your own epoch",
        {"holder": {**HOLDER, "epoch": 9}},
        at="status.holder",
    ),
    on_topology(
        "a holder of no epoch",
        "status.holder.epoch: 4 is above status.epoch 0: write both with your own epoch",
        {"holder": HOLDER},
        {},
        at="status.holder",
    ),
    Case(
        "a suspect device without a cause",
        "nodehealths",
        {"status": {"devices": [{**DEVICE, "state": "Suspect"}]}},
        "reason: is missing for device gpu-1 in state Suspect: name the cause as one word, such as "
        "Xid79",
        {"spec": {}, "status": {"state": "Healthy"}},
        "status",
        at="status.devices[0].reason",
    ),
    Case(
        "an unhealthy device without a recovery",
        "nodehealths",
        {"status": {"devices": [{**DEVICE, "state": "Unhealthy", "reason": "Xid79"}]}},
        "recovery: is missing for device gpu-1 (Unhealthy): name what ends the state, such "
        "as a reset",
        {"spec": {}, "status": {"state": "Healthy"}},
        "status",
        at="status.devices[0].recovery",
    ),
    Case(
        "a node out without a cause",
        "nodehealths",
        {"status": {"state": "Suspect"}},
        "status.reason: is missing in state Suspect: name the cause as one word, such as Xid79",
        {"spec": {}, "status": {"state": "Healthy"}},
        "status",
    ),
    Case(
        "a node out without evidence",
        "nodehealths",
        {"status": {"state": "Unhealthy", "reason": "Xid79"}},
        "status.state: Unhealthy needs evidence: name an unhealthy device in status.devices, or a "
        "status.validation that failed",
        {"spec": {}, "status": {"state": "Healthy"}},
        "status",
    ),
]
