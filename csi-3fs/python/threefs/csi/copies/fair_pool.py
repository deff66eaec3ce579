"""Threads that run the units of many copies, in turns of tenants.

A free thread takes the next unit of the tenant with the fewest units in progress, and of its copy
with the fewest; of equals the one that has waited longest. Units are short, so a tenant with a
small copy waits for units of others, never for their copies.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from threefs.csi.copies.tree_copy import Unit

__all__ = ["FairPool", "PoolJob"]


class PoolJob:
    """A copy: an iterator of units, which only one thread advances at a time."""

    def __init__(
        self,
        tenant: str,
        steps: Iterator[Unit | None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self.tenant = tenant
        self.error: Exception | None = None
        self.ended = threading.Event()
        self._steps = steps
        self._on_end = on_end
        # Guarded by the pool's condition.
        self.following: deque[Unit] = deque()
        self.running = 0
        self.last_turn = 0
        self.is_advancing = False
        self.is_waiting = False
        self.is_exhausted = False

    @property
    def is_ready(self) -> bool:
        """Whether a thread can take a unit of it."""
        if self.error is not None or self.is_exhausted:
            return False
        if self.following:
            return True
        return not self.is_advancing and not (self.is_waiting and self.running)

    @property
    def is_over(self) -> bool:
        """Whether nothing of it runs any more and nothing will."""
        over = self.error is not None or (self.is_exhausted and not self.following)
        return over and not self.running

    def advance(self) -> Unit | None:
        """Return the next unit, or None at a barrier; `StopIteration` at the end."""
        return next(self._steps)

    def close(self) -> None:
        """End the iterator and report the result."""
        self._steps.close()  # type: ignore[attr-defined]
        self._on_end(self.error)


class FairPool:
    """A fixed number of threads."""

    def __init__(self, workers: int) -> None:
        self._changed = threading.Condition()
        self._jobs: list[PoolJob] = []
        self._turn = 0
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"copy-{number}", daemon=True)
            for number in range(workers)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_seconds: float, error: Exception) -> None:
        """Cancel all jobs with an error and wait for their units in progress."""
        with self._changed:
            self._stopped = True
            jobs = list(self._jobs)
            self._changed.notify_all()
        for job in jobs:
            self.cancel(job, error)
        for job in jobs:
            job.ended.wait(timeout_seconds)

    def add(self, job: PoolJob) -> None:
        """Run a job."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def cancel(self, job: PoolJob, error: Exception) -> None:
        """Start no more units of a job; it has ended when those in progress have."""
        with self._changed:
            job.error = job.error or error
        self._settle(job)

    def _work(self) -> None:
        while (turn := self._next()) is not None:
            self._run(*turn)

    def _run(self, job: PoolJob, unit: Unit | None) -> None:
        """Run one unit, which is the next one of the job's iterator if none is given."""
        following: Unit | None = None
        error: Exception | None = None
        try:
            if unit is None:
                unit = self._advance(job)
            if unit is not None:
                following = unit()
        except Exception as caught:  # noqa: BLE001 -- every failure ends its job, not the thread
            error = caught
        with self._changed:
            job.running -= 1
            if error is not None:
                job.error = job.error or error
            if following is not None:
                job.following.append(following)
            self._changed.notify_all()
        self._settle(job)

    def _advance(self, job: PoolJob) -> Unit | None:
        try:
            unit = job.advance()
        except StopIteration:
            with self._changed:
                job.is_exhausted, job.is_advancing = True, False
            return None
        except BaseException:
            with self._changed:
                job.is_advancing = False
            raise
        with self._changed:
            job.is_advancing = False
            job.is_waiting = unit is None
            self._changed.notify_all()
        return unit

    def _next(self) -> tuple[PoolJob, Unit | None] | None:
        """Wait for a job with work, and count it as running; None once stopped.

        With a unit that follows another one; without, the job's iterator is to be advanced.
        """
        with self._changed:
            while not self._stopped:
                ready = [job for job in self._jobs if job.is_ready]
                if ready:
                    job = min(ready, key=self._order())
                    self._turn += 1
                    job.running += 1
                    job.last_turn = self._turn
                    if job.following:
                        return job, job.following.popleft()
                    job.is_advancing = True
                    return job, None
                self._changed.wait()
            return None

    def _order(self) -> Callable[[PoolJob], tuple[int, int, int, int]]:
        running: dict[str, int] = {}
        last_turn: dict[str, int] = {}
        for job in self._jobs:
            running[job.tenant] = running.get(job.tenant, 0) + job.running
            last_turn[job.tenant] = max(last_turn.get(job.tenant, 0), job.last_turn)
        return lambda job: (
            running[job.tenant],
            last_turn[job.tenant],
            job.running,
            job.last_turn,
        )

    def _settle(self, job: PoolJob) -> None:
        """End a job once nothing of it runs any more; by one thread."""
        with self._changed:
            if not job.is_over or job not in self._jobs:
                return
            self._jobs.remove(job)
        try:
            job.close()
        except Exception as error:  # noqa: BLE001 -- reported to the caller of the copy
            job.error = job.error or error
        finally:
            job.ended.set()
