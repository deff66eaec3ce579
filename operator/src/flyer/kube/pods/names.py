"""Names shared by pods, the operator and users: labels, resources, containers, paths."""

from __future__ import annotations

import hashlib
import re
from typing import Final

__all__ = [
    "ANNOTATION_DEFAULT_CONTAINER",
    "DAEMON_CONTAINER",
    "DAEMON_SOCKET_PATH",
    "DEDICATED_KEY",
    "GATE",
    "LABEL_ATTEMPT",
    "LABEL_HISTORY",
    "LABEL_INJECT",
    "LABEL_JOB",
    "LABEL_JOBSET_GLOBAL_INDEX",
    "LABEL_JOBSET_INDEX",
    "LABEL_JOBSET_REPLICAS",
    "LABEL_JOBSET_RESTARTS",
    "LABEL_NODE_RANK",
    "RESOURCE_GPU",
    "RESOURCE_RDMA_HFREDUCE",
    "RESOURCE_RDMA_NCCL",
    "RUN_FOLDER",
    "SCHEDULER_NAME",
    "SIDECAR_CONTAINER",
    "SOCKET_PATH",
    "TOOLS_CONTAINER",
    "TOOLS_FOLDER",
    "TOPOLOGY_PATH",
    "host_name",
    "label_value",
    "pod_name",
    "pod_place",
]

LABEL_JOB: Final = "fireflyer.dev/job"
LABEL_HISTORY: Final = "fireflyer.dev/history"
LABEL_ATTEMPT: Final = "fireflyer.dev/attempt"
LABEL_NODE_RANK: Final = "fireflyer.dev/node-rank"
# JobSet's labels for rank and attempt, for dashboards and scripts that use them. Not `jobset-name`:
# pods with it pass JobSet's webhook, and are rejected while it is unavailable.
LABEL_JOBSET_INDEX: Final = "jobset.sigs.k8s.io/job-index"
LABEL_JOBSET_GLOBAL_INDEX: Final = "jobset.sigs.k8s.io/job-global-index"
LABEL_JOBSET_REPLICAS: Final = "jobset.sigs.k8s.io/global-replicas"
LABEL_JOBSET_RESTARTS: Final = "jobset.sigs.k8s.io/restart-attempt"
LABEL_INJECT: Final = "fireflyer.dev/inject"
ANNOTATION_DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"

DEDICATED_KEY: Final = "fireflyer.dev/dedicated"
GATE: Final = "fireflyer.dev/gang"
SCHEDULER_NAME: Final = "flyer"

RESOURCE_GPU: Final = "fireflyer.dev/gpu"
RESOURCE_RDMA_HFREDUCE: Final = "fireflyer.dev/rdma-hfreduce"
RESOURCE_RDMA_NCCL: Final = "fireflyer.dev/rdma-nccl"

TOOLS_CONTAINER: Final = "flyer-tools"
SIDECAR_CONTAINER: Final = "flyer-sidecar"
DAEMON_CONTAINER: Final = "flyer-hfreduced"

TOOLS_FOLDER: Final = "/flyer"
RUN_FOLDER: Final = "/run/flyer"
TOPOLOGY_PATH: Final = f"{RUN_FOLDER}/topology.json"
SOCKET_PATH: Final = f"{RUN_FOLDER}/job.sock"
DAEMON_SOCKET_PATH: Final = f"{RUN_FOLDER}/hfreduced.sock"

LABEL_CHARACTERS_MAX: Final = 63
_PLACE: Final = re.compile(r"([1-9][0-9]{0,9})-(0|[1-9][0-9]{0,9})")


def pod_name(job: str, attempt: int, node_rank: int) -> str:
    """`{job}-{attempt}-{nodeRank}`; `job` is the object's name, without its namespace."""
    return f"{job}-{attempt}-{node_rank}"


def pod_place(job: str, name: str) -> tuple[int, int] | None:
    """Attempt and node rank of the pod with this name; None: no pod of this job has it."""
    match = _PLACE.fullmatch(name.removeprefix(f"{job}-"))
    if match is None or not name.startswith(f"{job}-"):
        return None
    return int(match[1]), int(match[2])


def host_name(job: str, attempt: int, node_rank: int) -> str:
    """The pod's name, shortened with a digest if it exceeds a DNS label."""
    name = pod_name(job, attempt, node_rank)
    if len(name) <= LABEL_CHARACTERS_MAX:
        return name
    digest = hashlib.sha256(job.encode()).hexdigest()[:8]
    tail = f"-{digest}-{attempt}-{node_rank}"
    return job[: LABEL_CHARACTERS_MAX - len(tail)].rstrip("-") + tail


def label_value(text: str) -> str:
    """The text as a valid label value."""
    allowed = "".join(
        character if character.isascii() and (character.isalnum() or character in "-_.") else "."
        for character in text
    )
    return allowed[:LABEL_CHARACTERS_MAX].strip("-_.")
