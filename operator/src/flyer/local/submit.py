"""Submission of a manifest: every job is validated before the first is accepted.

A job is accepted when its file is on disk. If an unfinished job of the same name has the same spec,
it is used. An ended one is replaced, and its logs are kept under its history id.
"""

from __future__ import annotations

import getpass
import time
import uuid
from typing import TYPE_CHECKING, Any

from flyer import engine
from flyer.api import (
    USER_ANNOTATION,
    FlyerJob,
    FlyerJobSpec,
    ManifestError,
    Phase,
    load_manifest,
    quantize,
)
from flyer.engine import JobSubmitted
from flyer.errors import FlyerError
from flyer.job_events import SUBMITTED
from flyer.local.pod_specs import FOLDER_ANNOTATION, refusals, with_folder

if TYPE_CHECKING:
    from pathlib import Path

    from flyer.local.driver import Driver

__all__ = ["check", "read_manifest", "submit"]


def read_manifest(text: str, source: str) -> list[FlyerJob]:
    """The jobs of a manifest, or the user's error."""
    try:
        return load_manifest(text, name=source)
    except ManifestError as error:
        raise FlyerError.usage(
            str(error), "docs/reference/flyerjob.md has every field; nothing was submitted"
        ) from error


def check(driver: Driver, text: str, source: str, folder: Path) -> tuple[list[str], list[FlyerJob]]:
    """The keys of a manifest's jobs, and the new jobs. Raises FlyerError; changes nothing."""
    jobs = [_prepared(job, folder) for job in read_manifest(text, source)]
    new = [job for job in jobs if not _joins(driver, job)]
    for job in new:
        _check(driver, job, source)
    return [job.key for job in jobs], new


def submit(driver: Driver, text: str, source: str, folder: Path) -> list[str]:
    """Accept all jobs of a manifest, or none. Returns their keys."""
    keys, new = check(driver, text, source, folder)
    for job in new:
        _accept(driver, job)
    return keys


def _prepared(job: FlyerJob, folder: Path) -> FlyerJob:
    """The job as it is stored: with uid, time and folder, without a status."""
    annotations = {
        USER_ANNOTATION: _user(),
        **job.metadata.annotations,
    }
    metadata = job.metadata.replace(
        uid=str(uuid.uuid4()),
        generation=1,
        creation_timestamp=quantize(time.time()),
        annotations=annotations,
    )
    return with_folder(job.replace(metadata=metadata, status=None), folder)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def _joins(driver: Driver, job: FlyerJob) -> bool:
    """Whether this job already exists. Raises FlyerError for a different job of its name."""
    previous = driver.jobs.get(job.key)
    if previous is None or (previous.status and previous.status.phase.ended):
        return False
    differing = [
        _alias(name)
        for name in FlyerJobSpec.model_fields
        if name != "suspend" and getattr(previous.spec, name) != getattr(job.spec, name)
    ]
    if (
        previous.metadata.annotations.get(FOLDER_ANNOTATION)
        != (job.metadata.annotations[FOLDER_ANNOTATION])
    ):
        differing.append("the manifest's folder")
    if differing:
        phase = previous.status.phase if previous.status else Phase.QUEUED
        name = job.metadata.name
        raise FlyerError.usage(
            f"a job `{job.key}` exists, is {phase}, and differs in {', '.join(differing)}",
            f"stop it with `flyer stop {name}`, or change metadata.name of the new job",
        )
    return True


def _alias(name: str) -> str:
    return "spec." + (FlyerJobSpec.model_fields[name].alias or name)


def _check(driver: Driver, job: FlyerJob, source: str) -> None:
    problems = list(refusals(job))
    if job.others:
        problems.append(
            f'spec.managedBy: "{job.others}" is a controller of a cluster: leave it out to run the '
            "job here"
        )
    if problems:
        raise FlyerError.usage(
            "\n".join(f"{source}: {job.metadata.name}: {problem}" for problem in problems),
            "nothing was submitted",
        )
    now = max(time.time(), driver.state.now)
    supposed, _ = engine.step(driver.state, [JobSubmitted(job)], now)
    explanation = engine.explain(supposed, job.key, now)
    if explanation.verdict == "never":
        raise FlyerError.never(
            f"`{job.key}` {explanation.summary}",
            "`flyer nodes` lists this cluster; change the manifest or the cluster file",
        )


def _accept(driver: Driver, job: FlyerJob) -> None:
    ended = driver.jobs.get(job.key)
    if ended is not None:
        _archive_logs(driver, ended)
    driver.progress.pop(job.key, None)
    driver.store.commit(job.key, job.to_object())
    driver.jobs[job.key] = job
    message = f"{job.spec.nodes} nodes × {job.spec.ranks_per_node} ranks, {job.spec.priority}"
    fields: dict[str, Any] = {"historyId": job.metadata.uid}
    driver.events.record(time.time(), SUBMITTED, message, job=job.key, fields=fields)
    driver.advance([JobSubmitted(job)])


def _archive_logs(driver: Driver, ended: FlyerJob) -> None:
    """Rename `logs/<job>` to `logs/<job>.<history id>`, so that logs never mix."""
    folder = driver.store.paths.job_logs(ended.key)
    if folder.is_dir():
        history_id = (ended.status.history.id if ended.status else "") or uuid.uuid4().hex
        folder.rename(folder.with_name(f"{folder.name}.{history_id}"))
