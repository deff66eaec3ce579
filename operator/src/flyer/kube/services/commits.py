"""The commit of a decision: one compare-and-swap on a FlyerJob's status.

Nobody but the leader writes statuses. So a conflict means one of four things, told apart by reading
the object: our own write whose answer was lost; another part of the object changed; the object is
gone; or somebody else believes to lead, and then everything is read again.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from flyer.api import Chain, Condition, FlyerJobStatus, Pending, Phase, quantize
from flyer.api.names import API_VERSION, KIND_JOB
from flyer.api.waiting import TEMPLATE_REFUSED
from flyer.engine.draft import RESERVING
from flyer.kube.client import Lane
from flyer.kube.client.election import LeadershipLostError
from flyer.kube.client.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    OverloadedError,
    UnreachableError,
)
from flyer.kube.client.resources import FLYERJOBS
from flyer.kube.services.errors import LeftAloneError, StaleStateError
from flyer.kube.services.views import JobView, shape_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from flyer.api import FlyerJob
    from flyer.engine import Commit
    from flyer.kube.client import Api, Cache
    from flyer.kube.client.errors import ApiError
    from flyer.kube.services.apart import LeftAlone

__all__ = ["QUARANTINED", "UNHURRIED", "Commits", "refused_status", "waves"]

QUARANTINED: Final = "Quarantined"  # a condition of jobs that the operator cannot handle now

# Somebody who edits a job all the time cannot keep us from committing for long.
_TRIES_MAX: Final = 20
_MARK_TRIES_MAX: Final = 5
# Calls under way together. A server that is busy answers no faster for being asked more, only
# later; and a write that outlasts the leader's fence is cut off, and done again.
AT_ONCE: Final = 8
BRIEF_SECONDS: Final = 1.0
# Statuses that no decision waits for: so many at once, and one while a decision is stored.
UNHURRIED: Final = 2
HEARD_SECONDS_MAX: Final = 2.0
# Commits prepared together: few enough that it does not hold up the loop.
PREPARED: Final = 128


class Commits:
    """Writes statuses; the cache of jobs holds what was written."""

    def __init__(
        self,
        api: Api,
        jobs: Cache[JobView],
        uid_of: Callable[[str], str | None],
        told: Callable[[str, FlyerJobStatus | None, FlyerJobStatus], None],
        beside: Lane,
        left: LeftAlone,
    ) -> None:
        # Of jobs that start now: the answer to the commit is the object, and pods are made of it.
        self.answers: dict[str, dict[str, Any]] = {}
        # As the engine knows them: what it read, or what we have stored since.
        self._known: dict[str, FlyerJobStatus | None] = {}
        self._under_way: set[str] = set()
        self._api = api.apart(asyncio.Semaphore(AT_ONCE))
        # For jobs whose status was not taken before: all others wait for them.
        self._briefly = api.apart(asyncio.Semaphore(AT_ONCE))
        self._briefly.limits = replace(api.limits, call_seconds=BRIEF_SECONDS)
        # Entered around `explain`.
        self.unhurried = Lane(UNHURRIED, 1)
        self._unhurriedly = api.apart(asyncio.Semaphore(UNHURRIED))
        # Writes of one job's status come one after the other, in the order of the calls.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._stored = 0  # how often the server took a status
        self._left = left
        self._jobs = jobs
        self._uid_of = uid_of
        self._told = told
        self._beside = beside  # calls that leave the server to us meanwhile

    def begin(self, jobs: Iterable[JobView]) -> None:
        """The engine was rebuilt from these."""
        self._known = {one.key: one.job.status for one in jobs if one.job is not None}

    def left(self, key: str) -> None:
        """The job is left alone: the engine knows no status of it."""
        self._known.pop(key, None)

    def forgotten(self, key: str) -> None:
        """The engine has forgotten a job."""
        self._known.pop(key, None)
        self._left.settled(key)

    def is_foreign(self, view: JobView) -> bool:
        """Whether somebody else has written this status: a leader before us whose call was late.

        Overwriting it would be safe for the job alone: what it says about nodes has to be seen.
        """
        if view.job is None or view.key in self._under_way or view.uid != self._uid_of(view.key):
            return False
        known = self._known.setdefault(view.key, view.job.status)
        return known != view.job.status and _object(known) != _object(view.job.status)

    async def store(self, commits: Sequence[Commit], gone: set[str]) -> None:
        """Store decisions, in an order that never gives a node out before it was given back.

        Jobs that turn out to be gone are added to `gone`, and their commits left out.
        """
        for wave in waves(commits, self.stored):
            wanted = [one for one in wave if one.job not in gone]
            for first in range(0, len(wanted), PREPARED):
                with self._beside.narrowed(), self.unhurried.narrowed():
                    gone |= await self._store_all(wanted[first : first + PREPARED])

    async def _store_all(self, commits: Sequence[Commit]) -> set[str]:
        """Store them at once; the jobs that are gone. Raises when all have ended."""
        results = await asyncio.gather(
            *(self._decide(one) for one in commits), return_exceptions=True
        )
        failures = [one for one in results if isinstance(one, BaseException)]
        if len(failures) < len(results):
            # The server works, for others: this is the jobs' own trouble.
            for commit, result in zip(commits, results, strict=True):
                if isinstance(result, (OverloadedError, UnreachableError)):
                    self._leave(commit, result)
                    failures[failures.index(result)] = LeftAloneError(str(result))
        for failure in sorted(failures, key=_rank):
            raise failure
        return {one.job for one, done in zip(commits, results, strict=True) if not done}

    async def explain(self, commit: Commit) -> bool:
        """Store a status that no decision waits for; False: the job is gone.

        LeftAloneError: it is not taken, and others are.
        """
        before = self._stored
        try:
            with self._left.guard(commit.job, "storing why it waits"):
                async with self._turn(commit.job):
                    if commit.job in self._left:
                        return True  # its status is that of the quarantine
                    return await self._store(commit, self._unhurriedly)
        except (OverloadedError, UnreachableError) as error:
            if self._stored == before:
                raise
            self._leave(commit, error)
            raise LeftAloneError(str(error)) from error
        raise LeftAloneError(f"{commit.job}: a bug")

    async def heard(self, job: str) -> None:
        """Wait until the watch has told what was stored of a job, though not for ever.

        Each write is told to every watch, in order: where that takes long, what users have changed
        is told late, and later with each further write.
        """
        view = self._view(job)
        if view is not None:
            await self._jobs.reach(int(view.version), HEARD_SECONDS_MAX)

    def _turn(self, job: str) -> asyncio.Lock:
        return self._turns.setdefault(job, asyncio.Lock())

    async def _decide(self, commit: Commit) -> bool:
        async with self._turn(commit.job):
            return await self._store(commit, self._api)

    def stored(self, job: str) -> FlyerJobStatus | None:
        """The status, as far as the cache knows."""
        view = self._view(job)
        return view.job.status if view and view.job else None

    def _view(self, job: str) -> JobView | None:
        namespace, _, name = job.partition("/")
        return self._jobs.get(namespace, name)

    async def _store(self, commit: Commit, api: Api) -> bool:
        """Whether it is stored; False: the job is gone. In the job's turn."""
        view = self._view(commit.job)
        if view is not None and self.is_foreign(view):
            raise StaleStateError(f"{commit.job}: somebody else wrote its status")
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
        uid = self._uid_of(commit.job)
        if view is None or view.job is None or view.uid != uid:
            return False  # gone; another one may have its name
        before = view.job.status
        status = _object(commit.status)
        if status == _object(before):
            return True
        api = self._briefly if self._left.suspect(commit.job) else api
        for _ in range(_TRIES_MAX):
            # Whole, not as a patch: an API server would encode what it has, merge and decode anew.
            value = {
                "apiVersion": API_VERSION,
                "kind": KIND_JOB,
                "metadata": {
                    "name": name,
                    "namespace": namespace,
                    "resourceVersion": view.version,
                },
                "status": status,
            }
            try:
                answer = await api.replace(FLYERJOBS, value, "status")
            except NotFoundError:
                return False
            except (InvalidError, ForbiddenError) as error:
                self._refuse(commit, error)
            except ConflictError:
                found = await self._read(name, namespace)
                if found is None or found.uid != uid or found.job is None:
                    return False
                stored = found.job.status
                if _object(stored) == status:
                    answer = None
                elif _object(stored) == _object(before):
                    view = found
                    continue
                else:
                    why = f"{commit.job}: somebody else wrote its status (version {found.version})"
                    raise StaleStateError(why) from None
                view = found
            if answer is not None:
                view = shape_job(answer)
                if commit.status.phase is Phase.STARTING and view.uid == uid:
                    self.answers[commit.job] = answer
            self._jobs.put((namespace, name), int(view.version), view)
            self._left.settled(commit.job)
            self._stored += 1
            self._told(commit.job, before, commit.status)
            return True
        why = f"{commit.job}: changed {_TRIES_MAX} times while it was committed"
        self._left.leave(commit.job, why, commit.status)
        raise LeftAloneError(why)

    async def write(self, view: JobView, status: FlyerJobStatus) -> bool:
        """Store the status of a job that the engine does not know; whether it is news."""
        if view.job is None or view.job.status == status:
            return False
        value = {
            "apiVersion": API_VERSION,
            "kind": KIND_JOB,
            "metadata": {
                "name": view.job.metadata.name,
                "namespace": view.job.metadata.namespace,
                "resourceVersion": view.version,
            },
            "status": _object(status),
        }
        try:
            self._jobs.offer(await self._api.replace(FLYERJOBS, value, "status"))
        except (ConflictError, NotFoundError):
            return False  # its next version is checked anew
        return True

    async def mark(self, job: str, uid: str, epoch: int, condition: Condition | None) -> None:
        """Set the condition Quarantined of a job that the engine does not know; None: remove it.

        On the JSON as it is stored, which may be what cannot be read.
        """
        async with self._turn(job):
            await self._mark(job, uid, epoch, condition)

    async def _mark(self, job: str, uid: str, epoch: int, condition: Condition | None) -> None:
        namespace, _, name = job.partition("/")
        for _ in range(_MARK_TRIES_MAX):
            value = await self._api.get(FLYERJOBS, name, namespace)
            status = value.get("status") or {}
            before = status.get("conditions") or []
            after = [one for one in before if one.get("type") != QUARANTINED]
            after += [condition.to_object()] if condition is not None else []
            if value["metadata"]["uid"] != uid or after == before:
                return
            value = {
                "apiVersion": API_VERSION,
                "kind": KIND_JOB,
                "metadata": {
                    one: value["metadata"][one] for one in ("name", "namespace", "resourceVersion")
                },
                "status": {**status, "conditions": after, "epoch": epoch},
            }
            self._under_way.add(job)
            try:
                answer = await self._api.replace(FLYERJOBS, value, "status")
                self._jobs.offer(answer)
                view = self._view(job)
                if view is not None and view.job is not None and job in self._known:
                    self._known[job] = view.job.status
            except ConflictError:
                continue
            finally:
                self._under_way.discard(job)
            return

    async def _read(self, name: str, namespace: str) -> JobView | None:
        try:
            value = await self._api.get(FLYERJOBS, name, namespace)
        except NotFoundError:
            return None
        self._jobs.offer(value)  # what else changed is news to the scheduler
        return shape_job(value)

    def _refuse(self, commit: Commit, error: ApiError) -> None:
        """It is the job's own trouble, until it is tried again: others have theirs stored."""
        if "a newer leader exists" in str(error):
            raise LeadershipLostError(f"a newer leader exists: {error}") from error
        self._leave(commit, error)
        raise LeftAloneError(str(error)) from error

    def _leave(self, commit: Commit, error: ApiError) -> None:
        self._left.leave(commit.job, f"its status is not taken: {error}", commit.status)


def _rank(failure: BaseException) -> int:
    """What ends the term comes first, and a job's own trouble last."""
    if isinstance(failure, LeadershipLostError):
        return 0
    return 2 if isinstance(failure, LeftAloneError) else 1


def refused_status(job: FlyerJob, why: str, epoch: int, now: float) -> FlyerJobStatus:
    """The status of a job of whose template no pods can be made. It says nothing new twice."""
    before = job.status or FlyerJobStatus(
        chain=Chain(
            id=job.metadata.uid or job.key,
            submitted_at=job.metadata.creation_timestamp or quantize(now),
            queued_at=quantize(now),
        )
    )
    known = before.condition("QuotaReserved")
    same = known is not None and (known.reason, known.message) == (TEMPLATE_REFUSED, why)
    condition = Condition(
        type="QuotaReserved", status="False", reason=TEMPLATE_REFUSED, message=why,
        last_transition_time=known.last_transition_time if known and same else quantize(now),
        observed_generation=job.metadata.generation,
    )  # fmt: skip
    others = tuple(one for one in before.conditions if one.type != condition.type)
    return before.replace(
        epoch=epoch if not same else before.epoch,
        reason=TEMPLATE_REFUSED,
        message=why,
        pending=Pending(verdict="Never", reason=TEMPLATE_REFUSED, message=why),
        conditions=(*others, condition),
        observed_generation=job.metadata.generation,
    )


def waves(
    commits: Sequence[Commit], status: Callable[[str], FlyerJobStatus | None]
) -> Iterable[list[Commit]]:
    """Groups that may be stored at once, one group after the other."""
    wave: list[Commit] = []
    jobs: set[str] = set()
    released: set[str] = set()
    known: dict[str, FlyerJobStatus | None] = {}
    for commit in commits:
        before = known[commit.job] if commit.job in known else status(commit.job)
        held, holds = _kept(before), _kept(commit.status)
        if commit.job in jobs or (holds - held) & released:
            yield wave
            wave, jobs, released = [], set(), set()
        wave.append(commit)
        jobs.add(commit.job)
        released |= held - holds
        known[commit.job] = commit.status
    if wave:
        yield wave


def _object(status: FlyerJobStatus | None) -> dict[str, Any]:
    return status.to_object() if status is not None else {}


def _kept(status: FlyerJobStatus | None) -> frozenset[str]:
    if status is None or status.assignment is None or status.phase not in RESERVING:
        return frozenset()
    return frozenset(status.assignment.names)
