"""Simulation in virtual time: a store, nodes, scripted jobs, and the scheduling engine.

Every choice is drawn from one seed, so a seed reproduces a run. `Simulation` is also a driver: it
performs the engine's actions on machines that may be dead, slow or stuck, and it may lose its
memory at any moment (`crash`), also between two actions of one step.
"""

from __future__ import annotations

import heapq
import random
from functools import partial
from typing import TYPE_CHECKING, Any

from flyer.api import FlyerJob, FlyerJobStatus, Phase, Priority, quantize
from flyer.engine import (
    CheckpointReported,
    Commit,
    Event,
    Failed,
    GangStarted,
    JobSubmitted,
    Killed,
    Node,
    NodeEmptied,
    NodeLost,
    NodeObserved,
    PodExited,
    ProgressReported,
    Quota,
    QuotaObserved,
    QuotaRemoved,
    Released,
    ResumeRequested,
    SchedulerSettings,
    Signal,
    Start,
    Stop,
    StopRequested,
    Succeeded,
    SuspendReceived,
    SuspendRequested,
    Tick,
    WakeAt,
    rebuild,
    step,
)
from flyer.sim.invariants import Invariants
from flyer.sim.observe import observe, observed_node
from flyer.sim.pods import Cluster, Machine, Pod, Run
from flyer.sim.scripts import Behavior, Script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flyer.engine import Action, EngineState, Outcome

EPOCH_SECONDS = 1_800_000_000.0
_STEPS_AT_ONE_TIME_MAX = 200


class Simulation:
    """One simulation."""

    def __init__(
        self,
        nodes: Iterable[Node],
        *,
        settings: SchedulerSettings,
        seed: int,
        latency_seconds: float = 0.1,
    ) -> None:
        self.now = EPOCH_SECONDS
        self.settings = settings
        self.cluster = Cluster({node.name: Machine(node) for node in nodes})
        self.store: dict[str, FlyerJob] = {}  # what survives a crash
        self.quotas: dict[str, Quota] = {}  # likewise
        self.scripts: dict[str, Script] = {}
        self.invariants = Invariants(self.cluster, self.store)
        self.leader_epoch = 0
        self.crash_after_actions: int | None = None
        self.history: list[tuple[float, tuple[Event, ...], tuple[Action, ...]]] = []
        self._random = random.Random(seed)  # noqa: S311 - a simulation's
        self._latency_seconds = latency_seconds
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._inbox: list[Event] = []
        self._generation = 0  # of the driver: messages to an earlier one are lost
        self.state: EngineState = rebuild((), (), self.now, 0, settings)
        self.crash()

    # Actions of users and administrators, and faults.

    def submit(self, job: FlyerJob, script: Script) -> None:
        """A user submits a job."""
        self.store[job.key] = job
        self.scripts[job.key] = script
        self._deliver(JobSubmitted(job))

    def suspend(self, job: str) -> None:
        """A user sets spec.suspend."""
        self._edit_suspend(job, suspend=True)
        self._deliver(SuspendRequested(job, "anna", "maintenance"))

    def resume(self, job: str) -> None:
        """A user clears spec.suspend."""
        self._edit_suspend(job, suspend=False)
        self._deliver(ResumeRequested(job))

    def stop(self, job: str) -> None:
        """A user stops the job for good."""
        self._deliver(StopRequested(job, "anna"))

    def prioritize(self, job: str, priority: Priority) -> None:
        """A user changes spec.priority."""
        stored = self.store[job]
        self.store[job] = stored.replace(spec=stored.spec.replace(priority=priority))
        self._deliver(JobSubmitted(self.store[job]))

    def limit(self, quota: Quota) -> None:
        """An administrator creates or changes a FlyerQuota."""
        self.quotas[quota.name] = quota
        self._deliver(QuotaObserved(quota))

    def unlimit(self, name: str) -> None:
        """An administrator deletes a FlyerQuota."""
        self.quotas.pop(name, None)
        self._deliver(QuotaRemoved(name))

    def lose_node(self, name: str) -> None:
        """The power of a machine fails; its peers detect it first."""
        machine = self.cluster.machines[name]
        if not machine.powered:
            return
        jobs = self.cluster.live_jobs_on(name)
        machine.powered = False
        for job, attempt in jobs:
            run = self.cluster.runs[(job, attempt)]
            for node in run.nodes if run.alive else ():
                if node != name:
                    self._after(0.5, partial(self._exit, run, node, Failed(1, "peer lost")))
            run.alive = False
        self._after(1.0, lambda: self._miss(name))

    def return_node(self, name: str) -> None:
        """The machine boots again, with nothing on it."""
        machine = self.cluster.machines[name]
        machine.sticky = False
        if not machine.powered:
            self._miss(name)
            machine.powered = True
            for pod in [pod for pod in self.cluster.pods.values() if pod.node == name]:
                self._remove(pod)
        self._observe(name)

    def kill_pod(self, name: str) -> None:
        """The processes on a machine die without a decision of the engine."""
        for pod in self.cluster.pods_on(name):
            if pod.alive:
                run = self.cluster.runs[(pod.job, pod.attempt)]
                run.alive = False
                for node in run.nodes:
                    outcome = Killed(9) if node == name else Failed(1, "peer lost")
                    self._exit(run, node, outcome)

    def crash(self, *, with_pods: bool = False) -> None:
        """The driver and the engine restart. On one machine the pods die with them."""
        self._generation += 1
        self._inbox.clear()
        if with_pods:
            for run in self.cluster.runs.values():
                run.alive = False
            self.cluster.pods.clear()
        self.leader_epoch += 1
        jobs = [FlyerJob.model_validate(job.to_object()) for job in self.store.values()]
        nodes = [observed_node(machine) for machine in self.cluster.machines.values()]
        self.state = rebuild(
            nodes, jobs, self.now, self.leader_epoch, self.settings, self.quotas.values()
        )
        self._inbox.extend(observe(self.store.values(), self.cluster))
        self._inbox.append(Tick())

    # Running.

    def run(self, seconds: float) -> None:
        """Advance the virtual time."""
        until = self.now + seconds
        self._drain()
        while self._timers and self._timers[0][0] <= until:
            self.now = max(self.now, self._timers[0][0])
            while self._timers and self._timers[0][0] <= self.now:
                heapq.heappop(self._timers)[2]()
            self._drain()
        self.now = max(self.now, until)

    def phase(self, job: str) -> Phase:
        """The stored phase of a job."""
        return self.status(job).phase

    def status(self, job: str) -> FlyerJobStatus:
        """The stored status of a job."""
        return self.store[job].status or FlyerJobStatus()

    def _drain(self) -> None:
        for _ in range(_STEPS_AT_ONE_TIME_MAX):
            if not self._inbox:
                return
            events, self._inbox = tuple(self._inbox), []
            self.state, actions = step(self.state, events, self.now)
            self.invariants.within_quotas(self.state, actions)
            self.history.append((self.now, events, actions))
            for index, action in enumerate(actions):
                if self.crash_after_actions is not None and index == self.crash_after_actions:
                    self.crash_after_actions = None
                    self.crash()
                    break
                self._do(action)
                self.invariants.after(action)
            else:
                self.invariants.same_as_stored(self.state)
        raise AssertionError(f"the engine does not converge at {self.now}")

    def _do(self, action: Action) -> None:
        match action:
            case Commit(job, status):
                # A round trip through text, as in a real store.
                stored = FlyerJobStatus.model_validate(status.to_object())
                self.store[job] = self.store[job].replace(status=stored)
            case Start():
                self._start(action)
            case Stop():
                for node in action.nodes:
                    self._stop(action.job, action.attempt, node)
            case Signal(job, attempt):
                self._after(self._latency(), lambda: self._signalled(job, attempt))
            case WakeAt(time):
                self._at(time, lambda: self._inbox.append(Tick()), lasting=False)
            case _:
                pass

    # Machines and pods.

    def _start(self, action: Start) -> None:
        key = (action.job, action.attempt)
        nodes = action.assignment.names
        if key not in self.cluster.runs:
            first_step = action.restore_from.step if action.restore_from else 0
            script = self.scripts[action.job]
            self.cluster.runs[key] = Run(action.job, action.attempt, script, nodes, first_step)
        run = self.cluster.runs[key]
        for node in action.assignment.nodes:
            if (node.name, *key) not in self.cluster.pods and run.alive:
                pod = Pod(action.job, action.attempt, node.name, node.zone)
                self.cluster.pods[(node.name, *key)] = pod
                if not self.cluster.machines[node.name].powered:
                    run.alive = False
        if run.alive and not run.up:
            self._after(run.script.start_seconds, lambda: self._up(run), lasting=True)

    def _up(self, run: Run) -> None:
        if run.alive and not run.up:
            run.up = True
            self._send(GangStarted(run.job, run.attempt))
            self._after(run.script.step_seconds, lambda: self._step(run), lasting=True)

    def _step(self, run: Run) -> None:
        script = run.script
        if (
            not run.alive
            or run.released
            or (run.received and script.behavior is not Behavior.SILENT)
        ):
            return
        faulty = not script.once or run.attempt == 1
        if faulty and script.hangs_at_step is not None and run.step >= script.hangs_at_step:
            return
        if faulty and script.fails_at_step is not None and run.step >= script.fails_at_step:
            run.alive = False
            for node in run.nodes:
                self._after(self._latency(), partial(self._exit, run, node, Failed(1, "boom")))
            return
        run.step += 1
        self._send_in_order(run, ProgressReported(run.job, run.attempt, run.step))
        if run.step % script.checkpoint_steps == 0:
            saved = run.step
            self._after(script.save_seconds, lambda: self._saved(run, saved), lasting=True)
        if run.step >= script.steps:
            run.alive = False
            for node in run.nodes:
                self._after(
                    self._latency(), partial(self._exit, run, node, Succeeded()), lasting=True
                )
            return
        self._after(script.step_seconds, lambda: self._step(run), lasting=True)

    def _saved(self, run: Run, step_number: int) -> None:
        if run.alive and step_number >= (run.saved_step or 0):
            run.saved_step, run.saved_path = step_number, f"/3fs/{run.job}/step-{step_number}"
            self._send_in_order(
                run, CheckpointReported(run.job, run.attempt, step_number, run.saved_path)
            )

    def _signalled(self, job: str, attempt: int) -> None:
        run = self.cluster.runs.get((job, attempt))
        if run is None or not run.alive or run.received or run.script.behavior is Behavior.SILENT:
            return
        run.received = True
        self._send_in_order(run, SuspendReceived(job, attempt))
        if run.script.behavior is Behavior.CRASHES:
            run.alive = False
            for node in run.nodes:
                self._after(self._latency(), partial(self._exit, run, node, Failed(1, "torn")))
            return
        seconds, every = run.script.save_seconds, run.script.save_report_seconds
        reported = every
        while reported < seconds:
            self._after(reported, lambda: self._report(run), lasting=True)
            reported += every
        self._after(seconds, lambda: self._leave(run), lasting=True)

    def _report(self, run: Run) -> None:
        if run.alive:
            self._send_in_order(run, ProgressReported(run.job, run.attempt, run.step))

    def _leave(self, run: Run) -> None:
        if not run.alive:
            return
        self._saved(run, run.step)
        if run.script.behavior is Behavior.EXITS:
            run.alive = False
            for node in run.nodes:
                self._exit(run, node, Succeeded())
        else:
            run.released = True
            self.invariants.released(run)
            self._send_in_order(run, Released(run.job, run.attempt))

    def _exit(self, run: Run, node: str, outcome: Outcome) -> None:
        pod = self.cluster.pods.get((node, run.job, run.attempt))
        if pod is None or not pod.alive or not self.cluster.machines[node].powered:
            return
        pod.alive, pod.outcome = False, outcome
        self._send(PodExited(run.job, run.attempt, node, outcome))
        self._after(0.2, lambda: self._remove(pod), lasting=True)

    def _stop(self, job: str, attempt: int, node: str) -> None:
        machine = self.cluster.machines[node]
        pod = self.cluster.pods.get((node, job, attempt))
        if not machine.powered or machine.sticky:
            return
        if pod is None:
            self._send(NodeEmptied(node, job, attempt))
            return
        pod.alive = False
        self.cluster.runs[(job, attempt)].alive = False
        self._after(self._latency(), lambda: self._remove(pod), lasting=True)

    def _remove(self, pod: Pod) -> None:
        if self.cluster.machines[pod.node].powered and not self.cluster.machines[pod.node].sticky:
            pod.alive = False
            self.cluster.pods.pop((pod.node, pod.job, pod.attempt), None)
            # After its PodExited, whatever the latency of that was.
            self._after(
                2 * self._latency_seconds,
                lambda: self._send(NodeEmptied(pod.node, pod.job, pod.attempt)),
                lasting=True,
            )

    def _miss(self, name: str) -> None:
        """Report the machine as dead, unless it has returned."""
        machine = self.cluster.machines[name]
        if not machine.powered:
            self._report_node(machine, NodeLost(name, "PowerLost", "no heartbeat for 1 s"))

    def _observe(self, name: str) -> None:
        machine = self.cluster.machines[name]
        self._report_node(machine, NodeObserved(observed_node(machine)))

    def _report_node(self, machine: Machine, event: Event) -> None:
        """Reports about one machine arrive in order."""
        machine.heard_at = max(machine.heard_at, self.now + self._latency())
        self._at(machine.heard_at, lambda: self._inbox.append(event), lasting=False)

    # Time.

    def _edit_suspend(self, job: str, *, suspend: bool) -> None:
        stored = self.store[job]
        self.store[job] = stored.replace(spec=stored.spec.replace(suspend=suspend))

    def _latency(self) -> float:
        return self._random.uniform(0.0, self._latency_seconds)

    def _deliver(self, event: Event) -> None:
        self._inbox.append(event)

    def _send_in_order(self, run: Run, event: Event) -> None:
        """Deliver a message of a job; messages of one job arrive in order."""
        run.heard_at = max(run.heard_at, self.now + self._latency())
        self._at(run.heard_at, lambda: self._inbox.append(event), lasting=False)

    def _send(self, event: Event) -> None:
        self._after(self._latency(), lambda: self._inbox.append(event), lasting=False)

    def _after(self, seconds: float, do: Callable[[], None], *, lasting: bool = True) -> None:
        self._at(self.now + seconds, do, lasting=lasting)

    def _at(self, time: float, do: Callable[[], None], *, lasting: bool) -> None:
        """Call `do` at that time; a crash of the driver cancels it unless it is lasting."""
        generation = self._generation
        self._sequence += 1

        def run_entry() -> None:
            if lasting or generation == self._generation:
                do()

        entry: tuple[float, int, Any] = (quantize(max(time, self.now)), self._sequence, run_entry)
        heapq.heappush(self._timers, entry)


__all__ = ["EPOCH_SECONDS", "Simulation"]
