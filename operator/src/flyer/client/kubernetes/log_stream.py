"""Log stream of a job, from the pods of all its attempts.

One connection per pod. A broken connection resumes at its last line, so that every line comes once;
a new pod is found within a second. The stream ends when the job has ended and every pod's
log was read to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flyer.api import FlyerJobStatus
from flyer.client.kubernetes.log_lines import PodLog
from flyer.client.kubernetes.views import job_of
from flyer.kube.apiserver.errors import ApiError, InvalidError, NotFoundError
from flyer.kube.apiserver.resources import FLYERJOBS, PODS
from flyer.kube.pods.names import (
    ANNOTATION_DEFAULT_CONTAINER,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_NODE_RANK,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flyer.api import FlyerJob
    from flyer.client.logs import LogLine
    from flyer.kube.apiserver import Api

__all__ = ["stream_logs"]

PODS_POLL_SECONDS = 1.0
RETRY_SECONDS = 0.5
# The connection of a rank without output for this time is reopened.
SILENCE_SECONDS = 600.0
_LINES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class _Pod:
    uid: str
    name: str
    container: str
    attempt: int
    node_rank: int
    ended: bool


async def stream_logs(
    api: Api, job: FlyerJob, *, rank: int | None, attempt: int | None, follow: bool
) -> AsyncIterator[LogLine]:
    """Lines in order within a rank; without `follow` those that are there, attempt by attempt."""
    reader = _Reader(api, job, rank, attempt)
    if not follow:
        for pod in await reader.pods():
            async for line in reader.once(pod):
                yield line
        return
    queue: asyncio.Queue[LogLine | Exception | None] = asyncio.Queue(_LINES_MAX)
    task = asyncio.create_task(reader.follow(queue))
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class _Reader:
    def __init__(self, api: Api, job: FlyerJob, rank: int | None, attempt: int | None) -> None:
        self._api = api
        self._namespace, self._name = job.metadata.namespace, job.metadata.name
        self._per_node = job.spec.ranks_per_node
        self._rank, self._attempt = rank, attempt

    async def pods(self) -> list[_Pod]:
        """The pods that hold the wanted ranks, by attempt and rank."""
        items = await self._api.list(
            PODS, self._namespace, labelSelector=f"{LABEL_JOB}={self._name}"
        )
        pods = [pod for item in items if self._is_selected(pod := _pod(item))]
        return sorted(pods, key=lambda pod: (pod.attempt, pod.node_rank))

    def _is_selected(self, pod: _Pod) -> bool:
        node = None if self._rank is None else self._rank // self._per_node
        return self._attempt in (None, pod.attempt) and node in (None, pod.node_rank)

    async def once(self, pod: _Pod) -> AsyncIterator[LogLine]:
        """Output of the pod so far."""
        log = PodLog(pod.attempt, pod.node_rank, self._per_node)
        try:
            async for line in self._lines(pod, log, follow=False):
                yield line
        except (NotFoundError, InvalidError):
            return  # it has not started, or was deleted
        for rest in log.rest():
            if self._rank in (None, rest.rank):
                yield rest

    async def follow(self, queue: asyncio.Queue[LogLine | Exception | None]) -> None:
        """Read every new pod, until the job and all of its pods have ended."""
        readers: dict[str, asyncio.Task[None]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    ended = await self._job_ended()
                    for pod in await self._pods_patiently():
                        if pod.uid not in readers:
                            readers[pod.uid] = group.create_task(self._pod(pod, queue))
                    if ended and all(task.done() for task in readers.values()):
                        break
                    await asyncio.sleep(PODS_POLL_SECONDS)
        except* ApiError as errors:
            await queue.put(errors.exceptions[0])
        await queue.put(None)

    async def _job_ended(self) -> bool:
        try:
            job = job_of(await self._api.get(FLYERJOBS, self._name, self._namespace))
        except NotFoundError:
            return True
        return job is not None and (job.status or FlyerJobStatus()).phase.ended

    async def _pods_patiently(self) -> list[_Pod]:
        try:
            return await self.pods()
        except ApiError as error:
            if not error.retryable:
                raise
            return []

    async def _pod(self, pod: _Pod, queue: asyncio.Queue[LogLine | Exception | None]) -> None:
        log = PodLog(pod.attempt, pod.node_rank, self._per_node)
        while True:
            finished = await self._finished(pod)
            if finished is None:
                break
            try:
                async for line in self._lines(pod, log, follow=True):
                    await queue.put(line)
            except (NotFoundError, InvalidError):
                pass  # not created yet, or deleted
            except ApiError as error:
                if not error.retryable:
                    raise
            else:
                if finished:
                    break
            await asyncio.sleep(RETRY_SECONDS)
        for rest in log.rest():
            if self._rank in (None, rest.rank):
                await queue.put(rest)

    async def _finished(self, pod: _Pod) -> bool | None:
        """Whether the pod had ended before its log is read; None: it does not exist."""
        try:
            document = await self._api.get(PODS, pod.name, self._namespace)
        except NotFoundError:
            return None
        except ApiError as error:
            if not error.retryable:
                raise
            return False
        same = document["metadata"]["uid"] == pod.uid
        return _pod(document).ended if same else None

    async def _lines(self, pod: _Pod, log: PodLog, *, follow: bool) -> AsyncIterator[LogLine]:
        query = {"container": pod.container, "timestamps": "true"}
        if follow:
            query["follow"] = "true"
        if log.last:
            query["sinceTime"] = f"{log.last[:19]}Z"
            log.reconnected()
        async for raw in self._api.lines(
            PODS, pod.name, self._namespace, "log", silence_seconds=SILENCE_SECONDS, **query
        ):
            line = log.take(raw.decode(errors="replace"))
            if line is not None and self._rank in (None, line.rank):
                yield line


def _pod(value: dict[str, Any]) -> _Pod:
    metadata = value["metadata"]
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    containers = value["spec"]["containers"]
    return _Pod(
        uid=metadata["uid"],
        name=metadata["name"],
        container=notes.get(ANNOTATION_DEFAULT_CONTAINER) or containers[0]["name"],
        attempt=_number(labels.get(LABEL_ATTEMPT)),
        node_rank=_number(labels.get(LABEL_NODE_RANK)),
        ended=(value.get("status") or {}).get("phase") in ("Succeeded", "Failed"),
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0
