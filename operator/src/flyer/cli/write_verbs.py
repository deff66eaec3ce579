"""The verbs that change a job: suspend, resume, stop, requeue, priority."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from flyer.cli.output import Output, colours, print_result, say
from flyer.errors import FlyerError

if TYPE_CHECKING:
    from flyer.cli.target import FlyerClient, Target
    from flyer.client import EventView, JobView

# After one of these events no process of the job runs: it is suspended or has ended.
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
    """Suspend a job, and report each step with its time."""
    client = target.connect()
    last_sequence = max((event.sequence for event in client.events(job=key)), default=0)
    if client.job(key).state == "Suspended":
        raise FlyerError.usage(f"`{key}` is already suspended", f"`flyer resume {key}` resumes it")
    started_at = time.time()
    job = client.suspend(key, reason=reason)
    if wait and not job.finished:
        line = _SuspendLine(started_at)
        job = _until_suspended(client, key, last_sequence, line, timeout_seconds or None)
        line.finish(output)
    _report(job, output, f"{job.key} is {job.state}; resume it with `flyer resume {job.name}`")


class _SuspendLine:
    """`signal 0.0 s · ack 0.4 s · saved step 1200 6.1 s · 8 nodes free 7.0 s · lost 0 steps`."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._parts: list[str] = []
        self._live = colours(sys.stderr)

    def note(self, event: EventView) -> None:
        """Add an event to the line."""
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
            self._parts.append(f"{words} {max(0.0, event.time - self._started_at):.1f} s")
        evicted = "lostSteps" in fields
        if evicted:
            lost_steps = fields.get("lostSteps")
            self._parts.append("lost 0 steps" if not lost_steps else f"lost {lost_steps} steps")
        if self._live and (words or evicted):
            print(f"\r\x1b[2K{self.text()}", end="", file=sys.stderr, flush=True)

    def text(self) -> str:
        """The line so far; lost steps come last."""
        losses = [part for part in self._parts if part.startswith("lost")]
        return " · ".join([part for part in self._parts if part not in losses] + losses)

    def finish(self, output: Output) -> None:
        """Print the complete line."""
        if self._live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        if output in (Output.TABLE, Output.WIDE) and self._parts:
            print(self.text(), flush=True)


def _until_suspended(
    client: FlyerClient,
    key: str,
    last_sequence: int,
    line: _SuspendLine,
    timeout_seconds: float | None,
) -> JobView:
    """Add events to the line until the job is suspended or has ended."""
    for event in client.events(
        job=key, follow=True, since=last_sequence + 1, timeout_seconds=timeout_seconds
    ):
        line.note(event)
        if event.reason in LEFT:
            return client.job(key)
    leaderless = [reason for reason in client.why(key).reasons if reason.reason == "NoLeader"]
    if leaderless:
        raise FlyerError.timeout(f"`{key}` is still {client.job(key).state}", leaderless[0].message)
    raise FlyerError.timeout(
        f"`{key}` is still {client.job(key).state}",
        "its grace period continues; see `flyer show`, or kill it with `flyer stop --now`",
    )


def resume(key: str, target: Target, output: Output) -> None:
    """Queue a suspended job again."""
    job = target.connect().resume(key)
    _report(job, output, f"{job.key} is {job.state}{_because(job)}")


def stop(key: str, target: Target, output: Output, *, reason: str, kill: bool) -> None:
    """End a job."""
    job = target.connect().stop(key, reason=reason, kill=kill)
    _report(job, output, f"{job.key} is {job.state}; its checkpoints and logs are kept")


def requeue(key: str, target: Target, output: Output, *, reason: str) -> None:
    """Release the nodes and queue again."""
    job = target.connect().requeue(key, reason=reason)
    _report(job, output, f"{job.key} is {job.state} and queues again{_because(job)}")


def priority(key: str, level: str, target: Target, output: Output) -> None:
    """Change the priority; a running job keeps its nodes."""
    job = target.connect().set_priority(key, level)
    _report(job, output, f"{job.key} has priority {job.priority}{_because(job)}")


def _because(job: JobView) -> str:
    return f": {job.message}" if job.message else ""


def _report(job: JobView, output: Output, words: str) -> None:
    if output in (Output.JSON, Output.YAML):
        print_result(job, output)
    else:
        say(words)
