"""Pod problems: why a kubelet does not start a pod, and whether the job or the node is at fault."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.pods.names import DAEMON_CONTAINER, SIDECAR_CONTAINER, TOOLS_CONTAINER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["PodProblem", "is_fault_of_job", "pod_problem"]

_OURS: Final = frozenset({TOOLS_CONTAINER, SIDECAR_CONTAINER, DAEMON_CONTAINER})
# Faults of the job, the same on every node.
_OF_THE_JOB: Final = frozenset(
    {"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"}
)
# Faults of the job or the node, depending on the message.
_AMBIGUOUS: Final = frozenset({
    "ErrImagePull", "ImagePullBackOff", "CreateContainerError", "RunContainerError", "StartError",
    "ContainerCannotRun",
})  # fmt: skip
_JOB_FAULT: Final = re.compile(
    r"not found|manifest unknown|does not exist|unauthorized|denied|forbidden|invalid reference"
    r"|no match for platform|no such file|executable file|permission denied|no such host"
    r"|exec format error|is a directory|not a directory",
    re.IGNORECASE,
)
# Of a restarted init container: a fault of the job, except for Fire-Flyer's own containers.
_OF_A_CONTAINER: Final = frozenset({"CrashLoopBackOff"})
_OF_THE_NODE: Final = frozenset({"CreatePodSandboxError"})
_WORDS_MAX: Final = 400


@dataclass(frozen=True, slots=True)
class PodProblem:
    """The kubelet's reason and message; `job_fault`: it would fail on any node."""

    reason: str
    message: str
    job_fault: bool

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}" if self.message else self.reason


def is_fault_of_job(message: str) -> bool:
    """Whether a runtime's message about a container describes a fault that any node would have."""
    return bool(_JOB_FAULT.search(message))


def pod_problem(pod: Mapping[str, Any]) -> PodProblem | None:
    """The problem that prevents this pod from running; None: none, or a temporary one."""
    status = pod.get("status") or {}
    phase = status.get("phase")
    ran = status.get("containerStatuses") or status.get("startTime")
    if phase == "Failed" and not status.get("containerStatuses") and status.get("reason"):
        # Rejected by the admission of this node's kubelet.
        return PodProblem(str(status["reason"]), _cut(status.get("message")), job_fault=False)
    if phase != "Pending":
        return None
    for name, waiting in _waiting(status):
        reason, message = str(waiting.get("reason") or ""), _cut(waiting.get("message"))
        if reason in _OF_THE_JOB | _AMBIGUOUS | _OF_A_CONTAINER and name not in _OURS:
            fault = reason not in _AMBIGUOUS or is_fault_of_job(message)
            return PodProblem(reason, f"container {name}: {message}", job_fault=fault)
        if reason in _OF_THE_JOB | _AMBIGUOUS | _OF_A_CONTAINER | _OF_THE_NODE:
            return PodProblem(reason, f"container {name}: {message}", job_fault=False)
    if not ran:
        for condition in status.get("conditions") or ():
            unschedulable = (
                condition.get("reason") == "Unschedulable" and condition.get("status") == "False"
            )
            if condition.get("type") == "PodScheduled" and unschedulable:
                return PodProblem("Unschedulable", _cut(condition.get("message")), job_fault=False)
    return None


def _waiting(status: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or ():
            waiting = (container.get("state") or {}).get("waiting")
            if waiting:
                yield str(container.get("name")), waiting


def _cut(message: Any) -> str:
    return " ".join(str(message or "").split())[:_WORDS_MAX]
