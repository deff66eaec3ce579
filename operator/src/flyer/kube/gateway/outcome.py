"""Outcome of a pod, from its sidecar's report or from the pod's status alone. Pure."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any, Final

from flyer.engine import Failed, Killed, Succeeded
from flyer.job.pod import EXIT_PEER_LOST, EXIT_SUSPENDED
from flyer.kube.pods.build import LAUNCH_COMMAND
from flyer.kube.pods.names import DAEMON_CONTAINER, SIDECAR_CONTAINER, TOOLS_CONTAINER
from flyer.kube.pods.pod_problems import is_fault_of_job

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flyer.engine import Outcome
    from flyer.job.failure import Failure

__all__ = ["LOST_PEERS", "explained", "is_out_of_memory", "outcome_of", "outcome_of_code"]

REASON_CHARACTERS_MAX: Final = 300
_OOM: Final = "OOMKilled"
_STATUSES: Final = (
    ("containers", "containerStatuses"), ("initContainers", "initContainerStatuses"),
)  # fmt: skip
LOST_PEERS: Final = Killed(0, "it lost its peers, and none reports a cause")
_HEADLINE = re.compile(r"^rank (\d+) on node \S+: (exit status \d+|killed by .+)$", re.MULTILINE)
# Exit statuses by which a container runtime reports that the program never ran.
_NOT_STARTED: Final = frozenset({"StartError", "ContainerCannotRun", "CreateContainerError"})


def outcome_of_code(code: int, failure: Failure | None) -> Outcome:
    """The outcome of a launcher's exit status; a negative number is a signal."""
    if code == 0:
        return Succeeded()
    if code == EXIT_SUSPENDED:
        return Killed(0, "it released its node")
    if code == EXIT_PEER_LOST:
        return LOST_PEERS
    if code < 0:
        rank = f"rank {failure.rank}: " if failure else ""
        return Killed(-code, f"{rank}killed by {_signal_name(-code)}")
    if failure is None:
        return Failed(code)
    return Failed(code, _last_line(failure), failure.rank, failure.traceback or "")


def explained(outcome: Outcome, failure: Failure) -> Outcome:
    """The lost peer that a rank reported, if no other reason is known."""
    if outcome != LOST_PEERS or not failure.traceback:
        return outcome
    return Killed(0, _cut(f"it lost its peers: {_last_line(failure)}"))


def outcome_of(pod: Mapping[str, Any] | None) -> Outcome:
    """The outcome of a pod in a terminal phase; None: the pod was deleted."""
    if pod is None:
        return Killed(0, "the pod is gone")
    status = pod.get("status") or {}
    terminated = _terminated(pod, status)
    if terminated is None:
        return _never_ran(status)
    code = int(terminated.get("exitCode") or 0)
    reason, message = str(terminated.get("reason") or ""), str(terminated.get("message") or "")
    if reason in _NOT_STARTED:
        why = _cut(f"the container did not start: {message or reason}")
        # Otherwise the runtime failed, and another attempt may succeed.
        return Failed(code or 128, why) if is_fault_of_job(message) else Killed(0, why)
    headline = _HEADLINE.search(message)
    if code > 128 and not (headline and headline.group(2).startswith("exit")):
        if out_of_memory := _out_of_memory(pod, status):
            return Killed(signal.SIGKILL, _cut(out_of_memory))
        number = int(terminated.get("signal") or 0) or code - 128
        return Killed(number, _cut(reason if reason != "Error" else _words(message, headline)))
    outcome = outcome_of_code(code, None)
    if isinstance(outcome, Failed):
        return Failed(code, _cut(_words(message, headline)))
    return outcome


def _terminated(pod: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, Any] | None:
    """How the launcher's container terminated, if it ever ran."""
    containers = (pod.get("spec") or {}).get("containers") or []
    names = [
        container["name"] for container in containers if container.get("command") == LAUNCH_COMMAND
    ]
    for container_status in status.get("containerStatuses") or []:
        if not names or container_status.get("name") in names:
            ended: dict[str, Any] | None = (container_status.get("state") or {}).get("terminated")
            if ended is not None:
                return ended
    return None


def is_out_of_memory(outcome: Outcome) -> bool:
    """Whether the pod exceeded a memory limit."""
    return isinstance(outcome, Killed) and outcome.reason.startswith(_OOM)


def _out_of_memory(pod: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """The container that the kernel killed for its memory; empty: none is known."""
    spec = pod.get("spec") or {}
    for kind, field in _STATUSES:
        limits = {
            container.get("name"): ((container.get("resources") or {}).get("limits") or {}).get(
                "memory"
            )
            for container in spec.get(kind) or ()
        }
        for item in status.get(field) or ():
            ends = [(item.get(when) or {}).get("terminated") for when in ("state", "lastState")]
            if any(end and end.get("reason") == _OOM for end in ends):
                name = item.get("name")
                limit = limits.get(name)
                if limit is None:
                    return f"{_OOM}: container {name} has no memory limit, and its node ran out"
                return f"{_OOM}: container {name} exceeded its memory limit {limit}"
    return ""


def _never_ran(status: Mapping[str, Any]) -> Outcome:
    """Evicted, refused by the kubelet, or an init container failed."""
    for init_container_status in status.get("initContainerStatuses") or []:
        ended = (init_container_status.get("state") or {}).get("terminated") or {}
        code = int(ended.get("exitCode") or 0)
        name = init_container_status.get("name")
        if code and name not in (TOOLS_CONTAINER, SIDECAR_CONTAINER, DAEMON_CONTAINER):
            text = f"init container {name}: exit status {code}"
            return Failed(code, _cut(text))
        if code and name in (TOOLS_CONTAINER, DAEMON_CONTAINER):
            return Killed(0, _cut(f"{name} failed: {ended.get('message') or code}"))
    reason, message = status.get("reason") or "", status.get("message") or ""
    words = ": ".join(word for word in (str(reason), str(message)) if word)
    return Killed(0, _cut(words or "the pod ended before it ran"))


def _words(message: str, headline: re.Match[str] | None) -> str:
    """The last line of the traceback in the termination message, with its rank."""
    lines = [line for line in message.strip().splitlines() if line.strip()]
    if headline is None:
        return lines[-1] if lines else ""
    words = lines[-1] if lines[-1] != headline.group(0) else headline.group(2)
    return f"rank {headline.group(1)}: {words}"


def _last_line(failure: Failure) -> str:
    lines = (failure.traceback or "").strip().splitlines()
    return _cut(f"rank {failure.rank}: {lines[-1] if lines else failure.outcome}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cut(text: str) -> str:
    return text[:REASON_CHARACTERS_MAX]
