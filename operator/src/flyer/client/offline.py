"""Reads a state directory that nobody drives: jobs, events and logs stay readable for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flyer.client.connection import Client
from flyer.errors import FlyerError
from flyer.local.statedir import StatePaths, driver_alive, find_state
from flyer.views import EventView, JobView, from_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["OfflineClient", "reader"]


def reader(state: str | Path | None, *, must_be_driven: bool = False) -> Client:
    """A client for questions: of the driver if one lives, otherwise of what it left on disk."""
    paths = find_state(state)
    if must_be_driven or driver_alive(paths):
        return Client(paths)
    return OfflineClient(paths)


class OfflineClient(Client):
    """Answers questions about jobs from disk; everything else needs a driver and says so."""

    driven = False

    def __init__(self, paths: StatePaths) -> None:
        """Read the state directory once: nobody changes it while nobody drives it."""
        super().__init__(paths)
        from flyer.attempt_history import History
        from flyer.local.store import read_jobs, read_json_lines
        from flyer.presenter import job_view

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

    def job(self, name: str) -> JobView:
        """One stored job."""
        key = name if "/" in name else f"default/{name}"
        if key not in self._views:
            known = ", ".join(sorted(self._views)[:10]) or "none"
            raise FlyerError.not_found(
                f"there is no job `{key}` here; there are: {known}", "`flyer ps` lists all jobs"
            )
        return self._views[key]

    def document(self, name: str) -> dict[str, Any]:
        """One stored FlyerJob object."""
        return self._jobs[self.job(name).key].to_object()

    def events(
        self,
        *,
        job: str | None = None,
        follow: bool = False,  # noqa: ARG002 - nothing more will come
        since: int = 0,
        timeout_seconds: float | None = None,  # noqa: ARG002
    ) -> Iterator[EventView]:
        """Past events."""
        key = None if job is None or "/" in job else f"default/{job}"
        wanted = key or job
        for event in self._events:
            if event.sequence >= since and wanted in (None, event.job):
                yield event

    def logs(self, name: str, **choices: Any) -> Iterator[Any]:
        """What was written so far."""
        return super().logs(name, **{**choices, "follow": False})
