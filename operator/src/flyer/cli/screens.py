"""Text output of the verbs for jobs, nodes and queues. Pure, except for the clock in ages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from flyer.cli.output import age, clock, table
from flyer.job.protocol import EXPOSED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flyer.views import EventView, JobView, NodeView, QueueView, QuotaView, WhyView

__all__ = [
    "JOB_COLUMNS", "JOB_COLUMNS_WIDE", "event_line", "job_row", "job_screen", "jobs_table",
    "nodes_table", "progress_text", "queues_table", "quotas_table", "top_row", "top_table",
    "why_screen",
]  # fmt: skip

JOB_COLUMNS = (
    "NAME", "STATE", "REASON", "NODES", "ZONE", "PRIORITY", "PROGRESS", "RESTARTS", "AGE",
)  # fmt: skip
JOB_COLUMNS_WIDE = (*JOB_COLUMNS, "ETA", "LAST-CKPT", "QUEUE", "NAMESPACE", "ATTEMPT")
EVENTS_SHOWN = 12
ATTEMPTS_SHOWN = 10
NOTHING = "-"


def progress_text(job: JobView) -> str:
    """`60/120 50%`, or the step alone."""
    progress = job.progress
    if progress is None:
        return NOTHING
    if progress.fraction is None:
        return f"step {progress.step}"
    return f"{progress.step}/{progress.total_steps} {progress.fraction:.0%}"


def job_row(job: JobView, *, wide: bool) -> list[str]:
    """One line of `flyer ps`."""
    end = job.finished_at or time.time()
    row = [
        job.name if job.namespace == "default" else job.key,
        job.state,
        job.reason or NOTHING,
        str(job.nodes),
        "+".join(job.zones) or NOTHING,
        job.priority,
        progress_text(job),
        str(job.restarts),
        age(end - job.created_at),
    ]
    if wide:
        saved = job.checkpoint
        row += [
            job.eta or NOTHING,
            f"step {saved.step}" if saved else NOTHING,
            job.queue,
            job.namespace,
            str(job.attempt),
        ]
    return row


def jobs_table(jobs: Iterable[JobView], *, wide: bool) -> str:
    """`flyer ps`: unfinished jobs first, then by age."""
    ordered = sorted(jobs, key=lambda job: (job.finished, job.created_at, job.key))
    header = JOB_COLUMNS_WIDE if wide else JOB_COLUMNS
    return table(header, [job_row(job, wide=wide) for job in ordered])


def nodes_table(nodes: Iterable[NodeView], *, wide: bool) -> str:
    """`flyer nodes`."""
    header = ["NODE", "ZONE", "STATE", "JOB", "RANKS", "PIDS", "REASON"]
    if wide:
        header += ["LEAF", "NODE CLASS", "SLOTS", "ATTEMPT"]
    rows = []
    for node in nodes:
        reason = node.reason
        if node.returns_at:
            reason = f"returns in {age(node.returns_at - time.time())}; {reason}"
        ranks = NOTHING if node.first_rank is None else f"{node.first_rank}-{node.last_rank}"
        row = [
            node.name,
            node.zone,
            node.state,
            node.job or NOTHING,
            ranks,
            " ".join(map(str, node.pids)) or NOTHING,
            reason or NOTHING,
        ]
        if wide:
            row += [node.leaf, node.node_class, str(node.slots), str(node.attempt or NOTHING)]
        rows.append(row)
    return table(header, rows)


def queues_table(queues: Iterable[QueueView]) -> str:
    """`flyer queues`."""
    return table(
        ("QUEUE", "RUNNING", "WAITING", "NODES-USED", "NODES-WANTED", "JOBS"),
        [
            (
                queue.name, str(queue.running_jobs), str(queue.waiting_jobs),
                str(queue.running_nodes), str(queue.waiting_nodes), " ".join(queue.jobs),
            )
            for queue in queues
        ],
    )  # fmt: skip


def quotas_table(quotas: Iterable[QuotaView]) -> str:
    """The second table of `flyer queues`."""
    return table(
        ("QUOTA", "SUBJECT", "PRIORITY", "NODE CLASS", "USED", "EXPIRES", "JOBS"),
        [
            (
                quota.name, f"{quota.kind} {quota.subject}" + " (total)" * (quota.scope == "Total"),
                quota.priority, quota.node_class, f"{quota.used}/{quota.nodes}",
                clock(quota.expires_at) if quota.expires_at is not None else NOTHING,
                " ".join(quota.jobs) or NOTHING,
            )
            for quota in quotas
        ],
    )  # fmt: skip


def top_row(job: JobView, before: JobView | None) -> dict[str, Any]:
    """One row of `flyer top`; `before` is the same job in the previous sample."""
    step = job.progress.step if job.progress else None
    rate: float | None = None
    if job.progress and before is not None and before.progress:
        seconds = job.progress.time - before.progress.time
        rate = (job.progress.step - before.progress.step) / seconds if seconds > 0 else None
    saved, now = job.checkpoint, time.time()
    metrics = job.progress.metrics if job.progress else {}
    started = next(
        (attempt.started_at for attempt in job.attempts if attempt.attempt == job.attempt), None
    )
    times = [item for item in (started, saved.time if saved else None) if item is not None]
    return {
        "job": job.key,
        "state": job.state,
        "nodes": job.nodes,
        "step": step,
        "stepsPerSecond": rate,
        "loss": metrics.get("loss"),
        "allreduceGigabytesPerSecond": metrics.get("allreduce_gigabytes_per_second"),
        "exposedPercent": job.progress.exposed_percent if job.progress else None,
        "unsavedSteps": None if step is None else max(0, step - (saved.step if saved else 0)),
        "checkpointAgeSeconds": now - saved.time if saved and saved.time else None,
        "unsavedNodeSeconds": job.nodes * max(0.0, now - max(times)) if times else None,
        "lostSteps": sum(entry.lost_steps or 0 for entry in job.attempts),
        "progress": progress_text(job),
    }


TOP_COLUMNS = 80
_JOB_COLUMNS = 14


def top_table(rows: Iterable[dict[str, Any]], *, wide: bool = False) -> str:
    """`flyer top`, within TOP_COLUMNS unless it is to be wide."""

    def number(value: float | None, shape: str = ".2f") -> str:
        return NOTHING if value is None else format(value, shape)

    def since(seconds: float | None) -> str:
        return NOTHING if seconds is None else age(seconds)

    lines = []
    for row in rows:
        cells = [
            row["job"] if wide else _short(row["job"]), str(row["nodes"]),
            row["progress"] if wide else _count(row["step"]),
            _count(row["stepsPerSecond"]), number(row["loss"], ".4g"),
            number(row["allreduceGigabytesPerSecond"], ".3g"),
            since(row["checkpointAgeSeconds"]), _count(row["unsavedSteps"]),
            since(row["unsavedNodeSeconds"]),
        ]  # fmt: skip
        more = [_percent(row["exposedPercent"]), row["state"], str(row["lostSteps"])]
        lines.append([*cells, *more] if wide else cells)
    header = ["JOB", "NODES", "STEP", "STEPS/S", "LOSS", "GB/S", "CKPT", "UNSAVED", "NODE-TIME"]
    return table([*header, "EXPOSED", "STATE", "LOST"] if wide else header, lines)


def _percent(value: int | None) -> str:
    return NOTHING if value is None else f"{value}%"


def _count(value: float | None) -> str:
    """In at most six columns: `123456`, `0.0123`, `123M`."""
    if value is None:
        return NOTHING
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def _short(key: str) -> str:
    """A job's name without its namespace, cut in the middle: both ends distinguish jobs."""
    name = key.rpartition("/")[2]
    if len(name) <= _JOB_COLUMNS:
        return name
    half = (_JOB_COLUMNS - 1) // 2
    return f"{name[: _JOB_COLUMNS - 1 - half]}…{name[-half:]}"


def event_line(event: EventView) -> str:
    """`19:31:02  Started: attempt 1 runs on 2 nodes, zone A`."""
    return f"{clock(event.time)}  {event.reason}: {event.message}"


def job_screen(job: JobView, events: Iterable[EventView]) -> str:
    """`flyer show`: everything about one job, on one screen."""
    lines = [f"{job.key}  {job.state}{f' ({job.reason})' if job.reason else ''}"]
    if job.message:
        lines.append(f"  {job.message}")
    lines += _facts(job)
    lines += _attempts(job)
    conditions = [
        f"{condition['type']}={condition['status']} ({condition['reason']})"
        for condition in job.conditions
    ]
    if conditions:
        lines += ["", "Conditions", *_wrapped(conditions)]
    latest = list(events)[-EVENTS_SHOWN:]
    if latest:
        lines += ["", "Events", *(f"  {event_line(event)}" for event in latest)]
    if job.failure is not None:
        lines += ["", *failure_lines(job)]
    return "\n".join(lines)


def failure_lines(job: JobView) -> list[str]:
    """The failing rank, then its traceback unchanged."""
    failure = job.failure
    if failure is None:
        return []
    how = (
        f"killed by signal {failure.signal}"
        if failure.signal is not None
        else f"exit status {failure.exit_status}"
    )
    subject = "a rank" if failure.rank is None else f"rank {failure.rank}"
    head = f"{subject} on node {failure.node}: {how}"
    body = failure.traceback.rstrip("\n")
    return [head, body] if body else [head, f"its output is in {job.log_folder}"]


def _facts(job: JobView) -> list[str]:
    placement = NOTHING
    if job.placement:
        last = job.ranks_per_node - 1
        placement = ", ".join(
            f"{node.name} ({node.zone}) {node.first_rank}-{node.first_rank + last}"
            for node in job.placement
        )
    saved = job.checkpoint
    checkpoint = NOTHING
    if saved:
        when = f", {age(time.time() - saved.time)} ago" if saved.time else ""
        checkpoint = f"step {saved.step} in {saved.path}{when}"
    metrics = ""
    if job.progress:
        words = [f"{k}={v:.4g}" for k, v in job.progress.metrics.items() if k != EXPOSED]
        if job.progress.exposed_percent is not None:
            words.append(f"exposed={job.progress.exposed_percent}%")
        metrics = "  " + " ".join(words) if words else ""
    facts = {
        "Wants": f"{job.nodes} nodes × {job.ranks_per_node} ranks of node class "
        f"{job.node_class or 'any'}, zone {job.zone or 'any'}, "
        f"priority {job.priority}, queue {job.queue}",
        "Has": placement,
        "Cross-zone pair": " - ".join(job.cross_zone_pair) or NOTHING,
        "History": f"{job.history_id or NOTHING}, attempt {job.attempt}, {job.restarts} restarts",
        "Progress": progress_text(job) + metrics,
        "Checkpoint": checkpoint,
        "Logs": job.log_folder,
    }
    if job.eta:
        facts["ETA"] = job.eta
    return [f"  {name:<11}{value}" for name, value in facts.items()]


def _attempts(job: JobView) -> list[str]:
    if not job.attempts:
        return []
    layouts = {True: "same", False: "other", None: NOTHING}
    rows = []
    for attempt in job.attempts[-ATTEMPTS_SHOWN:]:
        origin = "beginning" if attempt.restored_step is None else f"step {attempt.restored_step}"
        lost_steps = NOTHING if attempt.lost_steps is None else str(attempt.lost_steps)
        length = (attempt.ended_at or time.time()) - attempt.started_at
        rows.append(
            (
                str(attempt.attempt), clock(attempt.started_at), age(length), origin,
                layouts[attempt.same_zone_layout], " ".join(node.name for node in attempt.nodes),
                attempt.outcome or "runs", lost_steps,
            )
        )  # fmt: skip
    header = ("ATTEMPT", "STARTED", "RAN", "FROM", "SPLIT", "NODES", "OUTCOME", "LOST")
    text = table(header, rows)
    return ["", *(f"  {line}" for line in text.splitlines())]


def _wrapped(words: list[str], columns: int = 100) -> list[str]:
    lines, line = [], " "
    for word in words:
        if len(line) + len(word) > columns:
            lines.append(line)
            line = " "
        line += f" {word}"
    return [*lines, line]


def why_screen(why: WhyView) -> str:
    """`flyer why`: the verdict, every reason with numbers, and the remedies."""
    lines = [f"{why.job} {why.summary}"]
    if why.position is not None:
        lines.append(f"  place in the queue: {why.position}")
    if why.preempted_by:
        when = f" at {clock(why.preempted_at)}" if why.preempted_at else ""
        lines.append(f"  preempted by {why.preempted_by}{when}")
    for number, reason in enumerate(why.reasons, 1):
        lines.append(f"  {number}. {reason.reason}: {reason.message}")
        details = []
        if reason.owner:
            details.append(f"owner {reason.owner}")
        if reason.since:
            details.append(f"since {clock(reason.since)} ({age(time.time() - reason.since)})")
        if reason.until:
            details.append(f"until {clock(reason.until)}")
        if details:
            lines.append(f"     {', '.join(details)}")
    if why.more:
        lines.append(f"  and {why.more} more reasons")
    if why.eta:
        lines.append(f"  starts about {clock(why.eta)}")
    if why.unblock:
        lines += ["  what would unblock it, cheapest first:"]
        lines += [f"    {command}" for command in why.unblock]
    if why.decided_at:
        lines.append(f"  decided {age(time.time() - why.decided_at)} ago")
    return "\n".join(lines)
