"""Commits of decisions: one compare-and-swap on a FlyerJob's status each.

Only the leader writes statuses. So a conflict has one of four causes, which a read of the object
distinguishes: the response to the leader's own write was lost; another part of the object changed;
the object is gone; or another process believes that it leads, which requires a rebuild.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import WeakValueDictionary

from flyer.api import Phase
from flyer.api.names import API_VERSION, KIND_JOB
from flyer.engine.state.jobs import RESERVING
from flyer.kube.apiserver import Limiter
from flyer.kube.apiserver.election import LeadershipLostError
from flyer.kube.apiserver.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    OverloadedError,
    UnreachableError,
)
from flyer.kube.apiserver.resources import FLYERJOBS
from flyer.kube.cache.job_view import JobView, shape_job
from flyer.kube.services.errors import QuarantinedError, StaleStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from flyer.api import Condition, FlyerJobStatus
    from flyer.engine import Commit
    from flyer.kube.apiserver import Api, Cache
    from flyer.kube.apiserver.errors import ApiError
    from flyer.kube.services.jobs.quarantine import Quarantine

__all__ = ["BACKGROUND_WRITES_MAX", "QUARANTINED", "Commits", "waves"]

QUARANTINED: Final = "Quarantined"  # a condition of jobs that the operator cannot handle now

_PLAIN: Final = re.compile(r"[ !#-%\'-;=?-\[\]-~]*").fullmatch
# A client that edits a job continuously cannot delay its commit for long.
_TRIES_MAX: Final = 20
_MARK_TRIES_MAX: Final = 5
# Concurrent calls. More calls do not raise a busy server's throughput, only the latency; and a
# write that outlasts the leader's fence is cancelled and repeated.
CONCURRENCY_MAX: Final = 8
SUSPECT_CALL_SECONDS: Final = 1.0
# Concurrent writes of statuses without a decision; one while a decision is stored.
BACKGROUND_WRITES_MAX: Final = 2
OBSERVED_SECONDS_MAX: Final = 2.0
# Commits prepared in one batch, so that preparation does not block the loop.
BATCH_MAX: Final = 128


class Commits:
    """Writes statuses. The job cache holds each written status immediately."""

    def __init__(
        self,
        api: Api,
        jobs: Cache[JobView],
        uid_of: Callable[[str], str | None],
        committed: Callable[[str, FlyerJobStatus | None, FlyerJobStatus], None],
        pod_limiter: Limiter,
        quarantine: Quarantine,
    ) -> None:
        # Objects returned by the commits of starting jobs; their pods are built from them.
        self.answers: dict[str, dict[str, Any]] = {}
        # Statuses in the engine's state: read at the rebuild, or stored since.
        self._known: dict[str, FlyerJobStatus | None] = {}
        self._under_way: set[str] = set()
        self._api = api.with_limiter(asyncio.Semaphore(CONCURRENCY_MAX))
        # For jobs whose status was rejected before: short timeouts, because other commits wait.
        self._suspect_api = api.with_limiter(asyncio.Semaphore(CONCURRENCY_MAX))
        self._suspect_api.limits = replace(api.limits, call_seconds=SUSPECT_CALL_SECONDS)
        # Entered around `explain`.
        self.background = Limiter(BACKGROUND_WRITES_MAX, 1)
        self._background_api = api.with_limiter(asyncio.Semaphore(BACKGROUND_WRITES_MAX))
        # Writes of one job's status are serialized in the order of the calls.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._stored = 0  # number of stored statuses
        self._quarantine = quarantine
        self._jobs = jobs
        self._uid_of = uid_of
        self._committed = committed
        self._pod_limiter = pod_limiter  # reduced while decisions are stored

    def reset(self, jobs: Iterable[JobView]) -> None:
        """The engine was rebuilt from these jobs."""
        self._known = {view.key: view.job.status for view in jobs if view.job is not None}

    def quarantined(self, key: str) -> None:
        """The job is quarantined: the engine has no status of it."""
        self._known.pop(key, None)

    def forget(self, key: str) -> None:
        """The engine has forgotten a job."""
        self._known.pop(key, None)
        self._quarantine.resolve(key)

    def is_foreign(self, view: JobView) -> bool:
        """Whether another writer wrote this status, such as a late call of an earlier leader.

        Overwriting it would be safe for this job, but the nodes that it names have to be observed.
        """
        if view.job is None or view.key in self._under_way or view.uid != self._uid_of(view.key):
            return False
        status = self._known.setdefault(view.key, view.job.status)
        return status != view.job.status and _object(status) != _object(view.job.status)

    async def store(self, commits: Sequence[Commit], deleted_jobs: set[str]) -> None:
        """Store decisions in an order that never assigns a node before its release is stored.

        Jobs that no longer exist are added to `deleted_jobs`, and their commits skipped.
        """
        for wave in waves(commits, self.stored):
            pending = [commit for commit in wave if commit.job not in deleted_jobs]
            for first in range(0, len(pending), BATCH_MAX):
                with self._pod_limiter.reduced(), self.background.reduced():
                    deleted_jobs |= await self._store_all(pending[first : first + BATCH_MAX])

    async def _store_all(self, commits: Sequence[Commit]) -> set[str]:
        """Store commits concurrently. Returns deleted jobs; raises once all have ended."""
        before = self._stored
        results = await asyncio.gather(
            *(self._decide(commit) for commit in commits), return_exceptions=True
        )
        failures = [result for result in results if isinstance(result, BaseException)]
        if self._stored > before:
            # The server accepts other jobs' statuses: the fault is these jobs' own. A commit that
            # needed no write proves nothing.
            for commit, result in zip(commits, results, strict=True):
                if isinstance(result, (OverloadedError, UnreachableError)):
                    self._quarantine_job(commit, result)
                    failures[failures.index(result)] = QuarantinedError(str(result))
        for failure in sorted(failures, key=_rank):
            raise failure
        return {commit.job for commit, stored in zip(commits, results, strict=True) if not stored}

    async def explain(self, commit: Commit) -> bool:
        """Store a status without a decision; False: the job does not exist.

        QuarantinedError: the API server rejects this status and accepts others.
        """
        before = self._stored
        try:
            with self._quarantine.guard(commit.job, "storing its pending reason"):
                async with self._lock_of(commit.job):
                    if commit.job in self._quarantine:
                        return True  # the quarantine owns its status
                    return await self._store(commit, self._background_api)
        except (OverloadedError, UnreachableError) as error:
            if self._stored == before:
                raise
            self._quarantine_job(commit, error)
            raise QuarantinedError(str(error)) from error
        raise QuarantinedError(f"{commit.job}: internal error")

    async def wait_observed(self, job: str) -> None:
        """Wait, for a bounded time, until the watch has reported the job's latest status.

        Every watch receives every write, in order: where that is slow, users' changes arrive late,
        and each further write delays them more.
        """
        view = self._view(job)
        if view is not None:
            await self._jobs.reach(int(view.version), OBSERVED_SECONDS_MAX)

    def _lock_of(self, job: str) -> asyncio.Lock:
        return self._locks.setdefault(job, asyncio.Lock())

    async def _decide(self, commit: Commit) -> bool:
        async with self._lock_of(commit.job):
            return await self._store(commit, self._api)

    def stored(self, job: str) -> FlyerJobStatus | None:
        """The job's status in the cache."""
        view = self._view(job)
        return view.job.status if view and view.job else None

    def _view(self, job: str) -> JobView | None:
        namespace, _, name = job.partition("/")
        return self._jobs.get(namespace, name)

    async def _store(self, commit: Commit, api: Api) -> bool:
        """Store the status, under the job's lock; False: the job does not exist."""
        view = self._view(commit.job)
        if view is not None and self.is_foreign(view):
            raise StaleStateError(f"{commit.job}: another writer changed its status")
        self._under_way.add(commit.job)
        try:
            stored = await self._swap(commit, api)
        finally:
            self._under_way.discard(commit.job)
        if stored:
            self._known[commit.job] = commit.status
        return stored

    async def _swap(self, commit: Commit, api: Api) -> bool:
        namespace, _, name = commit.job.partition("/")
        view = self._view(commit.job)
        uid = commit.uid
        if view is None or view.job is None or view.uid != uid:
            return False  # deleted; another object may have its name
        before = view.job.status
        status = _object(commit.status)
        if status == _object(before):
            return True
        api = self._suspect_api if self._quarantine.is_suspect(commit.job) else api
        found_status: Any = None
        for attempt in range(_TRIES_MAX):
            try:
                answer = await self._write(
                    api, view, found_status, status, patches=attempt % 2 == 1
                )
            except NotFoundError:
                return False
            except (InvalidError, ForbiddenError) as error:
                self._refuse(commit, error)
            except ConflictError:
                value = await self._read(name, namespace)
                if value is None or (view := shape_job(value)).uid != uid or view.job is None:
                    return False
                found_status = value.get("status")
                found = _object(view.job.status)
                if found == _object(before):
                    continue
                if found != status:
                    version = f"version {view.version}"
                    why = f"{commit.job}: another writer changed its status ({version})"
                    raise StaleStateError(why) from None
            else:
                view = shape_job(answer)
                if commit.status.phase is Phase.STARTING and view.uid == uid:
                    self.answers[commit.job] = answer
            self._jobs.put((namespace, name), int(view.version), view)
            self._quarantine.resolve(commit.job)
            self._stored += 1
            self._committed(commit.job, before, commit.status)
            return True
        why = f"{commit.job}: changed {_TRIES_MAX} times while it was committed"
        self._quarantine.add(commit.job, why, commit.status)
        raise QuarantinedError(why)

    @staticmethod
    async def _write(
        api: Api, view: JobView, found_status: Any, status: dict[str, Any], *, patches: bool
    ) -> dict[str, Any]:
        """Store a status in place of that of this version; a patch names it. Returns the object.

        A replacement costs the API server less than a patch, which it encodes, merges and decodes;
        but a patch does not conflict with changes of other parts of the object.
        """
        if not patches:
            value = _replacement(view.key, view.version, status)
            return await api.replace(FLYERJOBS, value, "status")
        namespace, _, name = view.key.partition("/")
        patch = _patch(view.uid, found_status, status)
        try:
            return await api.patch(FLYERJOBS, name, patch, namespace, "status")
        except InvalidError as error:
            # Another uid or status; a status that the server rejects is rejected as replacement.
            raise ConflictError(error.call, str(error)) from error

    async def write(self, view: JobView, status: FlyerJobStatus) -> bool:
        """Store the status of a job that the engine does not have. Returns whether it changed."""
        if view.job is None or view.job.status == status:
            return False
        value = _replacement(view.key, view.version, _object(status))
        try:
            self._jobs.offer(await self._api.replace(FLYERJOBS, value, "status"))
        except (ConflictError, NotFoundError):
            return False  # the next version is checked again
        return True

    async def mark(self, job: str, uid: str, epoch: int, condition: Condition | None) -> None:
        """Set the condition Quarantined of a job that the engine does not have; None: remove it.

        Edits the stored JSON, which may be unreadable to the models.
        """
        async with self._lock_of(job):
            await self._mark(job, uid, epoch, condition)

    async def _mark(self, job: str, uid: str, epoch: int, condition: Condition | None) -> None:
        namespace, _, name = job.partition("/")
        for _ in range(_MARK_TRIES_MAX):
            value = await self._api.get(FLYERJOBS, name, namespace)
            status = value.get("status") or {}
            before = status.get("conditions") or []
            after = [entry for entry in before if entry.get("type") != QUARANTINED]
            after += [condition.to_object()] if condition is not None else []
            if value["metadata"]["uid"] != uid or after == before:
                return
            version = value["metadata"]["resourceVersion"]
            marked = {**status, "conditions": after, "epoch": epoch}
            self._under_way.add(job)
            try:
                replacement = _replacement(job, version, marked)
                answer = await self._api.replace(FLYERJOBS, replacement, "status")
                self._jobs.offer(answer)
                view = self._view(job)
                if view is not None and view.job is not None and job in self._known:
                    self._known[job] = view.job.status
            except ConflictError:
                continue
            finally:
                self._under_way.discard(job)
            return

    async def _read(self, name: str, namespace: str) -> dict[str, Any] | None:
        try:
            value = await self._api.get(FLYERJOBS, name, namespace)
        except NotFoundError:
            return None
        self._jobs.offer(value)  # other changes reach the scheduler
        return value

    def _refuse(self, commit: Commit, error: ApiError) -> NoReturn:
        """Quarantine a job whose status the API server rejects."""
        if "a newer leader exists" in str(error):
            raise LeadershipLostError(f"a newer leader exists: {error}") from error
        self._quarantine_job(commit, error)
        raise QuarantinedError(str(error)) from error

    def _quarantine_job(self, commit: Commit, error: ApiError) -> None:
        self._quarantine.add(commit.job, f"its status is rejected: {error}", commit.status)


def _rank(failure: BaseException) -> int:
    """Errors that end the term precede errors of one job."""
    if isinstance(failure, LeadershipLostError):
        return 0
    return 2 if isinstance(failure, QuarantinedError) else 1


def waves(
    commits: Sequence[Commit], status: Callable[[str], FlyerJobStatus | None]
) -> Iterable[list[Commit]]:
    """Groups of commits that may be stored concurrently, one group after another."""
    wave: list[Commit] = []
    jobs: set[str] = set()
    released: set[str] = set()
    statuses: dict[str, FlyerJobStatus | None] = {}
    for commit in commits:
        before = statuses[commit.job] if commit.job in statuses else status(commit.job)
        before_nodes, after_nodes = _reserved_nodes(before), _reserved_nodes(commit.status)
        if commit.job in jobs or (after_nodes - before_nodes) & released:
            yield wave
            wave, jobs, released = [], set(), set()
        wave.append(commit)
        jobs.add(commit.job)
        released |= before_nodes - after_nodes
        statuses[commit.job] = commit.status
    if wave:
        yield wave


def _object(status: FlyerJobStatus | None) -> dict[str, Any]:
    return status.to_object() if status is not None else {}


def _replacement(job: str, version: str, status: dict[str, Any]) -> dict[str, Any]:
    """The object of a replacement of the status, if the job is still of this version."""
    namespace, _, name = job.partition("/")
    metadata = {"name": name, "namespace": namespace, "resourceVersion": version}
    return {"apiVersion": API_VERSION, "kind": KIND_JOB, "metadata": metadata, "status": status}


def _patch(uid: str, before: Any, status: dict[str, Any]) -> list[dict[str, Any]]:
    """A JSON patch of the status, if the object still has this uid and status (None: no status)."""
    return [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        *_tests("/status", before),
        {"op": "add", "path": "/status", "value": status},
    ]


def _tests(path: str, value: Any) -> Iterator[dict[str, Any]]:
    """Operations that test a value, except for texts and numbers that servers write differently.

    The API server compares the bytes of their JSON: of texts that only contain ASCII without the
    characters that Go escapes, and of whole numbers, every encoder writes the same.
    """
    if _is_written_equally(value):
        yield {"op": "test", "path": path, "value": value}
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tests(f"{path}/{key.replace('~', '~0').replace('/', '~1')}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _tests(f"{path}/{index}", item)


def _is_written_equally(value: Any) -> bool:
    if isinstance(value, str):
        return _PLAIN(value) is not None
    if isinstance(value, dict):
        return all(map(_is_written_equally, [*value, *value.values()]))
    if isinstance(value, list):
        return all(map(_is_written_equally, value))
    return not isinstance(value, float)


def _reserved_nodes(status: FlyerJobStatus | None) -> frozenset[str]:
    if status is None or status.assignment is None or status.phase not in RESERVING:
        return frozenset()
    return frozenset(status.assignment.names)
