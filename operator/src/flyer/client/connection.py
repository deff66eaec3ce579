"""Client: one method a verb, each over a connection of its own, so threads may share a Client."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from flyer.client.channel import Channel
from flyer.client.logs import LogLine, LogReader
from flyer.errors import FlyerError
from flyer.local.statedir import StatePaths, driver_alive, find_state
from flyer.views import (
    EventView,
    JobView,
    NodeView,
    QueueView,
    QuotaView,
    WhyView,
    from_json,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["Client", "WatchItem", "connect"]

DEFAULT_NAMESPACE = "default"
FINISHED_STATES = ("Succeeded", "Failed")
LOG_POLL_SECONDS = 0.1
START_WAIT_SECONDS = 15.0
START_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class WatchItem:
    """One thing that changed: exactly one of the fields is set, or `ended` is true."""

    event: EventView | None = None
    job: JobView | None = None
    nodes: list[NodeView] | None = None
    ended: bool = False


def connect(state_dir: str | Path | None = None, *, timeout_seconds: float = 30.0) -> Client:
    """Find the cluster (argument, FLYER_STATE, or the only one in `.flyer/`), greet its driver."""
    client = Client(find_state(state_dir), timeout_seconds=timeout_seconds)
    client.ping()
    return client


class Client:
    """Talks to the driver of one local cluster."""

    driven = True
    """Whether a driver answers, or (flyer.client.offline) only its state directory."""

    def __init__(self, paths: StatePaths, *, timeout_seconds: float = 30.0) -> None:
        """Make a client; nothing is sent before the first call."""
        self.paths = paths
        self._timeout_seconds = timeout_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is kept open between calls; other clusters' clients will keep something."""

    def ping(self) -> dict[str, Any]:
        """The driver's process id, version and cluster name."""
        answer: dict[str, Any] = self._call("ping")
        return answer

    # -- verbs ---------------------------------------------------------------------------------

    def run(self, manifest: str | Path) -> JobView:
        """Submit a manifest (a path, or YAML text with a line end) of one job."""
        return self.run_all(manifest)[0]

    submit = run

    def run_all(self, manifest: str | Path) -> list[JobView]:
        """Submit every FlyerJob of a manifest. An unfinished job of the same name is joined."""
        if isinstance(manifest, str) and "\n" in manifest:
            text, source, folder = manifest, "manifest", Path.cwd()
        else:
            path = Path(manifest)
            try:
                text = path.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise FlyerError.usage(f"cannot read the manifest `{path}`: {error}") from error
            source, folder = str(path), path.absolute().parent
        answer = self._call("run", manifest=text, source=source, folder=str(folder))
        return [from_json(JobView, item) for item in answer]

    def jobs(self) -> list[JobView]:
        """Every job, finished ones too."""
        found = self._from_disk()
        return found.jobs() if found else [from_json(JobView, one) for one in self._call("jobs")]

    def job(self, name: str) -> JobView:
        """One job by `name` or `namespace/name`."""
        found = self._from_disk()
        if found:
            return found.job(name)
        return from_json(JobView, self._call("job", job=_key(name)))

    def document(self, name: str) -> dict[str, Any]:
        """One job's FlyerJob object, as `kubectl get -o json` would print it."""
        found = self._from_disk()
        if found:
            return found.document(name)
        answer: dict[str, Any] = self._call("document", job=_key(name))
        return answer

    def why(self, name: str) -> WhyView:
        """Every reason why a job does not run, with numbers, and what would unblock it."""
        return from_json(WhyView, self._call("why", job=_key(name)))

    def suspend(self, name: str, *, reason: str = "") -> JobView:
        """Ask a job to save and leave its nodes; returns as soon as that is decided."""
        return self._job_call("suspend", name, reason=reason)

    def resume(self, name: str) -> JobView:
        """Let a suspended job queue again, in its old place."""
        return self._job_call("resume", name)

    def stop(self, name: str, *, reason: str = "", kill: bool = False) -> JobView:
        """End a job for good, with its grace or at once; its checkpoints and logs stay."""
        return self._job_call("stop", name, reason=reason, kill=kill)

    def requeue(self, name: str, *, reason: str = "") -> JobView:
        """Make a job save, leave, and queue again at once."""
        return self._job_call("requeue", name, reason=reason)

    def nodes(self) -> list[NodeView]:
        """Every node with its job, rank range and processes."""
        return [from_json(NodeView, item) for item in self._call("nodes")]

    def queues(self) -> list[QueueView]:
        """Every queue with what runs and what waits."""
        return [from_json(QueueView, item) for item in self._call("queues")]

    def quotas(self) -> list[QuotaView]:
        """Every quota, and per user what is used of it."""
        return [from_json(QuotaView, item) for item in self._call("quotas")]

    def set_priority(self, name: str, priority: str) -> JobView:
        """Change a job's priority; what runs keeps its nodes."""
        return self._job_call("priority", name, priority=priority)

    # -- streams -------------------------------------------------------------------------------

    def watch(
        self,
        *,
        timeout_seconds: float | None = None,
        since: int | None = None,
        beat_seconds: float | None = None,
    ) -> Iterator[WatchItem]:
        """The present state, then every change, until the driver ends or the time is over.

        Past events come first from sequence number `since` on; without it only new ones come.
        With `beat_seconds` an empty item comes whenever nothing else did for so long.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._channel() as channel:
            channel.send("watch", since=since, pid=os.getpid())
            channel.answer()
            while True:
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return
                message = channel.next(_least(remaining, beat_seconds))
                if message is None and beat_seconds is None:
                    return
                item = WatchItem() if message is None else _watch_item(message)
                yield item
                if item.ended:
                    return

    def events(
        self,
        *,
        job: str | None = None,
        follow: bool = False,
        since: int = 0,
        timeout_seconds: float | None = None,
    ) -> Iterator[EventView]:
        """Events from sequence number `since` on; with `follow` also those to come."""
        key = None if job is None else _key(job)
        found = None if follow else self._from_disk()
        if found:
            yield from found.events(job=job, since=since)
            return
        if not follow:
            for document in self._call("events", since=since, job=key):
                yield from_json(EventView, document)
            return
        for item in self.watch(timeout_seconds=timeout_seconds, since=since):
            if item.event is not None and key in (None, item.event.job):
                yield item.event

    def wait(
        self,
        name: str,
        *,
        timeout_seconds: float | None = None,
        states: Collection[str] = FINISHED_STATES,
    ) -> JobView:
        """Wait until a job is in one of `states`; FlyerError (Timeout) when it takes too long."""
        key, last = _key(name), self.job(name)
        if last.state in states:
            return last
        for item in self.watch(timeout_seconds=timeout_seconds):
            if item.job is not None and item.job.key == key:
                last = item.job
                if last.state in states:
                    return last
            if item.ended:
                raise FlyerError.unreachable(
                    f"the driver ended while `{key}` was {last.state}",
                    "`flyer run` starts it again and continues every unfinished job",
                )
        raise FlyerError.timeout(
            f"`{key}` is {last.state} after {timeout_seconds:g} s, "
            f"waited for {' or '.join(states)}",
            f"see `flyer why {name}`",
        )

    def logs(
        self,
        name: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        follow: bool = False,
        timeout_seconds: float | None = None,
    ) -> Iterator[LogLine]:
        """Lines of a job's ranks over all its attempts, each once, in order within a rank."""
        view = self.job(name)
        reader = LogReader(Path(view.log_folder), rank=rank, attempt=attempt)
        if not follow or view.finished:
            yield from reader.read(final=True)
            return
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for ended in self._until_finished(view.key, deadline):
            yield from reader.read(final=ended)

    def _until_finished(self, key: str, deadline: float | None) -> Iterator[bool]:
        """Yield False every moment while a job lives, then True; an error when nobody can say."""
        remaining = None if deadline is None else deadline - time.monotonic()
        for item in self.watch(timeout_seconds=remaining, beat_seconds=LOG_POLL_SECONDS):
            if item.job is not None and item.job.key == key and item.job.finished:
                yield True
                return
            if item.ended:
                yield True
                raise FlyerError.unreachable(
                    f"the driver ended before `{key}` did",
                    "`flyer run` starts it again and continues every unfinished job",
                )
            yield False

    def _from_disk(self) -> Client | None:
        """What a driver left, once it has ended: questions are answered all the same."""
        if driver_alive(self.paths):
            return None
        from flyer.client.offline import OfflineClient

        return OfflineClient(self.paths)

    # -- plumbing ------------------------------------------------------------------------------

    def _channel(self) -> Channel:
        """A connection. A driver that holds the lock is starting or ending: wait for it."""
        deadline = time.monotonic() + START_WAIT_SECONDS
        while True:
            try:
                return Channel(str(self.paths.control), self._timeout_seconds)
            except FlyerError:
                if time.monotonic() > deadline or not driver_alive(self.paths):
                    raise
            time.sleep(START_POLL_SECONDS)

    def _call(self, op: str, **arguments: Any) -> Any:
        with self._channel() as channel:
            return channel.call(op, **arguments)

    def _job_call(self, op: str, name: str, **arguments: Any) -> JobView:
        return from_json(JobView, self._call(op, job=_key(name), **arguments))


def _least(*seconds: float | None) -> float | None:
    return min((one for one in seconds if one is not None), default=None)


def _key(name: str) -> str:
    return name if "/" in name else f"{DEFAULT_NAMESPACE}/{name}"


def _watch_item(message: dict[str, Any]) -> WatchItem:
    match message.get("kind"):
        case "event":
            return WatchItem(event=from_json(EventView, message["event"]))
        case "job":
            return WatchItem(job=from_json(JobView, message["job"]))
        case "nodes":
            return WatchItem(nodes=[from_json(NodeView, node) for node in message["nodes"]])
        case "end":
            return WatchItem(ended=True)
        case "lagged":
            raise FlyerError.unreachable(
                "this watcher read too slowly and was cut off", "watch again, and read faster"
            )
        case _:
            return WatchItem()  # a newer driver's news
