"""Jobs and events of a state directory without a driver, read from its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flyer.attempt_history import History
from flyer.errors import FlyerError
from flyer.local.store import read_jobs, read_json_lines
from flyer.presenter import job_view
from flyer.views import EventView, JobView, from_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flyer.local.state_directory import StatePaths

__all__ = ["StoredJobs"]

LISTED_MAX = 10


class StoredJobs:
    """A snapshot, read once: the files do not change without a driver."""

    def __init__(self, paths: StatePaths) -> None:
        self._events = [from_json(EventView, record) for record in read_json_lines(paths.events)]
        history = History(self._events)
        self._jobs = {job.key: job for job in read_jobs(paths)}
        self._views = {
            key: job_view(job, history.of(key), None, paths.job_logs(key), driven=False)
            for key, job in self._jobs.items()
        }

    def jobs(self) -> list[JobView]:
        """Every stored job."""
        return list(self._views.values())

    def job(self, key: str) -> JobView:
        """One stored job by `namespace/name`."""
        if key not in self._views:
            names = ", ".join(sorted(self._views)[:LISTED_MAX]) or "none"
            raise FlyerError.not_found(
                f"job `{key}` not found; existing jobs: {names}", "`flyer ps` lists all jobs"
            )
        return self._views[key]

    def document(self, key: str) -> dict[str, Any]:
        """One stored FlyerJob object."""
        return self._jobs[self.job(key).key].to_object()

    def events(self, key: str | None, since: int) -> Iterator[EventView]:
        """Events with sequence number `since` or higher, of one job or of all."""
        for event in self._events:
            if event.sequence >= since and key in (None, event.job):
                yield event
