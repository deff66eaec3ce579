"""Verbs of the control socket, one method each (docs/reference/cli.md has their JSON)."""

from __future__ import annotations

import asyncio
import getpass
import inspect
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flyer import engine
from flyer.api import FlyerJob, Phase, Priority
from flyer.engine import (
    Event,
    JobSubmitted,
    ResumeRequested,
    StopRequested,
    SuspendRequested,
)
from flyer.errors import FlyerError
from flyer.local.submit import read_manifest, submit
from flyer.presenter import queue_views, quota_views, why_view
from flyer.views import to_json

if TYPE_CHECKING:
    from flyer.local.control import Subscription
    from flyer.local.driver import Driver

__all__ = ["Operations"]

TEXT_CHARACTERS_MAX: Final = 500
EMPTY_SECONDS_MAX: Final = 15.0
EMPTY_POLL_SECONDS: Final = 0.02


class Operations:
    """The requests that clients may send to a driver (flyer.local.control.ControlHandler)."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._verbs = {
            "ping": self._ping,
            "run": self._run,
            "jobs": self._jobs,
            "job": self._job,
            "document": self._document,
            "why": self._why,
            "suspend": self._suspend,
            "resume": self._resume,
            "stop": self._stop,
            "requeue": self._requeue,
            "nodes": self._nodes,
            "queues": self._queues,
            "quotas": self._quotas,
            "priority": self._priority,
            "events": self._events,
        }

    async def call(self, op: str, arguments: dict[str, Any]) -> Any:
        """Answer one request."""
        verb = self._verbs.get(op)
        if verb is None:
            raise FlyerError.usage(
                f"unknown request `{op[:40]}`; valid: {', '.join(self._verbs)}, watch",
                "use the `flyer` of the driver's version",
            )
        answer = verb(arguments)
        return to_json(await answer if inspect.isawaitable(answer) else answer)

    def subscribe(self, arguments: dict[str, Any]) -> Subscription:
        """The current state, past events if `since` is set, then every change."""
        items = self._driver.snapshot()
        since = arguments.get("since")
        if since is not None:
            past = self._driver.events.since(_integer(arguments, "since"))
            items += [{"kind": "event", "event": to_json(event)} for event in past]
        pid = arguments.get("pid")
        return self._driver.watchers.add(items, pid if isinstance(pid, int) else None)

    def unsubscribe(self, subscription: Subscription) -> None:
        """Remove a watcher."""
        self._driver.watchers.remove(subscription)

    # -- reads ---------------------------------------------------------------------------------

    def _ping(self, _arguments: dict[str, Any]) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "cluster": self._driver.cluster.name,
            "state": str(self._driver.store.paths.root),
            "jobs": len(self._driver.jobs),
        }

    def _jobs(self, _arguments: dict[str, Any]) -> list[Any]:
        return [self._driver.view(key) for key in sorted(self._driver.jobs)]

    def _job(self, arguments: dict[str, Any]) -> Any:
        return self._driver.view(self._find_job(arguments).key)

    def _document(self, arguments: dict[str, Any]) -> Any:
        return self._find_job(arguments).to_object()

    def _why(self, arguments: dict[str, Any]) -> Any:
        key = self._find_job(arguments).key
        now = max(time.time(), self._driver.state.now)
        explanation = engine.explain(self._driver.state, key, now)
        # Lost nodes of a local cluster return by themselves.
        returns = {
            name: f"wait {max(moment - now, 0):.0f} s  # until {name} is ready again"
            for name, moment in sorted(self._driver.returns_at.items(), key=lambda item: item[1])
        }
        return why_view(explanation, returns)

    def _nodes(self, _arguments: dict[str, Any]) -> list[Any]:
        return list(self._driver.node_views())

    def _queues(self, _arguments: dict[str, Any]) -> list[Any]:
        return list(queue_views(self._driver.jobs))

    def _quotas(self, _arguments: dict[str, Any]) -> list[Any]:
        return list(quota_views(self._driver.state, time.time()))

    def _events(self, arguments: dict[str, Any]) -> list[Any]:
        job = arguments.get("job")
        since = _integer(arguments, "since")
        return list(self._driver.events.since(since, job if isinstance(job, str) else None))

    # -- writes --------------------------------------------------------------------------------

    async def _run(self, arguments: dict[str, Any]) -> list[Any]:
        text, source = _text(arguments, "manifest", 1 << 20), _text(arguments, "source")
        await self._until_empty([job.key for job in read_manifest(text, source)])
        if self._driver.ending:
            raise FlyerError.unreachable(
                "the driver is ending: every job has finished",
                "repeat the command",
            )
        keys = submit(
            self._driver, text, source, Path(_text(arguments, "folder", characters_max=4096))
        )
        return [self._driver.view(key) for key in keys]

    async def _until_empty(self, keys: list[str]) -> None:
        """Wait until the last process of an ended job of the same name has ended."""
        deadline = time.monotonic() + EMPTY_SECONDS_MAX
        while leaving := [key for key in keys if self._leaves(key)]:
            if time.monotonic() > deadline:
                raise FlyerError.timeout(
                    f"processes of the ended job `{leaving[0]}` still run after "
                    f"{EMPTY_SECONDS_MAX:g} s",
                    "`flyer nodes` lists them; submit again after they have ended",
                )
            await asyncio.sleep(EMPTY_POLL_SECONDS)

    def _leaves(self, key: str) -> bool:
        job = self._driver.jobs.get(key)
        status = job.status if job else None
        return status is not None and status.phase.ended and bool(status.occupied)

    def _suspend(self, arguments: dict[str, Any]) -> Any:
        job = self._unfinished(arguments, "suspend")
        reason = _text(arguments, "reason")
        return self._set_suspend(job, SuspendRequested(job.key, _user(), reason), suspend=True)

    def _resume(self, arguments: dict[str, Any]) -> Any:
        job = self._unfinished(arguments, "resume")
        if not job.spec.suspend:
            phase = job.status.phase if job.status else Phase.QUEUED
            raise FlyerError.usage(
                f"`{job.key}` is {phase}, not suspended",
                f"`flyer why {job.metadata.name}` explains why it waits",
            )
        return self._set_suspend(job, ResumeRequested(job.key), suspend=False)

    def _requeue(self, arguments: dict[str, Any]) -> Any:
        """Suspend the job and resume it immediately: it releases its nodes and queues again."""
        job = self._unfinished(arguments, "requeue")
        phase = job.status.phase if job.status else Phase.QUEUED
        if phase not in (Phase.RUNNING, Phase.STARTING):
            raise FlyerError.usage(
                f"`{job.key}` is {phase}: it has no nodes to release",
                f"`flyer why {job.metadata.name}` explains why it waits",
            )
        reason = _text(arguments, "reason") or "requeued"
        # Two steps: the first starts the suspension, the second lets the job queue again.
        self._driver.advance([SuspendRequested(job.key, _user(), reason)])
        self._driver.advance([ResumeRequested(job.key)])
        return self._driver.view(job.key)

    def _stop(self, arguments: dict[str, Any]) -> Any:
        job = self._unfinished(arguments, "stop")
        kill = arguments.get("kill") is True
        stop = StopRequested(job.key, _user(), _text(arguments, "reason"), kill)
        self._driver.advance([stop])
        return self._driver.view(job.key)

    def _priority(self, arguments: dict[str, Any]) -> Any:
        """Change the priority; the spec is stored first, as for a suspension."""
        job = self._unfinished(arguments, "change the priority of")
        text = _text(arguments, "priority")
        try:
            priority = Priority(text)
        except ValueError:
            raise FlyerError.usage(
                f"unknown priority `{text}`", f"choose {', '.join(Priority)}"
            ) from None
        job = job.replace(
            spec=job.spec.replace(priority=priority),
            metadata=job.metadata.replace(generation=(job.metadata.generation or 0) + 1),
        )
        self._driver.store.commit(job.key, job.to_object())
        self._driver.jobs[job.key] = job
        self._driver.advance([JobSubmitted(job)])
        return self._driver.view(job.key)

    def _set_suspend(self, job: FlyerJob, event: Event, *, suspend: bool) -> Any:
        """Store the request in the spec first: it survives the death of this process."""
        generation = (job.metadata.generation or 0) + 1
        job = job.replace(
            spec=job.spec.replace(suspend=suspend),
            metadata=job.metadata.replace(generation=generation),
        )
        self._driver.store.commit(job.key, job.to_object())
        self._driver.jobs[job.key] = job
        self._driver.advance([event])
        return self._driver.view(job.key)

    # -- arguments -----------------------------------------------------------------------------

    def _find_job(self, arguments: dict[str, Any]) -> FlyerJob:
        key = _text(arguments, "job")
        job = self._driver.jobs.get(key)
        if job is None:
            job_names = ", ".join(sorted(self._driver.jobs)[:10]) or "none"
            raise FlyerError.not_found(
                f"unknown job `{key}`; jobs: {job_names}", "`flyer ps` lists all jobs"
            )
        return job

    def _unfinished(self, arguments: dict[str, Any], verb: str) -> FlyerJob:
        job = self._find_job(arguments)
        if job.status and job.status.phase.ended:
            raise FlyerError.usage(
                f"cannot {verb} `{job.key}`: it has {job.status.phase}",
                "`flyer run` with its manifest starts it again as a new job",
            )
        return job


def _text(arguments: dict[str, Any], name: str, characters_max: int = TEXT_CHARACTERS_MAX) -> str:
    value = arguments.get(name, "")
    if not isinstance(value, str) or len(value) > characters_max:
        raise FlyerError.usage(f"`{name}` must be a text of at most {characters_max} characters")
    return value


def _integer(arguments: dict[str, Any], name: str) -> int:
    value = arguments.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool):
        raise FlyerError.usage(f"`{name}` must be an integer, not {value!r:.40}")
    return value


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "user"
