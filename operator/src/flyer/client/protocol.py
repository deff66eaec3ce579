"""The client protocol: the verbs of every client, of a local driver or of Kubernetes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from flyer.client.logs import LogLine
    from flyer.views import EventView, JobView, NodeView, QueueView, QuotaView, WhyView

__all__ = ["FlyerClient", "WatchItem"]


@dataclass(frozen=True, slots=True)
class WatchItem:
    """One change: at most one of the fields is set, or `ended` is true."""

    event: EventView | None = None
    job: JobView | None = None
    nodes: list[NodeView] | None = None
    ended: bool = False


class FlyerClient(Protocol):
    """The verbs of `flyer`. Jobs are named `name` or `namespace/name`; errors are FlyerError."""

    @property
    def driven(self) -> bool:
        """Whether a scheduler drives the cluster; without one only reads are answered."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def close(self) -> None:
        """Close the connections."""

    def run_all(self, manifest: str | Path) -> list[JobView]:
        """Submit every job of a manifest, or none of them."""

    def jobs(self) -> list[JobView]:
        """Every job, including finished ones."""

    def job(self, name: str) -> JobView:
        """One job."""

    def document(self, name: str) -> dict[str, Any]:
        """One job's FlyerJob object."""

    def why(self, name: str) -> WhyView:
        """Every reason why a job is not running, and what would unblock it."""

    def suspend(self, name: str, *, reason: str = "") -> JobView:
        """Ask a job to save and release its nodes."""

    def resume(self, name: str) -> JobView:
        """Queue a suspended job again."""

    def stop(self, name: str, *, reason: str = "", kill: bool = False) -> JobView:
        """End a job."""

    def requeue(self, name: str, *, reason: str = "") -> JobView:
        """Make a job save, release its nodes and queue again."""

    def set_priority(self, name: str, priority: str) -> JobView:
        """Change a job's priority."""

    def nodes(self) -> list[NodeView]:
        """Every node."""

    def queues(self) -> list[QueueView]:
        """Every queue with its running and waiting jobs."""

    def quotas(self) -> list[QuotaView]:
        """Every quota and its usage per subject."""

    def watch(
        self,
        *,
        timeout_seconds: float | None = None,
        since: int | None = None,
        beat_seconds: float | None = None,
    ) -> Iterator[WatchItem]:
        """The current state, then every change."""

    def events(
        self,
        *,
        job: str | None = None,
        follow: bool = False,
        since: int = 0,
        timeout_seconds: float | None = None,
    ) -> Iterator[EventView]:
        """Past events; with `follow` also future ones."""

    def wait(
        self,
        name: str,
        *,
        timeout_seconds: float | None = None,
        states: Collection[str] = ("Succeeded", "Failed"),
    ) -> JobView:
        """Wait until a job is in one of these states."""

    def logs(
        self,
        name: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        follow: bool = False,
        timeout_seconds: float | None = None,
    ) -> Iterator[LogLine]:
        """Lines of a job's ranks over all its attempts."""
