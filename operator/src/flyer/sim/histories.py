"""Random histories: a small cluster with every kind of fault; invariants checked after each step.

A seed determines a history. It calls `step` directly, with a driver that answers in random order,
so that tens of thousands of histories take minutes. `Simulation` is slower and more realistic.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flyer.api import FlyerJob, FlyerJobStatus, Phase, Priority, QuotaSubject
from flyer.engine import (
    CheckpointReported,
    Event,
    Failed,
    JobRemoved,
    Killed,
    Node,
    NodeEmptied,
    NodeLost,
    NodeObserved,
    NodeRemoved,
    PodExited,
    ProgressReported,
    Quota,
    QuotaObserved,
    QuotaRemoved,
    Released,
    StreamLost,
    StreamRestored,
    Succeeded,
    SuspendReceived,
    TeamObserved,
)
from flyer.sim.invariants import Violation
from flyer.sim.liveness import idle_although_wanted
from flyer.sim.random_cluster import Pod, RandomCluster, is_over
from flyer.sim.samples import sample_job

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["History"]

# Time within which a job that could run must start.
_PATIENCE_SECONDS = 30.0
_PLACES = (
    (None, None), (None, None), ("a100", None), ("v100", None), ("a100", "A"),
)  # fmt: skip
"""Node class and zone of a job."""
PREEMPTION = {
    "checkpointGracePeriod": "2s", "maxCheckpointGracePeriod": "4s", "minRuntime": "3s",
}  # fmt: skip
# The liveness check takes as long as a step: it runs in every fourth history.
_WATCHED_EVERY = 4
_LIVE = (Phase.STARTING, Phase.RUNNING, Phase.SUSPENDING)
_PRIORITIES = ("low", "normal", "normal", "high", "auto")
_USERS = ("anna", "ben")
_SUBJECTS = {
    QuotaSubject.USER: _USERS,
    QuotaSubject.QUEUE: ("default",),
    QuotaSubject.NAMESPACE: ("default",),
    QuotaSubject.TEAM: ("red",),
}


class History(RandomCluster):
    """One history. `run` raises a Violation that names the seed and the step."""

    def __init__(self, seed: int, steps: int = 12) -> None:
        super().__init__(seed)
        self._steps = steps
        self._gone: dict[str, FlyerJob] = {}
        self._count = 0
        self._idle_since: dict[str, float] = {}

    def run(self) -> int:
        """Run the history. Returns the number of engine steps."""
        steps = 0
        try:
            for _ in range(self._steps):
                for _ in range(self._random.randint(1, 3)):
                    self._random.choice(_DEEDS)(self)
                steps += self._advance(self._random.choice((0.1, 0.5, 2.0, 7.0, 40.0)))
                if self.seed % _WATCHED_EVERY == 0:
                    self._watch()
            steps += self._settle_down()
        except Violation as violation:
            raise Violation(f"seed {self.seed}, step {steps}: {violation}") from violation
        except Exception as error:
            raise Violation(f"seed {self.seed}, step {steps}: {error!r}") from error
        return steps

    # -- events --------------------------------------------------------------------------------

    def _job(self) -> str | None:
        return self._random.choice(sorted(self.store)) if self.store else None

    def _node(self) -> Node:
        return self.nodes[self._random.choice(sorted(self.nodes))]

    def _live(self) -> tuple[str, FlyerJobStatus] | None:
        live = [key for key, job in self.state.jobs.items() if job.status.phase in _LIVE]
        if not live:
            return None
        key = self._random.choice(sorted(live))
        return key, self.state.jobs[key].status

    def _submit(self) -> None:
        if sum(not is_over(job) for job in self.store.values()) >= 7:
            return
        self._count += 1
        draw = self._random
        job = _template(
            draw.choice((1, 1, 2, 3, 4)),
            draw.choice(_PRIORITIES),
            draw.choice(_PLACES),
            draw.choice(("Never", "LastResort")),
            draw.choice((None, None, "10s")),
            draw.choice((0, 2, 10)),
            draw.choice(_USERS),
        )
        name = f"job-{self._count}"
        metadata = job.metadata.replace(name=name, uid=f"uid-{self._count}", generation=1)
        self.store[f"default/{name}"] = job.replace(metadata=metadata)
        if draw.random() < 0.1:
            self.refusing.add(f"default/{name}")
        self._offer(f"default/{name}")

    def _edit(self) -> None:
        """A user changes the priority, or suspends, or resumes."""
        key = self._job()
        if key is None:
            return
        job = self.store[key]
        changes: dict[str, Any] = self._random.choice(
            (
                {"priority": Priority(self._random.choice(_PRIORITIES))},
                {"suspend": not job.spec.suspend},
            )
        )
        metadata = job.metadata.replace(generation=(job.metadata.generation or 0) + 1)
        self.store[key] = job.replace(spec=job.spec.replace(**changes), metadata=metadata)
        self._offer(key)

    def _remove(self) -> None:
        """Delete an object; it may return with the same uid and its stored status."""
        key = self._job()
        if key is not None:
            gone = self._gone[key] = self.store.pop(key)
            self._inbox.append(JobRemoved(key, uid=gone.metadata.uid or ""))

    def _return_job(self) -> None:
        if self._gone:
            key = self._random.choice(sorted(self._gone))
            self.store[key] = self._gone.pop(key)
            self._offer(key)

    def _recreate(self) -> None:
        """Delete an object, if it is not gone yet, and create another one with its name."""
        if self._random.random() < 0.7:
            self._remove()
        if not self._gone:
            return
        key = self._random.choice(sorted(self._gone))
        gone = self._gone.pop(key)
        self._count += 1
        metadata = gone.metadata.replace(uid=f"uid-{self._count}", generation=1)
        self.store[key] = gone.replace(metadata=metadata, status=None)
        self._offer(key)

    def _recreate_and_rebuild(self) -> None:
        """The same while the scheduler rebuilds its state or another one takes over."""
        self._recreate()
        self._random.choice((self._rebuild, self._crash))()

    def _report(self) -> None:
        live_job = self._live()
        if live_job is None:
            return
        key, status = live_job
        uid = self.state.jobs[key].uid
        attempt, draw = status.history.attempt, self._random
        number = draw.randint(1, 50)
        events: tuple[Event, ...] = (
            CheckpointReported(key, attempt, number, "/c", uid=uid),
            CheckpointReported(key, attempt, number, "/c", uid=uid),
            ProgressReported(key, attempt, number, uid=uid),
            SuspendReceived(key, attempt, uid=uid),
            Released(key, attempt, uid=uid),
            StreamLost(key, attempt, uid=uid),
            StreamRestored(key, attempt, uid=uid),
        )
        self._inbox.append(draw.choice(events))

    def _exit(self) -> None:
        """End pods: successfully, by a failure of the program, or killed."""
        live_job = self._live()
        if live_job is None or live_job[1].assignment is None:
            return
        key, status = live_job
        uid = self.state.jobs[key].uid
        attempt, names = status.history.attempt, list(live_job[1].assignment.names)
        outcome = self._random.choice(
            (Succeeded(), Succeeded(), Failed(1, "boom"), Killed(9), Killed(11), Killed(0))
        )
        ended = names if isinstance(outcome, Succeeded) else names[:1]
        for name in ended:
            pod = Pod(key, attempt, name, uid)
            if pod in self.pods and self._stands(name):
                self._end(pod)
                self._inbox += [
                    PodExited(key, attempt, name, outcome, uid=uid),
                    NodeEmptied(name, key, attempt, uid=uid),
                ]

    def _fault(self) -> None:
        node = self._node()
        changed = replace(node, ready=False, reason="Unhealthy (Xid79)", fault="Xid79")
        if self._random.random() < 0.5:
            changed = node
        self._inbox.append(NodeObserved(changed))

    def _drain(self) -> None:
        """An administrator drains the node, or its health becomes unknown."""
        drained = "drained by anna: a new disk"
        changes: dict[str, Any] = self._random.choice(
            (
                {"drain": drained, "ready": False, "reason": drained},
                {"unproven": "Unknown (AgentSilent)"},
            )
        )
        self._inbox.append(NodeObserved(replace(self._node(), **changes)))

    def _lose(self) -> None:
        self._inbox.append(NodeLost(self._node().name, "PowerLost"))

    def _delete_node(self) -> None:
        self._inbox.append(NodeRemoved(self._node().name, lost=self._random.random() < 0.7))

    def _return_node(self) -> None:
        """The node returns, without processes."""
        node = self._node()
        node_state = self.state.nodes.get(node.name)
        if node_state is not None and node_state.lost:
            self.pods = {pod for pod in self.pods if pod.node != node.name}
            for key, job in self.state.jobs.items():
                for item in job.status.occupied:
                    if item.name == node.name:
                        self._inbox.append(NodeEmptied(item.name, key, item.attempt, uid=job.uid))
        self._inbox.append(NodeObserved(node))

    def _limit(self) -> None:
        draw = self._random
        total = draw.random() < 0.2
        kind = draw.choice((QuotaSubject.USER, QuotaSubject.USER, *QuotaSubject))
        quota = Quota(
            draw.choice(("q1", "q2")),
            "*" if total else draw.choice(("*", *_SUBJECTS[kind])),
            draw.choice(("*", "high", "low")),
            draw.choice(("*", "a100")),
            draw.randint(0, 5),
            draw.choice((None, self.now + 20.0)),
            kind,
            total,
        )
        self.quotas[quota.name] = quota
        self._inbox.append(QuotaObserved(quota))

    def _assign_team(self) -> None:
        team = self._random.choice(("", "red", "blue"))
        self.teams = {"default": team} if team else {}
        self._inbox.append(TeamObserved("default", team))

    def _unlimit(self) -> None:
        for name in list(self.quotas):
            del self.quotas[name]
            self._inbox.append(QuotaRemoved(name))

    # -- invariants ----------------------------------------------------------------------------

    def _watch(self) -> None:
        """A job could run at no check during the deadline."""
        idle = idle_although_wanted(self.state, self.now)
        self._idle_since = {key: self._idle_since.get(key, self.now) for key in idle}
        for key, since in self._idle_since.items():
            if self.now - since > _PATIENCE_SECONDS:
                raise Violation(f"for {self.now - since:g} s {idle[key]}")

    def _settle_down(self) -> int:
        """Without further faults every job that can run starts in time, and no process remains."""
        self._delays = False
        steps = self._advance(0.1)
        until = self.now + _PATIENCE_SECONDS
        while self.now < until:
            steps += self._advance(self._random.choice((3.0, 5.0)))
        for why in idle_although_wanted(self.state, self.now).values():
            raise Violation(why)
        for key, job in self.state.jobs.items():
            if job.status.phase is Phase.RUNNING and not job.removed:
                own = any(pod.uid == job.uid for pod in self.pods)
                if not own and not job.status.exits:
                    raise Violation(f"{key} is Running without pods")
        self._check_objects()
        return steps

    def _check_objects(self) -> None:
        """The engine has every job that has not ended, and no other object has pods."""
        uids = {job.metadata.uid for job in self.store.values()}
        for pod in self.pods:
            if pod.uid not in uids and self._stands(pod.node):
                raise Violation(f"{pod} of a deleted object remains")
        for key, stored in self.store.items():
            job = self.state.jobs.get(key)
            lost = job is None or job.removed or job.uid != stored.metadata.uid
            # It waits while processes of the earlier object may exist on a lost node.
            waits = job is not None and any(
                not self._stands(node.name) for node in job.status.occupied
            )
            if lost and not (is_over(stored) or (waits and key in self._waiting)):
                raise Violation(f"{key}: the scheduler has lost the job: it has {job}")


@functools.cache
def _template(
    nodes: int,
    priority: str,
    place: tuple[str | None, str | None],
    cross: str,
    active_deadline: str | None,
    max_restarts: int,
    user: str,
) -> FlyerJob:
    node_class, zone = place
    optional = {"nodeClass": node_class, "zone": zone, "activeDeadline": active_deadline}
    return sample_job(
        "job", nodes, user=user, priority=priority, crossZone=cross, maxRestarts=max_restarts,
        progressDeadline="50s", preemption=PREEMPTION,
        **{name: value for name, value in optional.items() if value is not None},
    )  # fmt: skip


_DEEDS: tuple[Callable[[History], None], ...] = (
    History._submit,
    History._submit,
    History._submit,
    History._edit,
    History._remove,
    History._return_job,
    History._recreate,
    History._recreate_and_rebuild,
    History._report,
    History._report,
    History._report,
    History._exit,
    History._fault,
    History._drain,
    History._lose,
    History._delete_node,
    History._return_node,
    History._return_node,
    History._limit,
    History._unlimit,
    History._assign_team,
    History._crash,
)
