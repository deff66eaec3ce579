"""`flyer run` on this machine: start a driver or submit to the running one, follow the job."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flyer.cli.output import Output, print_result, say
from flyer.cli.screens import failure_lines
from flyer.client.connection import Client
from flyer.client.hosting import (
    LocalCluster,
    Manifest,
    StatePaths,
    driver_alive,
    find_cluster,
    host_driver,
    read_manifest,
)
from flyer.errors import ExitStatus, FlyerError

if TYPE_CHECKING:
    from pathlib import Path

    from flyer.views import JobView

__all__ = ["RunOptions", "finish", "run_command"]

DRIVE_TRIES_MAX = 3
# Time for a driver to kill all of its pods.
END_SECONDS_MAX = 15.0
END_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of the command line."""

    manifest: Path | None
    cluster: Path | None
    state: Path | None
    preload: list[str]
    logs: str
    keep: bool
    detach: bool
    output: Output


@dataclass(slots=True)
class _Outcome:
    """The result of the thread that follows the jobs."""

    jobs: list[str] = field(default_factory=list)
    last: dict[str, JobView] = field(default_factory=dict)


def run_command(options: RunOptions) -> int:
    """The whole verb; returns the exit status."""
    if options.logs not in ("all", "none") and not options.logs.isdecimal():
        raise FlyerError.usage(
            f"invalid value `{options.logs}` for --logs: expected a rank, all or none"
        )
    manifest = read_manifest(options.manifest) if options.manifest else None
    paths, cluster = find_cluster(options.cluster, options.state)
    for _ in range(DRIVE_TRIES_MAX):
        if driver_alive(paths):
            try:
                jobs = _submit(paths, cluster, manifest)
            except FlyerError as error:
                # The driver ended before the call: this process is the next driver.
                if error.code != "Unreachable" or not _ends(paths):
                    raise
                continue
            return _follow(options, paths, jobs)
        try:
            return _drive(options, paths, cluster, manifest)
        except FlyerError as error:
            if error.code != "AlreadyDriven" or manifest is None:
                raise
    raise FlyerError.unreachable(
        f"drivers of `{paths.root}` start and stop repeatedly", "find what starts them, and retry"
    )


# -- as a client -------------------------------------------------------------------------------


def _ends(paths: StatePaths) -> bool:
    """Whether the driver exits within `END_SECONDS_MAX`."""
    deadline = time.monotonic() + END_SECONDS_MAX
    while driver_alive(paths):
        if time.monotonic() > deadline:
            return False
        time.sleep(END_POLL_SECONDS)
    return True


def _submit(
    paths: StatePaths, cluster: LocalCluster | None, manifest: Manifest | None
) -> list[JobView]:
    client = Client(paths)
    driver = client.ping()
    if cluster is not None and cluster.name != driver["cluster"]:
        raise FlyerError.usage(
            f"`{paths.root}` holds cluster `{driver['cluster']}`, not `{cluster.name}`",
            "remove --cluster to submit to it, or use another --state",
        )
    if manifest is None:
        raise FlyerError.usage(
            f"process {driver['pid']} already drives `{paths.root}`",
            "submit a job with `flyer run JOB.yaml`, watch jobs with `flyer ps -w`",
        )
    jobs = client.run_all(manifest.path)
    for job in jobs:
        say(f"{job.key} is {job.state}{f': {job.message}' if job.message else ''}")
    return jobs


def _follow(options: RunOptions, paths: StatePaths, jobs: list[JobView]) -> int:
    from flyer.cli.follow import Follower

    if options.detach:
        if options.output in (Output.JSON, Output.YAML):
            print_result(jobs, options.output)
        else:
            name = jobs[0].name
            say(f"next: flyer why {name}; flyer logs -f {name}; flyer show {name}; flyer ps -w")
        return ExitStatus.OK
    follower = Follower(Client(paths), [job.key for job in jobs], options.logs, options.output)
    names = " ".join(job.name for job in jobs)
    try:
        follower.follow(until_suspended=True)
    except KeyboardInterrupt:
        follower.close()
        say(f"detached from {names}; follow with `flyer logs -f {names}`, end with `flyer stop`")
        return 130
    return finish(follower.last, options.output, driven=follower.ended_by_driver)


# -- as the driver -----------------------------------------------------------------------------


def _drive(
    options: RunOptions, paths: StatePaths, cluster: LocalCluster | None, manifest: Manifest | None
) -> int:
    logging.basicConfig(level=logging.WARNING, format="flyer: %(message)s")
    if options.detach:
        raise FlyerError.unreachable(
            f"no driver runs in `{paths.root}`, and --detach does not start one",
            "remove --detach, or start a driver with `flyer run --keep --cluster FILE`",
        )
    outcome = _Outcome()
    thread = threading.Thread(
        target=_follow_own, args=(paths, options, outcome), name="flyer-follow", daemon=True
    )

    def opened(jobs: list[str]) -> None:
        outcome.jobs = jobs
        if not jobs and not options.keep:
            say(f"no unfinished job in `{paths.root}`")

    try:
        signal_number = host_driver(
            paths,
            cluster,
            manifest,
            preload=options.preload,
            keep=options.keep,
            opened=opened,
            ready=thread.start,
        )
    finally:
        if thread.ident is not None:
            thread.join(timeout=5)
    if signal_number:
        return _interrupted(outcome, signal_number)
    return finish(outcome.last, options.output, driven=False)


def _follow_own(paths: StatePaths, options: RunOptions, outcome: _Outcome) -> None:
    """Follow the jobs in a thread, as a client of the driver in this process."""
    from flyer.cli.follow import Follower

    follower = Follower(Client(paths), outcome.jobs, options.logs, options.output)
    try:
        follower.follow(until_suspended=False, until_driver_ends=True)
    except FlyerError as error:
        say(f"flyer: {error.message}")
    finally:
        follower.close()
        outcome.last = follower.last


def _interrupted(outcome: _Outcome, signal_number: int) -> int:
    unfinished = [job for job in outcome.last.values() if not job.finished]
    for job in unfinished:
        saved = job.checkpoint
        origin = f"step {saved.step}" if saved else "the beginning"
        say(f"{job.key} was interrupted; `flyer run` continues it from {origin}")
    return 128 + signal_number


# -- the end -----------------------------------------------------------------------------------


def finish(last: dict[str, JobView], output: Output, *, driven: bool) -> int:
    """Report how the jobs ended; the output of a failing rank comes last, unchanged."""
    if output in (Output.JSON, Output.YAML):
        print_result(list(last.values()), output)
    for job in last.values():
        say(_ending(job))
    statuses = [_exit_status(job) for job in last.values()]
    if driven and any(not job.finished for job in last.values()):
        say("the driver ended; `flyer run` restarts it and resumes the jobs")
    for job in last.values():
        if job.failure is not None and job.state == "Failed":
            say("")
            say("\n".join(failure_lines(job)))
    worst = [status for status in statuses if status != 0]
    return worst[0] if len(set(worst)) == 1 else (ExitStatus.JOB_FAILED if worst else 0)


def _exit_status(job: JobView) -> int:
    if job.finished:
        return job.exit_status or 0
    return ExitStatus.SUSPENDED if job.state == "Suspended" else ExitStatus.UNFINISHED


def _ending(job: JobView) -> str:
    words = [f"{job.key} {job.state}"]
    if job.reason and job.state != "Succeeded":
        words[0] += f" ({job.reason})"
    if job.progress:
        words.append(f"step {job.progress.step}")
    count = len(job.attempts)
    words.append(f"{count} attempt{'' if count == 1 else 's'}")
    if job.finished_at:
        words.append(f"{job.finished_at - job.created_at:.1f} s")
    text = ", ".join(words)
    return f"{text}: {job.message}" if job.message and job.state != "Succeeded" else text
