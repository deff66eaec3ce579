"""Client of a local driver: one method per verb.

Every call opens its own connection, so threads may share a Client.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from flyer.client.channel import Channel
from flyer.client.logs import LogLine, LogReader
from flyer.client.watch_item import WatchItem
from flyer.errors import FlyerError
from flyer.local.state_directory import StatePaths, driver_alive, find_state
from flyer.views import (
    FINISHED_STATES,
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

    from flyer.client.stored import StoredJobs

__all__ = ["Client", "connect", "reader"]

DEFAULT_NAMESPACE = "default"
LOG_POLL_SECONDS = 0.1
START_WAIT_SECONDS = 15.0
START_POLL_SECONDS = 0.05


def connect(state_dir: str | Path | None = None, *, timeout_seconds: float = 30.0) -> Client:
    """Connect to the driver of `state_dir`, FLYER_STATE, or the only cluster in `.flyer/`."""
    client = Client(find_state(state_dir), timeout_seconds=timeout_seconds)
    client.ping()
    return client


def reader(state: str | Path | None, *, must_be_driven: bool = False) -> Client:
    """A client for reads: of the driver if one runs, otherwise of its state directory."""
    paths = find_state(state)
    return Client(paths, driven=must_be_driven or driver_alive(paths))


class Client:
    """Client of the driver of one local cluster.

    Not `driven`: it answers reads from the state directory, which it reads once. Every other verb
    fails, because it needs a driver.
    """

    def __init__(
        self, paths: StatePaths, *, timeout_seconds: float = 30.0, driven: bool = True
    ) -> None:
        """Create a client; nothing is sent before the first call."""
        self.paths = paths
        self.driven = driven
        self._timeout_seconds = timeout_seconds
        self._snapshot = None if driven else self._read_stored()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Does nothing: no connection stays open between calls."""

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
        """Submit every FlyerJob of a manifest; an unfinished job of that name is returned."""
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
        if stored := self._stored():
            return stored.jobs()
        return [from_json(JobView, job) for job in self._call("jobs")]

    def job(self, name: str) -> JobView:
        """One job by `name` or `namespace/name`."""
        if stored := self._stored():
            return stored.job(_key(name))
        return from_json(JobView, self._call("job", job=_key(name)))

    def document(self, name: str) -> dict[str, Any]:
        """One job's FlyerJob object, as `kubectl get -o json` would print it."""
        if stored := self._stored():
            return stored.document(_key(name))
        answer: dict[str, Any] = self._call("document", job=_key(name))
        return answer

    def why(self, name: str) -> WhyView:
        """Every reason why a job is not running, with numbers, and what would unblock it."""
        return from_json(WhyView, self._call("why", job=_key(name)))

    def suspend(self, name: str, *, reason: str = "") -> JobView:
        """Ask a job to save and release its nodes; returns as soon as that is decided."""
        return self._job_call("suspend", name, reason=reason)

    def resume(self, name: str) -> JobView:
        """Queue a suspended job again, in its previous position."""
        return self._job_call("resume", name)

    def stop(self, name: str, *, reason: str = "", kill: bool = False) -> JobView:
        """End a job after its grace period or (`kill`) immediately; checkpoints and logs stay."""
        return self._job_call("stop", name, reason=reason, kill=kill)

    def requeue(self, name: str, *, reason: str = "") -> JobView:
        """Make a job save, release its nodes and queue again."""
        return self._job_call("requeue", name, reason=reason)

    def nodes(self) -> list[NodeView]:
        """Every node with its job, rank range and processes."""
        return [from_json(NodeView, item) for item in self._call("nodes")]

    def queues(self) -> list[QueueView]:
        """Every queue with its running and waiting jobs."""
        return [from_json(QueueView, item) for item in self._call("queues")]

    def quotas(self) -> list[QuotaView]:
        """Every quota and its usage per subject."""
        return [from_json(QuotaView, item) for item in self._call("quotas")]

    def set_priority(self, name: str, priority: str) -> JobView:
        """Change a job's priority; running jobs keep their nodes."""
        return self._job_call("priority", name, priority=priority)

    # -- streams -------------------------------------------------------------------------------

    def watch(
        self,
        *,
        timeout_seconds: float | None = None,
        since: int | None = None,
        beat_seconds: float | None = None,
    ) -> Iterator[WatchItem]:
        """The current state, then every change, until the driver ends or the timeout expires.

        Past events come first, starting with sequence number `since`; without it only new ones
        come. With `beat_seconds` an empty item comes after that time without another one.
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
        """Events with sequence number `since` or higher; with `follow` also future ones."""
        key = None if job is None else _key(job)
        follow = follow and self.driven
        stored = None if follow else self._stored()
        if stored:
            yield from stored.events(key, since)
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
        if not (follow and self.driven) or view.finished:
            yield from reader.read(final=True)
            return
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for ended in self._until_finished(view.key, deadline):
            yield from reader.read(final=ended)

    def _until_finished(self, key: str, deadline: float | None) -> Iterator[bool]:
        """Yield False at intervals while a job runs, then True; an error when the driver ends."""
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

    def _stored(self) -> StoredJobs | None:
        """The state directory's content when no driver holds it: it answers reads."""
        if self._snapshot is not None:
            return self._snapshot
        return None if driver_alive(self.paths) else self._read_stored()

    def _read_stored(self) -> StoredJobs:
        from flyer.client.stored import StoredJobs

        return StoredJobs(self.paths)

    # -- plumbing ------------------------------------------------------------------------------

    def _channel(self) -> Channel:
        """Connect. A driver that holds the lock without answering is starting or ending: wait."""
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
    return min((limit for limit in seconds if limit is not None), default=None)


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
                "the driver closed this watch: the client read too slowly",
                "watch again, and read faster",
            )
        case _:
            return WatchItem()  # an item of a newer driver
