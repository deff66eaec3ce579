"""Client for reads of a local cluster, with or without a driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flyer.client.connection import Client
from flyer.client.stored import StoredJobs
from flyer.local.state_directory import StatePaths, driver_alive, find_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from flyer.views import EventView

__all__ = ["OfflineClient", "reader"]


def reader(state: str | Path | None, *, must_be_driven: bool = False) -> Client:
    """A client for reads: of the driver if one runs, otherwise of its state directory."""
    paths = find_state(state)
    if must_be_driven or driver_alive(paths):
        return Client(paths)
    return OfflineClient(paths)


class OfflineClient(Client):
    """Answers reads from the state directory; every other verb fails: it needs a driver."""

    driven = False

    def __init__(self, paths: StatePaths) -> None:
        """Read the state directory once."""
        super().__init__(paths)
        self._snapshot = StoredJobs(paths)

    def _stored(self) -> StoredJobs:
        return self._snapshot

    def events(
        self,
        *,
        job: str | None = None,
        follow: bool = False,  # noqa: ARG002 - without a driver no event follows
        since: int = 0,
        timeout_seconds: float | None = None,  # noqa: ARG002
    ) -> Iterator[EventView]:
        """Past events."""
        return super().events(job=job, since=since)

    def logs(self, name: str, **options: Any) -> Iterator[Any]:
        """The output so far."""
        return super().logs(name, **{**options, "follow": False})
