"""Quarantine: isolates faulty jobs from the engine, so that all other jobs are scheduled.

A job whose status the API server rejects (a validation rule, an admission webhook, a persistent
error), or at which the engine fails, is quarantined: its pods keep running, and it is retried with
a growing back-off. Until then, no other job gets a node named by its stored status or by the one
that could not be stored, and quotas count these nodes: whether that write was performed is not
always known.

All code that handles the contents of one job runs under `guard` (or `shield`, for a task), which
attributes every error to that job.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from flyer.api import Phase
from flyer.engine.state.jobs import RESERVING
from flyer.kube.apiserver.election import LeadershipLostError
from flyer.kube.apiserver.errors import ApiError
from flyer.kube.cache.cluster_cache import TermOverError
from flyer.kube.services.errors import StaleStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from flyer.api import FlyerJobStatus

__all__ = ["PAUSE_SECONDS", "Quarantine"]

PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 300.0
# A retry costs a rebuild, and each job that fails again costs a step. So each rebuild retries a few
# jobs, and the next retries wait for REST_FACTOR times the seconds that the last ones took.
RETRIES_PER_REBUILD_MAX: Final = 8
REST_FACTOR: Final = 20.0
REST_SECONDS_MAX: Final = 60.0
_WHY_CHARS_MAX: Final = 1000

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Case:
    failures: int = 0
    quarantined: bool = False
    retry_at: float = 0.0  # by the monotonic clock
    status: FlyerJobStatus | None = None  # the status that could not be stored


def _nothing() -> None:
    pass


class Quarantine:
    """The quarantine of one term. `on_quarantined(job, kind, why)` reports a job's first fault.

    `changed` is called for every job that has to be removed from the engine.
    """

    def __init__(
        self,
        on_quarantined: Callable[[str, str, str], None],
        changed: Callable[[], None] = _nothing,
    ) -> None:
        self._on_quarantined = on_quarantined
        self._changed = changed
        self._cases: dict[str, _Case] = {}
        self._removed = False
        self._rest_until = 0.0  # by the monotonic clock

    def __contains__(self, job: object) -> bool:
        """Whether the job is quarantined now."""
        case = self._cases.get(job) if isinstance(job, str) else None
        return case is not None and case.quarantined

    def __iter__(self) -> Iterator[str]:
        """The jobs that are quarantined now."""
        return (job for job, case in self._cases.items() if case.quarantined)

    def __len__(self) -> int:
        """The number of quarantined jobs."""
        return sum(1 for _ in self)

    @contextlib.contextmanager
    def guard(self, job: str, doing: str) -> Iterator[None]:
        """Quarantine the job on an error of the code inside, and suppress the error.

        Errors of the API server or of the term are raised.
        """
        try:
            yield
        except (ApiError, LeadershipLostError, StaleStateError, TermOverError):
            raise
        except Exception as error:
            log.exception("%s, %s: a bug, please report it", job, doing)
            self._quarantine(job, doing, error)

    async def shield(self, job: str, doing: str, work: Coroutine[Any, Any, None]) -> None:
        """As `guard`, for a task. API errors quarantine the job too: no caller retries them."""
        try:
            with self.guard(job, doing):
                await work
        except ApiError as error:
            self._quarantine(job, doing, error)

    def _quarantine(self, job: str, doing: str, error: Exception) -> None:
        why = f"{doing}: {type(error).__name__}: {error}"[:_WHY_CHARS_MAX]
        self.add(job, why)

    def is_suspect(self, job: str) -> bool:
        """Whether the job was quarantined and none of its statuses has been stored since."""
        return job in self._cases

    def add(self, job: str, why: str, status: FlyerJobStatus | None = None) -> None:
        """Quarantine the job from the next step on."""
        case = self._cases.setdefault(job, _Case())
        pause_seconds = min(PAUSE_SECONDS * 2.0**case.failures, PAUSE_SECONDS_MAX)
        case.failures += 1
        case.quarantined, case.status = True, status
        case.retry_at = time.monotonic() + pause_seconds
        log.error("quarantined %s for %g s: %s", job, pause_seconds, why)
        if case.failures == 1:
            self._on_quarantined(job, "job" if status is None else "status", why)
        self._changed()

    def retry_now(self, job: str) -> None:
        """Retry the job now, because its owner changed it."""
        if (case := self._cases.get(job)) is not None:
            case.retry_at = 0.0

    def resolve(self, job: str) -> None:
        """The job's status was stored, or the engine has forgotten it, after a retry."""
        if job not in self:
            self._cases.pop(job, None)

    def remove(self, job: str) -> None:
        """The object was deleted: an immediate rebuild frees the nodes withheld for it."""
        case = self._cases.pop(job, None)
        self._removed = self._removed or (case is not None and case.quarantined)

    def record_rebuild(self, seconds: float) -> None:
        """A rebuild took this long: the next retries wait for a multiple of it."""
        now = time.monotonic()
        rest_until = max(self._rest_until, now) + REST_FACTOR * seconds
        self._rest_until = min(rest_until, now + REST_SECONDS_MAX)

    def wait_seconds(self) -> float:
        """Time until the next rebuild is due, for a retry or a deleted job."""
        times = [case.retry_at for case in self._cases.values() if case.quarantined]
        if self._removed:
            times.append(0.0)
        if not times:
            return float("inf")
        return max(0.0, max(min(times), self._rest_until) - time.monotonic())

    def release_due(self) -> None:
        """Release some of the due jobs for a retry by this rebuild, the longest due first.

        A rebuild for another reason releases none early.
        """
        now = time.monotonic()
        self._removed = False
        if now < self._rest_until:
            return
        cases = [case for case in self._cases.values() if case.quarantined and case.retry_at <= now]
        for case in sorted(cases, key=lambda case: case.retry_at)[:RETRIES_PER_REBUILD_MAX]:
            case.quarantined = False

    def possible_statuses(
        self, stored: Callable[[str], FlyerJobStatus | None]
    ) -> list[tuple[str, FlyerJobStatus]]:
        """For each quarantined job, all statuses that may be the stored one."""
        return [
            (job, status)
            for job, case in self._cases.items()
            if case.quarantined
            for status in (stored(job), case.status)
            if status is not None
        ]

    def withheld_nodes(self, stored: Callable[[str], FlyerJobStatus | None]) -> dict[str, str]:
        """Nodes that quarantined jobs may occupy, with the job."""
        return {
            name: job
            for job, status in self.possible_statuses(stored)
            for name in _occupied_nodes(status)
        }


def _occupied_nodes(status: FlyerJobStatus) -> set[str]:
    names = {node.name for node in status.occupied}
    if status.assignment is not None and status.phase in (*RESERVING, Phase.SUSPENDING):
        names |= set(status.assignment.names)
    return names
