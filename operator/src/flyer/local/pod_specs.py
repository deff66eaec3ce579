"""Pod specifications: the processes of each node from the template of a FlyerJob.

It validates a manifest before it is accepted: an invalid one is refused with the name of the field.
Images are not pulled: a pod is a process.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flyer.job.pod import PodSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flyer.api import Container, FlyerJob
    from flyer.engine import Start

__all__ = [
    "FOLDER_ANNOTATION",
    "LOCAL_ADDRESS",
    "pod_specs",
    "refusals",
    "with_folder",
]

# The manifest's folder: relative paths of its template start there.
FOLDER_ANNOTATION: Final = "local.fireflyer.dev/folder"
LOCAL_ADDRESS: Final = "127.0.0.1"


def refusals(job: FlyerJob) -> Iterator[str]:
    """The reasons why the job's pods cannot start here, one line each, the field first."""
    container = job.spec.template.trainer
    index = job.spec.template.spec.containers.index(container)
    place = f"spec.template.spec.containers[{index}]"
    if not container.command:
        yield (
            f"{place}.command: is missing: a local pod is a process, so set it, "
            "such as [python, train.py]"
        )
    folder = working_folder(job)
    if not folder.is_dir():
        yield (
            f'{place}.workingDir: "{folder}" is not a folder on this machine: '
            "correct it, or leave it out to run in the manifest's folder"
        )
    elif container.command and program(container, folder) is None:
        yield (
            f'{place}.command[0]: "{container.command[0]}" is not a program on this machine: '
            "give its path, or install it (it is not on PATH)"
        )
    for position, variable in enumerate(container.env):
        if variable.value is None:
            yield (
                f"{place}.env[{position}]: {variable.name} has no value: "
                "valueFrom works only on Kubernetes, set `value`"
            )


def with_folder(job: FlyerJob, folder: Path) -> FlyerJob:
    """The job with the folder of its manifest as an annotation."""
    annotations = {**job.metadata.annotations, FOLDER_ANNOTATION: str(folder)}
    return job.replace(metadata=job.metadata.replace(annotations=annotations))


def working_folder(job: FlyerJob) -> Path:
    """The template's workingDir, or the manifest's folder."""
    base = Path(job.metadata.annotations.get(FOLDER_ANNOTATION) or Path.cwd())
    return base / (job.spec.template.trainer.working_dir or "")


def program(container: Container, folder: Path) -> str | None:
    """The program that the command names, or None."""
    name = container.command[0]
    if name in ("python", "python3"):
        return sys.executable  # the interpreter that has flyer, hfreduce and torch
    path = next((item.value for item in container.env if item.name == "PATH"), None)
    if "/" in name:
        name = str(folder / name)
    return shutil.which(name, path=path or os.environ.get("PATH"))


def pod_specs(
    job: FlyerJob,
    start: Start,
    *,
    topology: Path,
    key: Path,
    socket_path: Path,
    logs: Path,
    run: Path,
    master_port: int,
) -> list[PodSpec]:
    """One PodSpec per node, in rank order. The job has passed `refusals`."""
    container = job.spec.template.trainer
    folder = working_folder(job)
    path = program(container, folder)
    if path is None:
        raise FileNotFoundError(f"`{container.command[0]}` is no longer a program on this machine")
    return [
        PodSpec(
            job=job.metadata.name,
            namespace=job.metadata.namespace,
            chain=job.status.history.id if job.status else "",
            attempt=start.attempt,
            node=node.name,
            zone=node.zone,
            node_rank=index,
            nodes=len(start.assignment.nodes),
            ranks_per_node=job.spec.ranks_per_node,
            master_addr=LOCAL_ADDRESS,
            master_port=master_port,
            command=[path, *container.command[1:]],
            args=list(container.args),
            env={item.name: item.value or "" for item in container.env},
            working_dir=str(folder),
            topology_path=str(topology),
            key_path=str(key),
            socket_path=str(socket_path),
            log_dir=str(logs),
            run_dir=str(run / node.name),
        )
        for index, node in enumerate(start.assignment.nodes)
    ]
