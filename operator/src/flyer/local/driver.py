"""The local driver: observe, step the engine, commit, act. Everything runs in one event loop.

`advance` is the only place where the engine is stepped: it takes events, gets actions, performs
the commits first and then the rest. Effects report back as events into the inbox. Decisions are in
the jobs' files before the driver acts on them, so this process may die at any point: the next one
reads the files, ensures that no process remains, and resumes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from flyer import engine
from flyer.attempt_history import History
from flyer.engine import (
    Commit,
    Event,
    Finish,
    JobFault,
    LogObserved,
    NodeEmptied,
    NodeLost,
    NodeObserved,
    ProgressReported,
    Signal,
    Start,
    Stop,
    Tick,
    WakeAt,
)
from flyer.engine.decision_log import step_line
from flyer.errors import ExitStatus, FlyerError
from flyer.job_events import EVENT_DROPPED, NODE_LOST, NODE_READY, RANK_FAILED, job_events
from flyer.local.attempts import Attempts
from flyer.local.event_log import EventLog
from flyer.local.node_view import node_view
from flyer.local.orphan_processes import MARKER, kill_orphans
from flyer.local.pods import Pods
from flyer.local.restart import rebuilt, vanished_pods
from flyer.local.store import write_atomically
from flyer.local.watchers import Watchers
from flyer.presenter import job_view
from flyer.views import EventView, FailureView, JobView, NodeView, ProgressView, to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer.api import FlyerJob
    from flyer.engine import Action, EngineState
    from flyer.job.failure import Failure
    from flyer.local.cluster import LocalCluster
    from flyer.local.store import Store

__all__ = ["Driver"]

LOG_WATCH_SECONDS: Final = 0.25
# The driver must stay for a program that follows one job and then submits another.
LINGER_SECONDS: Final = 2.0
# Longest sleep of the loop, so that a change of the clock cannot stop it.
IDLE_SECONDS_MAX: Final = 60.0

log = logging.getLogger(__name__)


class Driver:
    """Drives one cluster until every job has ended, or until `stop` is called."""

    def __init__(
        self,
        cluster: LocalCluster,
        store: Store,
        *,
        preload: Sequence[str] = (),
        keep: bool = False,
    ) -> None:
        self.cluster = cluster
        self.store = store
        self.watchers = Watchers()
        self.history = History()
        self.events = EventLog(store, self._publish_event)
        for event in self.events.since(0):
            self.history.add(event)
        self.jobs: dict[str, FlyerJob] = {job.key: job for job in store.jobs()}
        self.progress: dict[str, ProgressView] = {}
        self.ending = False
        self._keep = keep
        self._stopped = False
        self._broken: FlyerError | None = None
        self._inbox: list[Event] = []
        self._wake = asyncio.Event()
        self._wake_at = 0.0
        self.returns_at: dict[str, float] = {}
        self._shown_nodes: list[NodeView] = []
        self._pods = Pods(
            self.enqueue,
            self._rank_failed,
            self._crashed,
            preload=sorted({*cluster.preload, *preload}),
            marker={MARKER: str(store.paths.root)},
            stop_pause_seconds=cluster.settings.stop_pause_seconds,
            log_path=store.paths.root / "fork-server.log",
        )
        self._attempts = Attempts(store.paths, self._pods, self.enqueue, self._crashed)
        self._state = rebuilt(cluster, store, self.jobs)

    # -- life ----------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """The engine's state, for reads."""
        return self._state

    def take_over(self) -> None:
        """Kill the processes of an earlier driver."""
        killed = kill_orphans(self.store.paths.root)
        if killed:
            log.warning("killed %d processes that an earlier driver left behind", killed)

    def open(self) -> None:
        """Resume every stored job."""
        write_atomically(self.store.paths.cluster, self.cluster.to_object())
        self._pods.open()
        observed = [NodeObserved(node) for node in self.cluster.engine_nodes()]
        self.advance([*observed, *vanished_pods(self.jobs, self.events)])

    async def run(self) -> None:
        """Drive until every job has ended (with `keep`: until stopped)."""
        watch = asyncio.create_task(self._watch_logs())
        try:
            while not self._stopped:
                if self.finished and not self._keep and not await self._more_comes():
                    break
                await self._until_due()
                events, self._inbox = self._inbox, []
                self.advance(events or [Tick()])
            if self._broken is not None:
                raise self._broken
        finally:
            self.ending = True
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _more_comes(self) -> bool:
        """Whether a watching program may submit its next job after the last one has ended."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LINGER_SECONDS
        while self.finished and not self._stopped and self.watchers.has_external:
            remaining = deadline - loop.time()
            if remaining <= 0:
                return False
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(remaining, LINGER_SECONDS / 10)):
                    await self._wake.wait()
        return not self.finished

    async def close(self) -> None:
        """Kill all pods, notify watchers and close. Jobs stay on disk."""
        await asyncio.gather(self._pods.close(), self._attempts.close())
        self.watchers.end()

    def stop(self) -> None:
        """Make `run` return soon."""
        self._stopped = True
        self._wake.set()

    @property
    def finished(self) -> bool:
        """Whether every job has ended and every node is empty."""
        return not self._attempts.running() and all(
            job.status is not None and job.status.phase.ended and not job.status.occupied
            for job in self.jobs.values()
        )

    async def _until_due(self) -> None:
        while not self._inbox and not self._stopped:
            self._wake.clear()
            remaining = min(self._wake_at - time.time(), IDLE_SECONDS_MAX)
            if remaining <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await self._wake.wait()
            if self._keep is False and self.finished:
                return

    # -- events in -----------------------------------------------------------------------------

    def enqueue(self, event: Event) -> None:
        """Queue an event for the engine."""
        job = getattr(event, "job", None)
        if isinstance(job, str) and not isinstance(event, ProgressReported):
            attempt = self._attempts.of(job)
            if attempt is not None:
                attempt.gateway.flush()
        if isinstance(event, NodeEmptied):
            self._attempts.emptied(event.job, event.attempt)
        if isinstance(event, NodeLost):
            self._node_lost(event)
        self._inbox.append(event)
        self._wake.set()

    def _node_lost(self, event: NodeLost) -> None:
        pod = self._pods.on_node(event.node)
        seconds = self.cluster.node_return_seconds
        self.events.record(
            time.time(),
            NODE_LOST,
            f"{event.node}: {event.evidence}; it returns in {seconds:g} s",
            job=pod.job if pod else "",
            attempt=pod.attempt if pod else None,
            node=event.node,
            warning=True,
            fields={"cause": event.cause},
        )
        self.returns_at[event.node] = time.time() + seconds
        asyncio.get_running_loop().call_later(seconds, self._node_returned, event.node)

    def _node_returned(self, name: str) -> None:
        self.returns_at.pop(name, None)
        self.events.record(time.time(), NODE_READY, f"{name} is ready again", node=name)
        for node in self.cluster.engine_nodes():
            if node.name == name:
                self.enqueue(NodeObserved(node))

    def _rank_failed(self, job: str, attempt: int, failure: Failure) -> None:
        view = FailureView(
            rank=failure.rank,
            node=failure.node,
            exit_status=failure.exit_status,
            signal=failure.signal,
            traceback=failure.traceback or "",
        )
        message = f"rank {failure.rank} on node {failure.node}: {failure.outcome}"
        previous = self.history.of(job).failure
        if previous != view:
            self.events.record(
                time.time(), RANK_FAILED, message, job=job, attempt=attempt, node=failure.node,
                warning=True, fields=to_json(view),
            )  # fmt: skip

    def _crashed(self, error: BaseException) -> None:
        """End after a bug in a task of the driver: other tasks might wait for it without end."""
        log.error("a task of the driver failed", exc_info=error)
        self._broken = FlyerError(
            f"a bug in flyer ended the driver: {error!r}",
            exit_status=ExitStatus.UNFINISHED,
            code="Bug",
            hint="`flyer run` resumes every unfinished job; please report the traceback above",
        )
        self.stop()

    async def _watch_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_WATCH_SECONDS)
            for attempt in self._attempts.running():
                if attempt.log_grew(time.monotonic()):
                    self.enqueue(LogObserved(attempt.start.job, attempt.start.attempt))

    # -- the step ------------------------------------------------------------------------------

    def advance(self, events: Sequence[Event]) -> None:
        """Step the engine and perform its actions. Never re-entered: effects only queue events.

        If a decision cannot be stored, the driver ends before it acts on it: the stored state is
        then still the actual one.
        """
        if self._broken is not None:
            raise self._broken
        try:
            self._advance(events)
        except FlyerError as error:
            self._broken = error
            self.stop()
            raise

    def _advance(self, events: Sequence[Event]) -> None:
        now = max(time.time(), self._state.now)
        actions, events = self._step(events, now)
        # Every step including ticks: a replay must take the same path through the same states.
        self.store.note(self.store.decisions, step_line(events, now, actions))
        self._wake_at = now + IDLE_SECONDS_MAX
        changed = set()
        for action in actions:
            if isinstance(action, Commit):
                self._commit(action, now)
                changed.add(action.job)
            else:
                self._perform(action)
        self._publish(changed)
        self._wake.set()  # the next deadline may have changed, or no work may remain

    def _step(
        self, events: Sequence[Event], now: float
    ) -> tuple[Sequence[Action], Sequence[Event]]:
        """The step's result and its events; an event that the engine fails on is dropped."""
        while True:
            try:
                self._state, actions = engine.step(self._state, events, now)
            except JobFault as fault:
                if fault.event is None:
                    raise
                log.exception("a bug, please report it")
                why = f"{fault}: {fault.__cause__!r:.400}"
                self.events.record(now, EVENT_DROPPED, why, job=fault.job, warning=True)
                events = [event for event in events if event is not fault.event]
            else:
                return actions, events

    def _commit(self, action: Commit, now: float) -> None:
        job = self.jobs.get(action.job)
        if job is None:
            return
        before = job.status
        job = job.replace(status=action.status)
        self.store.commit(action.job, job.to_object())
        self.jobs[action.job] = job
        for event in job_events(before, action.status):
            self.events.record(
                now, event.reason, event.message, job=action.job, attempt=event.attempt,
                node=event.node, warning=event.warning, fields=event.fields,
            )  # fmt: skip

    def _perform(self, action: Action) -> None:
        match action:
            case Start(job=key):
                self._attempts.start(self.jobs[key], action, lambda: self._progressed(key))
            case Signal():
                self._attempts.signal(action)
            case Stop():
                self._attempts.stop(action)
            case WakeAt(time=moment):
                self._wake_at = min(self._wake_at, moment)
            case Finish():
                pass  # an attempt closes its socket when its last node is empty
            case _:
                pass  # with one driver the engine's state itself is the token's holder

    # -- views ---------------------------------------------------------------------------------

    def view(self, key: str) -> JobView:
        """One job as clients see it."""
        logs = self.store.paths.job_logs(key)
        return job_view(self.jobs[key], self.history.of(key), self.progress.get(key), logs)

    def node_views(self, *, with_pids: bool = True) -> list[NodeView]:
        """Every node as clients see it."""
        holders = {
            node.name: job
            for job in self.jobs.values()
            if job.status and job.status.assignment and not job.status.phase.ended
            for node in job.status.assignment.nodes
        }
        views = []
        for node in self.cluster.engine_nodes():
            state = self._state.nodes[node.name]
            pod, holder = self._pods.on_node(node.name), holders.get(node.name)
            views.append(
                node_view(
                    state,
                    pod,
                    self.jobs[pod.job].spec.ranks_per_node if pod and pod.job in self.jobs else 1,
                    holder.key if holder else "",
                    str(holder.status.phase) if holder and holder.status else "",
                    self.returns_at.get(node.name),
                    with_pids=with_pids,
                )
            )
        return views

    def _publish_event(self, event: EventView) -> None:
        self.history.add(event)
        self.watchers.offer({"kind": "event", "event": to_json(event)})

    def _progressed(self, key: str) -> None:
        attempt = self._attempts.of(key)
        if attempt is not None and attempt.progress is not None and key in self.jobs:
            self.progress[key] = attempt.progress
            self._publish({key})

    def _publish(self, changed: set[str]) -> None:
        for key in sorted(changed & self.jobs.keys()):
            self.watchers.offer({"kind": "job", "job": to_json(self.view(key))})
        views = self.node_views(with_pids=False)
        if views != self._shown_nodes:
            self._shown_nodes = views
            self.watchers.offer({"kind": "nodes", "nodes": to_json(self.node_views())})

    def snapshot(self) -> list[dict[str, Any]]:
        """The current state as items for a new watcher."""
        items: list[dict[str, Any]] = [{"kind": "nodes", "nodes": to_json(self.node_views())}]
        items += [{"kind": "job", "job": to_json(self.view(key))} for key in sorted(self.jobs)]
        return items
