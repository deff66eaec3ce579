"""Turns two statuses of a job, before and after a commit, into the events that a user reads.

Pure. Events follow commits, so nothing is told that was not decided durably.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyer.api import FlyerJobStatus, Phase, SuspendCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flyer.api import Assignment, Exit

__all__ = ["ENDS_ATTEMPT", "Told", "narrate"]

# Events with this field set end the attempt that they name.
ENDS_ATTEMPT = "endsAttempt"


@dataclass(frozen=True, slots=True)
class Told:
    """An event before it gets its number and its time."""

    reason: str
    message: str
    attempt: int | None = None
    node: str = ""
    warning: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


def narrate(before: FlyerJobStatus | None, after: FlyerJobStatus) -> Iterator[Told]:
    """Everything worth telling between two statuses, in the order in which it happened."""
    before = before or FlyerJobStatus(reason="New")
    attempt = after.chain.attempt or None
    yield from _checkpoint(before, after, attempt)
    yield from _suspension(before, after, attempt)
    yield from _exits(before, after, attempt)
    if before.occupied and not after.occupied:
        had = before.assignment or after.assignment
        count = len(had.nodes) if had else len(before.occupied)
        yield Told("NodesFree", f"{_nodes(count)} free again", attempt, fields={"nodes": count})
    yield from _phase(before, after)


def _checkpoint(
    before: FlyerJobStatus, after: FlyerJobStatus, attempt: int | None
) -> Iterator[Told]:
    now = after.checkpoint
    if now is None or now == before.checkpoint:
        return
    yield Told(
        "CheckpointDurable",
        f"step {now.step} is safe in {now.path}",
        attempt,
        fields={"step": now.step, "path": now.path},
    )


def _suspension(
    before: FlyerJobStatus, after: FlyerJobStatus, attempt: int | None
) -> Iterator[Told]:
    now, old = after.suspension, before.suspension
    if now is not None and old is None:
        yield Told(
            "SuspendSignalled",
            f"asked to save and leave within {now.deadline - now.since:.0f} s "
            f"({now.message or f'{now.reason} by {now.by}'})",
            attempt,
            fields={"by": now.by, "reason": now.reason, "deadline": now.deadline},
        )
    elif now is not None and old is not None:
        if now.deadline > old.deadline:
            yield Told(
                "GraceExtended",
                f"it makes progress: {now.deadline - old.deadline:.1f} s more to save",
                attempt,
                fields={"deadline": now.deadline},
            )
        if now.expired and not old.expired:
            yield Told(
                "GraceExpired",
                f"no release within {now.deadline - now.since:.0f} s: killed, "
                f"{_restarts_from(after)}",
                attempt,
                warning=True,
            )
    if after.suspend_code >= SuspendCode.RECEIVED > before.suspend_code:
        yield Told("SuspendReceived", "the job knows and saves", attempt)
    if after.suspend_code >= SuspendCode.MAY_SUSPEND > before.suspend_code:
        yield Told("Released", "the job has saved and gives its nodes back", attempt)


def _exits(before: FlyerJobStatus, after: FlyerJobStatus, attempt: int | None) -> Iterator[Told]:
    known = {(one.node, one.time) for one in before.exits}
    for one in after.exits:
        if (one.node, one.time) in known or one.outcome == "Succeeded" or one.reason == "vanished":
            continue
        if before.suspension is not None or after.suspension is not None:
            continue
        yield Told(
            "PodExited",
            f"pod on {one.node} {_how(one)}{': ' + one.reason if one.reason else ''}",
            attempt,
            one.node,
            warning=True,
            fields={"exitStatus": one.exit_status, "signal": one.signal},
        )


def _phase(before: FlyerJobStatus, after: FlyerJobStatus) -> Iterator[Told]:
    attempt = after.chain.attempt or None
    if before.reason == "New" and after.phase is Phase.QUEUED:
        yield Told("Queued", _pending(after))
        return
    if after.eviction is not None and after.eviction != before.eviction:
        yield _evicted(after)
    if before.phase is after.phase:
        return
    match after.phase:
        case Phase.DRAINING | Phase.RESERVED if after.assignment and not _reserved(before):
            yield _assigned(after, after.assignment)
        case Phase.STARTING if after.assignment:
            if not _reserved(before):
                yield _assigned(after, after.assignment)
            yield _starting(after, after.assignment)
        case Phase.RUNNING if after.assignment:
            names = " ".join(after.assignment.names)
            yield Told("Started", f"attempt {attempt} runs on {names}", attempt)
        case Phase.SUSPENDED:
            yield Told("Suspended", after.message or "waits for `flyer resume`", attempt)
        case Phase.QUEUED if before.phase is Phase.SUSPENDED:
            yield Told("Resumed", "queued again in its old place", attempt)
        case Phase.SUCCEEDED:
            yield Told(
                "Succeeded", after.message or "all ranks ended well", attempt, fields=_ends()
            )
        case Phase.FAILED:
            message = after.message or after.reason
            yield Told("Failed", message, attempt, warning=True, fields=_ends(why=after.reason))


def _reserved(status: FlyerJobStatus) -> bool:
    return status.phase in (Phase.RESERVED, Phase.DRAINING)


def _assigned(status: FlyerJobStatus, assignment: Assignment) -> Told:
    places = ", ".join(f"{node.name} ({node.zone})" for node in assignment.nodes)
    waits = "; waits until they are empty" if status.phase is Phase.DRAINING else ""
    return Told(
        "Assigned",
        f"gets {places}{waits}",
        fields={"nodes": list(assignment.names), "zones": list(assignment.zones)},
    )


def _starting(status: FlyerJobStatus, assignment: Assignment) -> Told:
    attempt = status.chain.attempt
    checkpoint = status.checkpoint
    origin = f"from step {checkpoint.step}" if checkpoint else "from the beginning"
    split = {True: ", same zone split", False: ", another zone split", None: ""}
    return Told(
        "Starting",
        f"attempt {attempt} starts {origin}{split[assignment.same_split]}",
        attempt,
        fields={
            "nodes": [
                {"name": node.name, "zone": node.zone, "firstRank": node.first_rank}
                for node in assignment.nodes
            ],
            "restoredStep": checkpoint.step if checkpoint else None,
            "sameSplit": assignment.same_split,
        },
    )


def _evicted(status: FlyerJobStatus) -> Told:
    eviction = status.eviction
    assert eviction is not None
    by = f" by {eviction.by}" if eviction.by else ""
    lost = "" if eviction.lost_steps is None else f"; {eviction.lost_steps} steps lost"
    detail = f": {eviction.message}" if eviction.message else ""
    return Told(
        "Evicted",
        f"{eviction.reason}{by}{detail}{lost}",
        eviction.attempt,
        warning=eviction.lost_steps is not None and eviction.lost_steps > 0,
        fields=_ends(
            why=eviction.reason,
            by=eviction.by,
            lostSteps=eviction.lost_steps,
            suspendCode=int(eviction.suspend_code),
        ),
    )


def _ends(**fields: Any) -> dict[str, Any]:
    return {ENDS_ATTEMPT: True, **fields}


def _pending(status: FlyerJobStatus) -> str:
    return status.pending.message if status.pending else status.message or "waits for its nodes"


def _restarts_from(status: FlyerJobStatus) -> str:
    checkpoint = status.checkpoint
    if checkpoint is None:
        return "it has no durable checkpoint and starts again from the beginning"
    return f"it restarts from step {checkpoint.step}"


def _how(one: Exit) -> str:
    if one.outcome == "Failed":
        return f"exited with status {one.exit_status}"
    return f"was killed by signal {one.signal}" if one.signal else "vanished"


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"
