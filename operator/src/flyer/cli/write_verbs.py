"""The verbs that ask for something: suspend, resume, stop, requeue, priority."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from flyer.cli.output import Output, colours, print_result, say
from flyer.errors import FlyerError

if TYPE_CHECKING:
    from flyer.cli.target import Target
    from flyer.client import EventView, JobView
    from flyer.client.protocol import FlyerClient

# After one of these events nothing of the job runs, and it waits to be resumed or has ended.
LEFT = ("Suspended", "Succeeded", "Failed")

__all__ = ["priority", "requeue", "resume", "stop", "suspend"]


def suspend(
    key: str,
    target: Target,
    output: Output,
    *,
    reason: str,
    wait: bool,
    timeout_seconds: float,
) -> None:
    """Ask, then tell what happens with the time that each part took."""
    client = target.connect()
    seen = max((event.sequence for event in client.events(job=key)), default=0)
    if client.job(key).state == "Suspended":
        raise FlyerError.usage(f"`{key}` is suspended already", f"`flyer resume {key}` ends that")
    began = time.time()
    job = client.suspend(key, reason=reason)
    if wait and not job.finished:
        line = _SuspendLine(began)
        job = _until_suspended(client, key, seen, line, timeout_seconds or None)
        line.finish(output)
    _told(job, output, f"{job.key} is {job.state}; `flyer resume {job.name}` lets it go on")


class _SuspendLine:
    """`signal 0.0 s · ack 0.4 s · saved step 1200 6.1 s · 8 nodes free 7.0 s · lost 0 steps`."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._parts: list[str] = []
        self._live = colours(sys.stderr)

    def note(self, event: EventView) -> None:
        """Add what an event tells."""
        fields = event.fields
        words = {
            "SuspendSignalled": "signal",
            "SuspendReceived": "ack",
            "CheckpointDurable": f"saved step {fields.get('step')}",
            "Released": "released",
            "GraceExtended": "more time to save",
            "GraceExpired": "no answer, killed",
            "NodesFree": f"{fields.get('nodes')} nodes free",
        }.get(event.reason)
        if words is not None:
            self._parts.append(f"{words} {max(0.0, event.time - self._began):.1f} s")
        evicted = "lostSteps" in fields
        if evicted:
            lost = fields.get("lostSteps")
            self._parts.append("lost 0 steps" if not lost else f"lost {lost} steps")
        if self._live and (words or evicted):
            print(f"\r\x1b[2K{self.text()}", end="", file=sys.stderr, flush=True)

    def text(self) -> str:
        """The line so far; what was lost comes last."""
        lost = [part for part in self._parts if part.startswith("lost")]
        return " · ".join([part for part in self._parts if part not in lost] + lost)

    def finish(self, output: Output) -> None:
        """The whole line, once."""
        if self._live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        if output in (Output.TABLE, Output.WIDE) and self._parts:
            print(self.text(), flush=True)


def _until_suspended(
    client: FlyerClient, key: str, seen: int, line: _SuspendLine, timeout_seconds: float | None
) -> JobView:
    """Note events until the one that says that the job has left, or has ended meanwhile."""
    for event in client.events(
        job=key, follow=True, since=seen + 1, timeout_seconds=timeout_seconds
    ):
        line.note(event)
        if event.reason in LEFT:
            return client.job(key)
    leaderless = [one for one in client.why(key).reasons if one.reason == "NoLeader"]
    if leaderless:
        raise FlyerError.timeout(f"`{key}` is still {client.job(key).state}", leaderless[0].message)
    raise FlyerError.timeout(
        f"`{key}` is still {client.job(key).state}",
        "it keeps its grace; `flyer show` tells more, `flyer stop --now` kills it for good",
    )


def resume(key: str, target: Target, output: Output) -> None:
    """Let it queue again."""
    job = target.connect().resume(key)
    _told(job, output, f"{job.key} is {job.state}{_because(job)}")


def stop(key: str, target: Target, output: Output, *, reason: str, kill: bool) -> None:
    """End it for good."""
    job = target.connect().stop(key, reason=reason, kill=kill)
    _told(job, output, f"{job.key} is {job.state}; its checkpoints and logs stay")


def requeue(key: str, target: Target, output: Output, *, reason: str) -> None:
    """Leave and queue again."""
    job = target.connect().requeue(key, reason=reason)
    _told(job, output, f"{job.key} is {job.state} and queues again{_because(job)}")


def priority(key: str, level: str, target: Target, output: Output) -> None:
    """Another place in the queue; what runs keeps its nodes."""
    job = target.connect().set_priority(key, level)
    _told(job, output, f"{job.key} has priority {job.priority}{_because(job)}")


def _because(job: JobView) -> str:
    return f": {job.message}" if job.message else ""


def _told(job: JobView, output: Output, words: str) -> None:
    if output in (Output.JSON, Output.YAML):
        print_result(job, output)
    else:
        say(words)
