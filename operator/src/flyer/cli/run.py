"""`flyer run` on this machine: start a driver or submit to the running one, follow the job."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flyer.cli.output import Output, print_result, say
from flyer.cli.screens import failure_lines
from flyer.client.connection import Client
from flyer.errors import ExitStatus, FlyerError
from flyer.local.cluster import LocalCluster, load_cluster
from flyer.local.state_directory import STATES_FOLDER, StatePaths, driver_alive, find_state

if TYPE_CHECKING:
    from flyer.local.driver import Driver
    from flyer.views import JobView

__all__ = ["RunOptions", "finish", "run_command"]

DRIVE_TRIES_MAX = 3
# Killing all pods takes a driver a moment.
END_SECONDS_MAX = 15.0
END_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line args."""

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
    text = _read(options.manifest) if options.manifest else None
    paths, cluster = _cluster(options)
    for _ in range(DRIVE_TRIES_MAX):
        if driver_alive(paths):
            try:
                jobs = _submit(options, paths, cluster, text)
            except FlyerError as error:
                # The driver ended before the call: this process is the next driver.
                if error.code != "Unreachable" or not _ends(paths):
                    raise
                continue
            return _follow(options, paths, jobs)
        try:
            return _drive(options, paths, cluster, text)
        except FlyerError as error:
            if error.code != "AlreadyDriven" or text is None:
                raise
    raise FlyerError.unreachable(
        f"drivers of `{paths.root}` start and stop repeatedly", "find what starts them, and retry"
    )


def _read(manifest: Path) -> str:
    """The text of the manifest, validated."""
    from flyer.local.submit import read_manifest

    try:
        text = manifest.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise FlyerError.usage(
            f"cannot read the manifest `{manifest}`: {reason}", "give the path of a FlyerJob"
        ) from error
    read_manifest(text, str(manifest))
    return text


def _cluster(options: RunOptions) -> tuple[StatePaths, LocalCluster | None]:
    """Where the state is, and the cluster if the command line names one."""
    cluster = load_cluster(options.cluster) if options.cluster else None
    if options.state is not None:
        return StatePaths(options.state.expanduser().absolute()), cluster
    if cluster is not None:
        return StatePaths((Path.cwd() / STATES_FOLDER / cluster.name).absolute()), cluster
    try:
        return find_state(), None
    except FlyerError as error:
        if error.exit_status != ExitStatus.UNREACHABLE:
            raise
        raise FlyerError.usage(
            "no cluster found",
            "create one: flyer run JOB.yaml --cluster examples/clusters/two-zones.yaml",
        ) from error


# -- as a client -------------------------------------------------------------------------------


def _ends(paths: StatePaths) -> bool:
    """Whether the driver is gone within a moment."""
    deadline = time.monotonic() + END_SECONDS_MAX
    while driver_alive(paths):
        if time.monotonic() > deadline:
            return False
        time.sleep(END_POLL_SECONDS)
    return True


def _submit(
    options: RunOptions, paths: StatePaths, cluster: LocalCluster | None, text: str | None
) -> list[JobView]:
    client = Client(paths)
    driver = client.ping()
    if cluster is not None and cluster.name != driver["cluster"]:
        raise FlyerError.usage(
            f"`{paths.root}` holds cluster `{driver['cluster']}`, not `{cluster.name}`",
            "remove --cluster to submit to it, or use another --state",
        )
    if text is None or options.manifest is None:
        raise FlyerError.usage(
            f"process {driver['pid']} already drives `{paths.root}`",
            "submit a job with `flyer run JOB.yaml`, watch jobs with `flyer ps -w`",
        )
    jobs = client.run_all(options.manifest)
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
    options: RunOptions, paths: StatePaths, cluster: LocalCluster | None, text: str | None
) -> int:
    from flyer.local import submit
    from flyer.local.session import drive

    logging.basicConfig(level=logging.WARNING, format="flyer: %(message)s")
    if options.detach:
        raise FlyerError.unreachable(
            f"no driver runs in `{paths.root}`, and --detach does not start one",
            "remove --detach, or start a driver with `flyer run --keep --cluster FILE`",
        )
    if cluster is None:
        if not paths.cluster.exists():
            raise FlyerError.usage(f"`{paths.root}` has no cluster", "give its file with --cluster")
        cluster = load_cluster(paths.cluster)
    outcome = _Outcome()
    thread = threading.Thread(
        target=_follow_own, args=(paths, options, outcome), name="flyer-follow", daemon=True
    )

    def check(driver: Driver) -> None:
        if text is not None and options.manifest is not None:
            submit.check(driver, text, str(options.manifest), options.manifest.absolute().parent)

    def opened(driver: Driver) -> None:
        outcome.jobs = _first_jobs(driver, options, text)
        if not outcome.jobs and not options.keep:
            say(f"no unfinished job in `{paths.root}`")

    try:
        signal_number = drive(
            cluster,
            paths.root,
            preload=[*options.preload, *_preloads(text, options.manifest, paths)],
            keep=options.keep,
            check=check,
            opened=opened,
            ready=thread.start,
        )
    finally:
        if thread.ident is not None:
            thread.join(timeout=5)
    if signal_number:
        return _interrupted(outcome, signal_number)
    return finish(outcome.last, options.output, driven=False)


def _preloads(text: str | None, manifest: Path | None, paths: StatePaths) -> list[str]:
    from flyer.local.pod_specs import with_folder
    from flyer.local.preloads import preloads_of
    from flyer.local.store import read_jobs
    from flyer.local.submit import read_manifest

    jobs = list(read_jobs(paths))
    if text is not None and manifest is not None:
        folder = manifest.absolute().parent
        jobs += [with_folder(job, folder) for job in read_manifest(text, str(manifest))]
    return sorted({name for job in jobs for name in preloads_of(job)})


def _first_jobs(driver: Driver, options: RunOptions, text: str | None) -> list[str]:
    from flyer.local.submit import submit

    if text is not None and options.manifest is not None:
        folder = options.manifest.absolute().parent
        return submit(driver, text, str(options.manifest), folder)
    return [key for key in sorted(driver.jobs) if not driver.view(key).finished]


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
