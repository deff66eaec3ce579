"""What every client can do, whichever cluster it talks to: a machine's driver or Kubernetes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from flyer.client.connection import WatchItem
    from flyer.client.logs import LogLine
    from flyer.views import EventView, JobView, NodeView, QueueView, QuotaView, WhyView

__all__ = ["FlyerClient"]


class FlyerClient(Protocol):
    """The verbs. Jobs are named `name` or `namespace/name`; errors are FlyerError."""

    @property
    def driven(self) -> bool:
        """Whether somebody decides; otherwise questions alone are answered."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def close(self) -> None:
        """Hang up."""

    def run_all(self, manifest: str | Path) -> list[JobView]:
        """Submit every job of a manifest, or none of them."""

    def jobs(self) -> list[JobView]:
        """Every job, finished ones too."""

    def job(self, name: str) -> JobView:
        """One job."""

    def document(self, name: str) -> dict[str, Any]:
        """One job's FlyerJob object."""

    def why(self, name: str) -> WhyView:
        """Every reason why a job does not run, and what would unblock it."""

    def suspend(self, name: str, *, reason: str = "") -> JobView:
        """Ask a job to save and leave its nodes."""

    def resume(self, name: str) -> JobView:
        """Let a suspended job queue again."""

    def stop(self, name: str, *, reason: str = "", kill: bool = False) -> JobView:
        """End a job for good."""

    def requeue(self, name: str, *, reason: str = "") -> JobView:
        """Make a job save, leave, and queue again."""

    def set_priority(self, name: str, priority: str) -> JobView:
        """Change a job's priority."""

    def nodes(self) -> list[NodeView]:
        """Every node."""

    def queues(self) -> list[QueueView]:
        """Every queue with what runs and what waits."""

    def quotas(self) -> list[QuotaView]:
        """Every quota, and per user what is used of it."""

    def watch(
        self,
        *,
        timeout_seconds: float | None = None,
        since: int | None = None,
        beat_seconds: float | None = None,
    ) -> Iterator[WatchItem]:
        """The present state, then every change."""

    def events(
        self,
        *,
        job: str | None = None,
        follow: bool = False,
        since: int = 0,
        timeout_seconds: float | None = None,
    ) -> Iterator[EventView]:
        """What happened; with `follow` also what comes."""

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
