"""Asynchronous client: the verbs as coroutines. `connect_kube` returns the blocking client."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ruamel.yaml import YAML

from flyer.api import (
    REASON_ANNOTATION,
    REQUEUE_ANNOTATION,
    FlyerJob,
    FlyerJobStatus,
    ManifestError,
    Phase,
    Priority,
    load_manifest,
)
from flyer.client.kubernetes.cluster import Objects, explain_job, leaderless, observe
from flyer.client.kubernetes.errors import words_for
from flyer.client.kubernetes.log_stream import stream_logs
from flyer.client.kubernetes.views import event_view, job_of, node_views, view_of
from flyer.client.kubernetes.watch import JobWatch
from flyer.errors import FlyerError
from flyer.kube.apiserver.errors import ApiError
from flyer.kube.apiserver.resources import EVENTS, FLYERJOBS
from flyer.presenter import queue_views, quota_views
from flyer.views import FINISHED_STATES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from flyer.client.logs import LogLine
    from flyer.client.watch_item import WatchItem
    from flyer.kube.apiserver import Api
    from flyer.views import EventView, JobView, NodeView, QueueView, QuotaView, WhyView

__all__ = ["AsyncKubeClient"]

# A change shows in the status when the operator has handled it: wait for that.
HANDLED_SECONDS_MAX = 3.0
HANDLED_POLL_SECONDS = 0.05
_STARTED = (Phase.STARTING, Phase.RUNNING)


class AsyncKubeClient:
    """Client of one API server; jobs named without a namespace are in `namespace`."""

    driven = True

    def __init__(
        self, api: Api, *, namespace: str = "default", all_namespaces: bool = False
    ) -> None:
        self.api = api
        self.namespace = namespace
        self.all_namespaces = all_namespaces
        # The status of a job before its last change by this client: events start from there.
        self._known: dict[str, FlyerJobStatus] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self.api.close()

    # -- reads ---------------------------------------------------------------------------------

    async def jobs(self) -> list[JobView]:
        """Every job of the namespace, or of all."""
        where = "" if self.all_namespaces else self.namespace
        return [view_of(job) for job in await self._list(where)]

    async def job(self, name: str) -> JobView:
        """One job."""
        return view_of(await self._job(name))

    async def document(self, name: str) -> dict[str, Any]:
        """The FlyerJob object of a job, from the API server."""
        namespace, own = self._place(name)
        try:
            return await self.api.get(FLYERJOBS, own, namespace)
        except ApiError as error:
            raise words_for(error, f"job `{namespace}/{own}`") from error

    async def why(self, name: str) -> WhyView:
        """Every reason why a job is not running, and what would unblock it.

        The leading scheduler writes it into the job's status: the right to read the job suffices.
        """
        job = await self._job(name)
        return explain_job(job, await leaderless(self.api, job, time.time()))

    async def nodes(self) -> list[NodeView]:
        """Every schedulable node."""
        objects = await self._must_observe("nodes")
        return node_views([node.node for node in objects.nodes], objects.jobs)

    async def queues(self) -> list[QueueView]:
        """Every queue that has an unfinished job."""
        try:
            jobs = await self._list("")
        except FlyerError:
            jobs = await self._list(self.namespace)
        return queue_views({job.key: job for job in jobs})

    async def quotas(self) -> list[QuotaView]:
        """Every quota and its usage per subject."""
        objects = await self._must_observe("quotas")
        return quota_views(objects.state(time.time()), time.time())

    # -- writes --------------------------------------------------------------------------------

    async def run_all(self, manifest: str | Path) -> list[JobView]:
        """Create every job of a manifest, after a dry run of all of them."""
        documents = await asyncio.to_thread(_documents, Path(manifest))
        for document in documents:
            document.setdefault("metadata", {}).setdefault("namespace", self.namespace)
        for dry_run in (True, False):
            created = [await self._create(entry, dry_run=dry_run) for entry in documents]
        return [view_of(FlyerJob.model_validate(item)) for item in created]

    async def suspend(self, name: str, *, reason: str = "") -> JobView:
        """Suspend a job: sets spec.suspend."""
        return await self._ask(name, "suspend", {"spec": {"suspend": True}}, reason)

    async def resume(self, name: str) -> JobView:
        """Resume a suspended job: clears spec.suspend."""
        return await self._ask(name, "resume", {"spec": {"suspend": False}}, "")

    async def stop(self, name: str, *, reason: str = "", kill: bool = False) -> JobView:
        """spec.stop: Graceful or Now. The object stays, with its record."""
        patch = {"spec": {"stop": "Now" if kill else "Graceful"}}
        return await self._ask(name, "stop", patch, reason)

    async def requeue(self, name: str, *, reason: str = "") -> JobView:
        """Make a job save, release its nodes and queue again: annotates the attempt."""
        job = await self._job(name)
        status = job.status or FlyerJobStatus()
        if status.phase not in _STARTED:
            raise FlyerError.usage(
                f"`{job.key}` is {status.phase}: it has no nodes to release",
                f"see `flyer why {job.key}`",
            )
        notes = {REQUEUE_ANNOTATION: str(status.history.attempt)}
        return await self._ask(name, "requeue", {"metadata": {"annotations": notes}}, reason)

    async def set_priority(self, name: str, priority: str) -> JobView:
        """Change a job's priority; a running job keeps its nodes."""
        if priority not in list(Priority):
            raise FlyerError.usage(
                f"unknown priority `{priority}`", f"use one of {', '.join(Priority)}"
            )
        patch = {"spec": {"priority": priority}}
        return await self._ask(name, "change the priority of", patch, "", wait=False)

    # -- streams -------------------------------------------------------------------------------

    def watch(
        self,
        *,
        timeout_seconds: float | None = None,
        since: int | None = None,  # noqa: ARG002 - `events` has past events
        beat_seconds: float | None = None,
    ) -> AsyncIterator[WatchItem]:
        """The current state, then every change; reconnects after failures."""
        where = "" if self.all_namespaces else self.namespace
        return JobWatch(self.api, where, self._known).items(timeout_seconds, beat_seconds)

    async def events(
        self,
        *,
        job: str | None = None,
        follow: bool = False,
        since: int = 0,
        timeout_seconds: float | None = None,
    ) -> AsyncIterator[EventView]:
        """The Kubernetes Events of jobs; with `follow` the events of future status changes."""
        key = None if job is None else "/".join(self._place(job))
        where = key.partition("/")[0] if key else "" if self.all_namespaces else self.namespace
        if not follow:
            try:
                items = await self.api.list(
                    EVENTS, where, fieldSelector="involvedObject.kind=FlyerJob"
                )
            except ApiError as error:
                raise words_for(error) from error
            views = [event_view(entry) for entry in items]
            for view in sorted(views, key=lambda view: (view.time, view.sequence)):
                if view.sequence >= since and key in (None, view.job):
                    yield view
            return
        async for item in JobWatch(self.api, where, self._known).items(timeout_seconds, None):
            if item.event is not None and key in (None, item.event.job):
                yield item.event

    async def wait(
        self,
        name: str,
        *,
        timeout_seconds: float | None = None,
        states: Collection[str] = FINISHED_STATES,
    ) -> JobView:
        """Wait until a job is in one of `states`; FlyerError (Timeout) when it takes too long."""
        last = await self.job(name)
        watch = JobWatch(self.api, last.namespace, self._known)
        if last.state not in states:
            async for item in watch.items(timeout_seconds, None):
                if item.job is not None and item.job.key == last.key:
                    last = item.job
                    if last.state in states:
                        break
        if last.state in states:
            return last
        raise FlyerError.timeout(
            f"`{last.key}` is {last.state} after {timeout_seconds or 0:g} s, "
            f"waited for {' or '.join(states)}",
            f"see `flyer why {last.key}`",
        )

    async def logs(
        self,
        name: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        follow: bool = False,
        timeout_seconds: float | None = None,
    ) -> AsyncIterator[LogLine]:
        """Lines of a job's ranks over all attempts whose pods exist, each once."""
        job = await self._job(name)
        try:
            async with asyncio.timeout(timeout_seconds):
                async for line in stream_logs(
                    self.api, job, rank=rank, attempt=attempt, follow=follow
                ):
                    yield line
        except TimeoutError:
            return
        except ApiError as error:
            raise words_for(error, f"the logs of `{job.key}`") from error

    # -- internal ------------------------------------------------------------------------------

    def _place(self, name: str) -> tuple[str, str]:
        namespace, _, own = name.rpartition("/")
        return namespace or self.namespace, own

    async def _job(self, name: str) -> FlyerJob:
        job = job_of(await self.document(name))
        if job is None:
            raise FlyerError.usage(
                f"`{name}` has a newer version of the API than this `flyer` supports",
                "use the version of `flyer` that matches the operator",
            )
        return job

    async def _list(self, namespace: str) -> list[FlyerJob]:
        try:
            items = await self.api.list(FLYERJOBS, namespace)
        except ApiError as error:
            raise words_for(error, "FlyerJobs") from error
        return [job for item in items if (job := job_of(item)) is not None]

    async def _must_observe(self, subject: str) -> Objects:
        try:
            return await observe(self.api)
        except ApiError as error:
            raise words_for(error, subject) from error

    async def _create(self, document: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
        metadata = document["metadata"]
        place = f"{metadata['namespace']}/{metadata.get('name', '')}"
        try:
            return await self.api.create(
                FLYERJOBS, document, metadata["namespace"], dry_run=dry_run
            )
        except ApiError as error:
            raise words_for(error, f"job `{place}`") from error

    async def _ask(
        self, name: str, verb: str, patch: dict[str, Any], reason: str, *, wait: bool = True
    ) -> JobView:
        """Patch the object, and wait a short time for the operator to handle it."""
        before = await self._job(name)
        status = before.status or FlyerJobStatus()
        if status.phase.ended:
            raise FlyerError.usage(
                f"cannot {verb} `{before.key}`: it has {status.phase}",
                f"delete it and create it again: `kubectl delete flyerjob {before.metadata.name}`",
            )
        self._known[before.key] = status
        notes = patch.setdefault("metadata", {}).setdefault("annotations", {})
        notes[REASON_ANNOTATION] = reason or None
        namespace, own = self._place(name)
        try:
            changed = await self.api.merge(FLYERJOBS, own, patch, namespace)
        except ApiError as error:
            raise words_for(error, f"job `{before.key}`") from error
        same = changed["metadata"].get("resourceVersion") == before.metadata.resource_version
        if same or not wait:
            return await self.job(name)
        return await self._handled(name, status)

    async def _handled(self, name: str, before: FlyerJobStatus) -> JobView:
        deadline = time.monotonic() + HANDLED_SECONDS_MAX
        while True:
            job = await self._job(name)
            if job.status != before or time.monotonic() > deadline:
                return view_of(job)
            await asyncio.sleep(HANDLED_POLL_SECONDS)


def _documents(manifest: Path) -> list[dict[str, Any]]:
    """The objects of a manifest, unchanged, after validation."""
    try:
        text = manifest.read_text()
        load_manifest(text, name=str(manifest))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise FlyerError.usage(
            f"cannot read the manifest `{manifest}`: {reason}", "give the path of a FlyerJob"
        ) from error
    except ManifestError as error:
        raise FlyerError.usage(
            str(error), "see docs/reference/api.md for the fields of a FlyerJob"
        ) from error
    return [item for item in YAML(typ="safe", pure=True).load_all(text) if item is not None]
