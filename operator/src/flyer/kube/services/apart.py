"""Jobs that the engine does not know for now, so that the others' scheduling goes on.

A job whose status the API server does not take (a rule, somebody's admission, an error that lasts),
or at which the engine fails, is left as it is: what runs of it runs on. It is tried again after a
pause that grows. Until then nobody else gets a node that its status, or the one that could not be
stored, speaks of, and quotas count them: whether that write was performed is not always known.

This is the one quarantine of the operator: code that handles what one job contains runs under
`guard` (or `shield`, for a task), and any error of it is that job's.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from flyer.api import Phase
from flyer.engine.draft import RESERVING
from flyer.kube.client.election import LeadershipLostError
from flyer.kube.client.errors import ApiError
from flyer.kube.services.errors import StaleStateError, TermOverError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from flyer.api import FlyerJobStatus

__all__ = ["PAUSE_SECONDS", "LeftAlone"]

PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 300.0
# To try jobs again everything is read again, and each that fails again costs a step. So some are
# tried at a time, and the next ones after so many times the seconds that this took.
TRIED_MAX: Final = 8
REST_FACTOR: Final = 20.0
REST_SECONDS_MAX: Final = 60.0
_WHY_CHARS_MAX: Final = 1000

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Case:
    times: int = 0
    out: bool = False
    again_at: float = 0.0  # by the monotonic clock
    status: FlyerJobStatus | None = None  # that could not be stored


def _nothing() -> None:
    pass


class LeftAlone:
    """Of one term. `told(job, kind, why)` hears of each job that begins to be.

    `changed` is called for every job that is to be taken out of the engine.
    """

    def __init__(
        self,
        told: Callable[[str, str, str], None],
        changed: Callable[[], None] = _nothing,
    ) -> None:
        self._told = told
        self._changed = changed
        self._cases: dict[str, _Case] = {}
        self._gone = False
        self._rests_until = 0.0  # by the monotonic clock

    def __contains__(self, job: object) -> bool:
        """Whether it is left alone now."""
        case = self._cases.get(job) if isinstance(job, str) else None
        return case is not None and case.out

    def __iter__(self) -> Iterator[str]:
        """Those that are left alone now."""
        return (job for job, case in self._cases.items() if case.out)

    def __len__(self) -> int:
        """How many are."""
        return sum(1 for _ in self)

    @contextlib.contextmanager
    def guard(self, job: str, doing: str) -> Iterator[None]:
        """An error of the code inside quarantines the job, and the code after it runs.

        What says something of the API server or of the term, not of the job, passes.
        """
        try:
            yield
        except (ApiError, LeadershipLostError, StaleStateError, TermOverError):
            raise
        except Exception as error:
            log.exception("%s, %s: a bug, please report it", job, doing)
            self._take_out(job, doing, error)

    async def shield(self, job: str, doing: str, work: Coroutine[Any, Any, None]) -> None:
        """As `guard`, for a task, whose calls nobody else repeats: their errors count, too."""
        try:
            with self.guard(job, doing):
                await work
        except ApiError as error:
            self._take_out(job, doing, error)

    def _take_out(self, job: str, doing: str, error: Exception) -> None:
        why = f"{doing}: {type(error).__name__}: {error}"[:_WHY_CHARS_MAX]
        self.leave(job, why)

    def suspect(self, job: str) -> bool:
        """Whether it was left alone, and nothing of it has been stored since."""
        return job in self._cases

    def leave(self, job: str, why: str, status: FlyerJobStatus | None = None) -> None:
        """From the next step on."""
        case = self._cases.setdefault(job, _Case())
        pause_seconds = min(PAUSE_SECONDS * 2.0**case.times, PAUSE_SECONDS_MAX)
        case.times += 1
        case.out, case.status = True, status
        case.again_at = time.monotonic() + pause_seconds
        log.error("%s is left alone for %g s: %s", job, pause_seconds, why)
        if case.times == 1:
            self._told(job, "job" if status is None else "status", why)
        self._changed()

    def hasten(self, job: str) -> None:
        """Try it again now, for something else is asked of it."""
        if (case := self._cases.get(job)) is not None:
            case.again_at = 0.0

    def settled(self, job: str) -> None:
        """Its status was stored, or the engine has forgotten it, since it was tried again."""
        if job not in self:
            self._cases.pop(job, None)

    def gone(self, job: str) -> None:
        """The object is no more: the next rebuild, now, gives back what is kept for it."""
        case = self._cases.pop(job, None)
        self._gone = self._gone or (case is not None and case.out)

    def spent(self, seconds: float) -> None:
        """To try jobs again took so long: the next ones are tried after a multiple of it."""
        now = time.monotonic()
        rests_until = max(self._rests_until, now) + REST_FACTOR * seconds
        self._rests_until = min(rests_until, now + REST_SECONDS_MAX)

    def wait_seconds(self) -> float:
        """Until the next rebuild: some job is to be tried again, or is gone."""
        times = [case.again_at for case in self._cases.values() if case.out]
        if self._gone:
            times.append(0.0)
        if not times:
            return float("inf")
        return max(0.0, max(min(times), self._rests_until) - time.monotonic())

    def release(self) -> None:
        """The engine is rebuilt: some of those that are due are tried again, the longest due first.

        A rebuild for another reason tries none early.
        """
        now = time.monotonic()
        self._gone = False
        if now < self._rests_until:
            return
        due = [case for case in self._cases.values() if case.out and case.again_at <= now]
        for case in sorted(due, key=lambda one: one.again_at)[:TRIED_MAX]:
            case.out = False

    def statuses(
        self, stored: Callable[[str], FlyerJobStatus | None]
    ) -> list[tuple[str, FlyerJobStatus]]:
        """Of each, all that may be the one that is stored."""
        return [
            (job, status)
            for job, case in self._cases.items()
            if case.out
            for status in (stored(job), case.status)
            if status is not None
        ]

    def nodes(self, stored: Callable[[str], FlyerJobStatus | None]) -> dict[str, str]:
        """Nodes that may be theirs, with the job."""
        return {name: job for job, status in self.statuses(stored) for name in _nodes(status)}


def _nodes(status: FlyerJobStatus) -> set[str]:
    found = {one.name for one in status.occupied}
    if status.assignment is not None and status.phase in (*RESERVING, Phase.SUSPENDING):
        found |= set(status.assignment.names)
    return found
