"""The verbs as coroutines. `connect_kube` gives the same ones as plain methods."""

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

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from flyer.client.logs import LogLine
    from flyer.client.protocol import WatchItem
    from flyer.kube.apiserver import Api
    from flyer.views import EventView, JobView, NodeView, QueueView, QuotaView, WhyView

__all__ = ["AsyncKubeClient"]

FINISHED_STATES = ("Succeeded", "Failed")
# What is asked of a job shows in its status when the operator has seen it: wait a moment for that.
SEEN_SECONDS_MAX = 3.0
SEEN_POLL_SECONDS = 0.05
_STARTED = (Phase.STARTING, Phase.RUNNING)


class AsyncKubeClient:
    """Talks to one API server; jobs without a namespace are in `namespace`."""

    driven = True

    def __init__(
        self, api: Api, *, namespace: str = "default", all_namespaces: bool = False
    ) -> None:
        self.api = api
        self.namespace = namespace
        self.all_namespaces = all_namespaces
        # What was known of a job when something was asked of it: what follows is told from there.
        self._known: dict[str, FlyerJobStatus] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up."""
        await self.api.close()

    # -- questions -----------------------------------------------------------------------------

    async def jobs(self) -> list[JobView]:
        """Every job of the namespace, or of all."""
        where = "" if self.all_namespaces else self.namespace
        return [view_of(job) for job in await self._list(where)]

    async def job(self, name: str) -> JobView:
        """One job."""
        return view_of(await self._job(name))

    async def document(self, name: str) -> dict[str, Any]:
        """One job's object, as the API server has it."""
        namespace, own = self._place(name)
        try:
            return await self.api.get(FLYERJOBS, own, namespace)
        except ApiError as error:
            raise words_for(error, f"job `{namespace}/{own}`") from error

    async def why(self, name: str) -> WhyView:
        """Every reason, as the scheduler that leads decided it.

        It is in the job's own status: no other right is needed than to read the job.
        """
        job = await self._job(name)
        return explain_job(job, await leaderless(self.api, job, time.time()))

    async def nodes(self) -> list[NodeView]:
        """Every node that gets gangs."""
        objects = await self._must_observe("nodes")
        return node_views([one.node for one in objects.nodes], objects.jobs)

    async def queues(self) -> list[QueueView]:
        """Every queue that has an unfinished job."""
        try:
            jobs = await self._list("")
        except FlyerError:
            jobs = await self._list(self.namespace)
        return queue_views({job.key: job for job in jobs})

    async def quotas(self) -> list[QuotaView]:
        """Every quota, and per user what is used of it."""
        objects = await self._must_observe("quotas")
        return quota_views(objects.state(time.time()), time.time())

    # -- wishes --------------------------------------------------------------------------------

    async def run_all(self, manifest: str | Path) -> list[JobView]:
        """Create every job of a manifest. All are checked, by the server too, before the first."""
        documents = await asyncio.to_thread(_documents, Path(manifest))
        for document in documents:
            document.setdefault("metadata", {}).setdefault("namespace", self.namespace)
        for dry_run in (True, False):
            made = [await self._create(one, dry_run=dry_run) for one in documents]
        return [view_of(FlyerJob.model_validate(one)) for one in made]

    async def suspend(self, name: str, *, reason: str = "") -> JobView:
        """spec.suspend: true."""
        return await self._ask(name, "suspend", {"spec": {"suspend": True}}, reason)

    async def resume(self, name: str) -> JobView:
        """spec.suspend: false."""
        return await self._ask(name, "resume", {"spec": {"suspend": False}}, "")

    async def stop(self, name: str, *, reason: str = "", kill: bool = False) -> JobView:
        """spec.stop: graceful, or now. The object stays, with its record."""
        patch = {"spec": {"stop": "now" if kill else "graceful"}}
        return await self._ask(name, "stop", patch, reason)

    async def requeue(self, name: str, *, reason: str = "") -> JobView:
        """The annotation that names the attempt which is to leave."""
        job = await self._job(name)
        status = job.status or FlyerJobStatus()
        if status.phase not in _STARTED:
            raise FlyerError.usage(
                f"`{job.key}` is {status.phase}: it has no nodes to give back",
                f"`flyer why {job.key}` says what it waits for",
            )
        notes = {REQUEUE_ANNOTATION: str(status.chain.attempt)}
        return await self._ask(name, "requeue", {"metadata": {"annotations": notes}}, reason)

    async def set_priority(self, name: str, priority: str) -> JobView:
        """spec.priority."""
        if priority not in list(Priority):
            raise FlyerError.usage(
                f"priority `{priority}` is not known", f"choose {', '.join(Priority)}"
            )
        patch = {"spec": {"priority": priority}}
        return await self._ask(name, "change the priority of", patch, "", wait=False)

    # -- streams -------------------------------------------------------------------------------

    def watch(
        self,
        *,
        timeout_seconds: float | None = None,
        since: int | None = None,  # noqa: ARG002 - past events are Kubernetes' own: see `events`
        beat_seconds: float | None = None,
    ) -> AsyncIterator[WatchItem]:
        """The present state, then every change, over broken connections too."""
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
        """The Kubernetes Events of jobs; with `follow` what the statuses tell from now on."""
        key = None if job is None else "/".join(self._place(job))
        where = key.partition("/")[0] if key else "" if self.all_namespaces else self.namespace
        if not follow:
            try:
                found = await self.api.list(
                    EVENTS, where, fieldSelector="involvedObject.kind=FlyerJob"
                )
            except ApiError as error:
                raise words_for(error) from error
            views = [event_view(one) for one in found]
            for view in sorted(views, key=lambda one: (one.time, one.sequence)):
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
        """Wait until the job is in one of `states`."""
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
        """Lines of the job's ranks over all attempts whose pods are kept, each once."""
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

    # -- plumbing ------------------------------------------------------------------------------

    def _place(self, name: str) -> tuple[str, str]:
        namespace, _, own = name.rpartition("/")
        return namespace or self.namespace, own

    async def _job(self, name: str) -> FlyerJob:
        found = job_of(await self.document(name))
        if found is None:
            raise FlyerError.usage(
                f"`{name}` was written by a newer version of the API than this `flyer` reads",
                "use the `flyer` of the operator's version",
            )
        return found

    async def _list(self, namespace: str) -> list[FlyerJob]:
        try:
            found = await self.api.list(FLYERJOBS, namespace)
        except ApiError as error:
            raise words_for(error, "FlyerJobs") from error
        return [job for one in found if (job := job_of(one)) is not None]

    async def _observed(self) -> Objects:
        return await observe(self.api)

    async def _must_observe(self, what: str) -> Objects:
        try:
            return await self._observed()
        except ApiError as error:
            raise words_for(error, what) from error

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
        """Patch the object, and wait a moment for the operator's answer to it."""
        before = await self._job(name)
        status = before.status or FlyerJobStatus()
        if status.phase in (Phase.SUCCEEDED, Phase.FAILED):
            raise FlyerError.usage(
                f"cannot {verb} `{before.key}`: it has {status.phase}",
                f"delete it and run it again: `kubectl delete flyerjob {before.metadata.name}`",
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
        return await self._seen(name, status)

    async def _seen(self, name: str, before: FlyerJobStatus) -> JobView:
        deadline = time.monotonic() + SEEN_SECONDS_MAX
        while True:
            job = await self._job(name)
            if job.status != before or time.monotonic() > deadline:
                return view_of(job)
            await asyncio.sleep(SEEN_POLL_SECONDS)


def _documents(manifest: Path) -> list[dict[str, Any]]:
    """The manifest's objects as they were written, once they are known to be FlyerJobs."""
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
            str(error), "docs/reference/api.md tells every field of a FlyerJob"
        ) from error
    return [one for one in YAML(typ="safe", pure=True).load_all(text) if one is not None]
