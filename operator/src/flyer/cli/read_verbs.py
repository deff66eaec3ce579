"""The verbs that read. Without a driver they read the state directory."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from flyer.cli import screens
from flyer.cli.output import Output, paint, print_result, say
from flyer.errors import ExitStatus, FlyerError
from flyer.views import to_json

if TYPE_CHECKING:
    from flyer.cli.target import FlyerClient, Target
    from flyer.client.logs import LogLine
    from flyer.views import JobView

__all__ = ["logs", "nodes", "ps", "queues", "quotas", "show", "top", "why"]

RANK_COLOURS = ("36", "33", "35", "32", "34", "31")


def ps(target: Target, output: Output, *, watch: bool) -> None:
    """All jobs."""
    client = target.reader()
    if not watch:
        jobs = client.jobs()
        if output in (Output.JSON, Output.YAML):
            print_result(jobs, output)
        elif jobs:
            print(screens.jobs_table(jobs, wide=output is Output.WIDE))
        else:
            say("no jobs; `flyer run JOB.yaml` submits one")
        return
    if not client.driven:
        raise FlyerError.unreachable(
            "cannot watch: no driver is running",
            "`flyer run` starts it; `flyer ps` lists the jobs",
        )
    if output is Output.JSON:
        _watch_json(client)
    elif sys.stdout.isatty():
        _watch_live(client, wide=output is Output.WIDE)
    else:
        _watch_lines(client, wide=output is Output.WIDE)


def _watch_json(client: FlyerClient) -> None:
    for item in client.watch():
        if item.job is not None:
            print(json.dumps(to_json(item.job)), flush=True)


def _watch_lines(client: FlyerClient, *, wide: bool) -> None:
    """As `kubectl get -w`: one line per change."""
    last_rows: dict[str, list[str]] = {}
    for item in client.watch():
        if item.job is None:
            continue
        row = screens.job_row(item.job, wide=wide)
        last_row = last_rows.get(item.job.key)
        # a change of the age alone is not shown
        if last_row is None or last_row[:8] != row[:8] or last_row[9:] != row[9:]:
            text = screens.jobs_table([item.job], wide=wide).splitlines()
            print("\n".join(text if not last_rows else text[1:]), flush=True)
            last_rows[item.job.key] = row


def _watch_live(client: FlyerClient, *, wide: bool) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    jobs: dict[str, JobView] = {}
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        for item in client.watch():
            if item.job is not None:
                jobs[item.job.key] = item.job
                text = screens.jobs_table(jobs.values(), wide=wide)
                live.update(Text.from_ansi(text, no_wrap=True, overflow="ellipsis"), refresh=True)


def show(key: str, target: Target, output: Output) -> None:
    """One job."""
    client = target.reader()
    job = client.job(key)
    events = list(client.events(job=key))
    if output in (Output.JSON, Output.YAML):
        document = {"job": job, "object": client.document(key), "events": events}
        print_result({name: to_json(value) for name, value in document.items()}, output)
    else:
        print(screens.job_screen(job, events))


def why(key: str, target: Target, output: Output) -> int:
    """Explain why a job waits; returns the exit status."""
    client = target.reader()
    if not client.driven:
        job = client.job(key)
        raise FlyerError.unreachable(
            f"`{job.key}` is {job.state} and no driver runs, so nothing is decided",
            "`flyer run` starts a driver, which resumes every unfinished job",
        )
    answer = client.why(key)
    if output in (Output.JSON, Output.YAML):
        print_result(answer, output)
    else:
        print(screens.why_screen(answer))
    return ExitStatus.NEVER if answer.verdict == "never" else ExitStatus.OK


def logs(
    key: str,
    target: Target,
    output: Output,
    *,
    rank: int | None,
    attempt: int | None,
    follow: bool,
    failed: bool,
    tail: int | None = None,
) -> None:
    """The ranks' output."""
    client = target.reader()
    if failed:
        _print_failure(client.job(key), output)
        return
    if follow and not client.driven:
        say("no driver runs: this is all that was written so far")
    if follow and tail is not None:
        raise FlyerError.usage("--tail and --follow cannot be combined", "remove one of them")
    several = rank is None and client.job(key).nodes * client.job(key).ranks_per_node > 1
    last_attempt = None
    lines = client.logs(key, rank=rank, attempt=attempt, follow=follow)
    for line in lines if tail is None else deque(lines, maxlen=tail):
        if output is Output.JSON:
            print(json.dumps(to_json(line)), flush=follow)
            continue
        if line.attempt != last_attempt and (last_attempt or line.attempt > 1):
            say(paint(f"-- attempt {line.attempt}", "2", sys.stderr))
        last_attempt = line.attempt
        print(f"{_prefix(line) if several else ''}{line.text}", flush=follow)


def _prefix(line: LogLine) -> str:
    colour = RANK_COLOURS[line.rank % len(RANK_COLOURS)]
    return paint(f"[{line.rank}] ", colour, sys.stdout)


def _print_failure(job: JobView, output: Output) -> None:
    if job.failure is None:
        raise FlyerError.not_found(
            f"no rank of `{job.key}` has failed: it is {job.state}",
            f"`flyer logs {job.name}` prints all that its ranks wrote",
        )
    if output in (Output.JSON, Output.YAML):
        print_result(job.failure, output)
    else:
        print("\n".join(screens.failure_lines(job)))


def nodes(target: Target, output: Output) -> None:
    """Every node."""
    views = target.reader(must_be_driven=True).nodes()
    if output in (Output.JSON, Output.YAML):
        print_result(views, output)
    else:
        print(screens.nodes_table(views, wide=output is Output.WIDE))


def queues(target: Target, output: Output) -> None:
    """Every queue, and every quota with its usage."""
    client = target.reader(must_be_driven=True)
    views = client.queues()
    if output in (Output.JSON, Output.YAML):
        print_result(views, output)
        return
    if views:
        print(screens.queues_table(views))
    else:
        say(f"no unfinished jobs at {time.strftime('%H:%M:%S')}")
    try:
        limits = client.quotas()
    except FlyerError as error:
        if error.code != "Forbidden":
            raise
        say(f"quotas are not shown: {error.message}")
        return
    if limits:
        print(f"\n{screens.quotas_table(limits)}")


def quotas(target: Target, output: Output) -> None:
    """Every quota with its usage."""
    views = target.reader(must_be_driven=True).quotas()
    if output in (Output.JSON, Output.YAML):
        print_result(views, output)
    elif views:
        print(screens.quotas_table(views))
    else:
        say("no quotas")


def top(target: Target, output: Output, *, watch: bool, interval_seconds: float) -> None:
    """Running jobs, with the rate since the previous sample."""
    client = target.reader(must_be_driven=True)
    before: dict[str, JobView] = {}
    while True:
        running = [job for job in client.jobs() if job.state in ("Running", "Suspending")]
        if before or not watch:
            if not before and running:
                before = {job.key: job for job in running}
                time.sleep(interval_seconds)
                running = [job for job in client.jobs() if job.key in before]
            rows = [screens.top_row(job, before.get(job.key)) for job in running]
            if output in (Output.JSON, Output.YAML):
                print_result(rows, output)
            elif rows:
                if watch and sys.stdout.isatty():
                    print("\x1b[H\x1b[2J", end="")  # home, and an empty screen
                print(screens.top_table(rows, wide=output is Output.WIDE), flush=True)
            else:
                say("no running jobs; `flyer ps` lists waiting jobs")
            if not watch:
                return
        before = {job.key: job for job in running}
        time.sleep(interval_seconds)
