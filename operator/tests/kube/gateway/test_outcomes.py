"""Outcomes from a pod's status without a sidecar's report, and root causes of several failures."""

from __future__ import annotations

from typing import Any

import pytest
from flyer.engine import Failed, Killed, Outcome, Succeeded
from flyer.job.failure import Failure
from flyer.kube.gateway import GatewaySettings, outcome_of
from flyer.kube.gateway.exits import Exits
from flyer.kube.gateway.outcome import LOST_PEERS, outcome_of_code

HEADLINE = "rank 3 on node a1: exit status {}\nTraceback (most recent call last):\nValueError: 7\n"


def pod(code: int, reason: str = "Error", message: str = "", **more: Any) -> dict[str, Any]:
    ended = {"exitCode": code, "reason": reason, "message": message, **more}
    return {
        "spec": {
            "containers": [
                {"name": "logger", "command": ["x"]},
                {"name": "trainer", "command": ["python3", "/flyer/bin/flyer-launch"]},
            ]
        },
        "status": {
            "containerStatuses": [
                {"name": "logger", "state": {"terminated": {"exitCode": 9}}},
                {"name": "trainer", "state": {"terminated": ended}},
            ]
        },
    }


@pytest.mark.parametrize(
    ("pod_status", "outcome"),
    [
        (pod(0, "Completed"), Succeeded()),
        (pod(104), Killed(0, "it released its node")),
        (pod(75), LOST_PEERS),
        (pod(1, message=HEADLINE.format(1)), Failed(1, "rank 3: ValueError: 7")),
        (pod(1, message="rank 0 on node a: exit status 1"), Failed(1, "rank 0: exit status 1")),
        (pod(1), Failed(1, "")),
        (
            pod(137, "OOMKilled"),
            Killed(9, "OOMKilled: container trainer has no memory limit, and its node ran out"),
        ),
        (
            pod(139, message="rank 3 on node a1: killed by SIGSEGV\nits output …"),
            Killed(11, "rank 3: its output …"),
        ),
        (pod(139, message=HEADLINE.format(139)), Failed(139, "rank 3: ValueError: 7")),
        (
            pod(128, "StartError", 'exec: "python3": executable file not found'),
            Failed(128, 'the container did not start: exec: "python3": executable file not found'),
        ),
        (
            pod(128, "StartError", "exec /train: exec format error"),
            Failed(128, "the container did not start: exec /train: exec format error"),
        ),
        (
            pod(128, "StartError", "failed to create shim task: context deadline exceeded"),
            Killed(
                0,
                "the container did not start: failed to create shim task: context deadline "
                "exceeded",
            ),
        ),
        (
            pod(128, "ContainerCannotRun"),
            Killed(0, "the container did not start: ContainerCannotRun"),
        ),
        (None, Killed(0, "the pod is gone")),
        ({}, Killed(0, "the pod ended before it ran")),
        ({"status": {"reason": "Evicted", "message": "disk"}}, Killed(0, "Evicted: disk")),
        (
            {
                "status": {
                    "initContainerStatuses": [
                        {"name": "fetch", "state": {"terminated": {"exitCode": 4}}}
                    ]
                }
            },
            Failed(4, "init container fetch: exit status 4"),
        ),
        (
            {
                "status": {
                    "initContainerStatuses": [
                        {"name": "flyer-tools", "state": {"terminated": {"exitCode": 1}}}
                    ]
                }
            },
            Killed(0, "flyer-tools failed: 1"),
        ),
    ],
)
def test_the_status_of_a_pod(pod_status: dict[str, Any] | None, outcome: Outcome) -> None:
    assert outcome_of(pod_status) == outcome


def failure(rank: int, time: float, **fields: Any) -> Failure:
    defaults: dict[str, Any] = {"exit_status": 1}
    return Failure(
        job="lab/gpt", attempt=1, node=f"a{rank}", node_rank=rank, rank=rank, local_rank=0,
        time=time, **(defaults | fields),
    )  # fmt: skip


SETTINGS = GatewaySettings(first_failure_seconds=1.0, peer_lost_seconds=3.0, status_seconds=3.0)
SIGKILL = Killed(9, "rank 1: killed by SIGKILL")


def limited(pod_object: dict[str, Any], container: str, limit: str) -> dict[str, Any]:
    for value in pod_object["spec"]["containers"]:
        if value["name"] == container:
            value["resources"] = {"limits": {"memory": limit}}
    return pod_object


def test_a_memory_limit_that_was_exceeded_is_named() -> None:
    why = "OOMKilled: container trainer exceeded its memory limit 8Gi"
    assert outcome_of(limited(pod(137, "OOMKilled"), "trainer", "8Gi")) == Killed(9, why)


def test_a_container_out_of_memory_is_the_cause_of_a_sigkill_in_another_one() -> None:
    pod_object = limited(pod(137, message="rank 0 on node a: killed by SIGKILL"), "logger", "64Mi")
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    pod_object["status"]["containerStatuses"][0] |= {"state": {"running": {}}, "lastState": ended}
    why = "OOMKilled: container logger exceeded its memory limit 64Mi"
    assert outcome_of(pod_object) == Killed(9, why)


def test_an_exit_status_has_precedence_over_oomkilled() -> None:
    peer_failure = pod(1, "OOMKilled", message=HEADLINE.format(1))
    assert outcome_of(peer_failure) == Failed(1, "rank 3: ValueError: 7")


def test_a_sigkill_waits_for_the_status_of_its_pod() -> None:
    exits = Exits(SETTINGS)
    killed = failure(1, 10.0, exit_status=None, signal=9)
    assert exits.add(1, SIGKILL, killed, 10.0) == []
    assert exits.add(0, LOST_PEERS, failure(0, 10.1, peer_lost=True), 10.1) == []
    assert exits.due() == 13.0
    out_of_memory = outcome_of(limited(pod(137, "OOMKilled"), "trainer", "8Gi"))
    exits.explain(1, out_of_memory)
    assert exits.due() == 11.0
    assert exits.tick(11.0) == [(1, out_of_memory), (0, LOST_PEERS)]


def test_an_unexplained_sigkill_is_reported_as_such() -> None:
    exits = Exits(SETTINGS)
    exits.add(1, SIGKILL, failure(1, 10.0, exit_status=None, signal=9), 10.0)
    exits.explain(1, Killed(9, "Error"))
    assert exits.tick(11.0) == [(1, SIGKILL)]
    exits.explain(1, Killed(9, "OOMKilled"))  # too late
    assert exits.reported == {1: SIGKILL}


def test_the_wait_for_a_pods_status_is_bounded() -> None:
    exits = Exits(SETTINGS)
    exits.add(1, SIGKILL, failure(1, 10.0, exit_status=None, signal=9), 10.0)
    assert exits.tick(12.9) == []
    assert exits.tick(13.0) == [(1, SIGKILL)]


def test_success_and_release_are_reported_immediately() -> None:
    exits = Exits(SETTINGS)
    assert exits.add(0, Succeeded(), None, 0.0) == [(0, Succeeded())]
    released = outcome_of_code(104, None)
    assert exits.add(1, released, None, 0.0) == [(1, released)]
    assert exits.add(1, Failed(1), None, 0.0) == []  # its outcome is known
    assert exits.due() is None


def test_a_pod_that_lost_peers_names_them() -> None:
    exits = Exits(SETTINGS)
    error = "CollectiveError: allreduce #2: rank 0 on node a0 (peer_died): hfreduced ended"
    result = failure(0, 10.0, peer_lost=True, traceback=f"Traceback:\n  x\n{error}\n")
    assert exits.add(0, LOST_PEERS, result, 10.0) == []
    assert exits.tick(13.0) == [(0, Killed(0, f"it lost its peers: rank 0: {error}"))]


def test_lost_peers_are_held_for_the_root_cause() -> None:
    exits = Exits(SETTINGS)
    assert exits.add(0, LOST_PEERS, failure(0, 10.0, peer_lost=True), 10.0) == []
    assert exits.due() == 13.0
    assert exits.add(1, Killed(9), failure(1, 10.5, exit_status=None, signal=9), 12.0) == []
    exits.explain(1, Killed(9))
    assert exits.due() == 13.0
    assert exits.tick(12.9) == []
    assert exits.tick(13.0) == [(1, Killed(9)), (0, LOST_PEERS)]
    assert exits.root_cause == failure(1, 10.5, exit_status=None, signal=9)


def test_failures_are_ordered_by_their_time_and_not_by_arrival() -> None:
    exits = Exits(SETTINGS)
    exits.add(0, Failed(1, "late"), failure(0, 10.2), 10.3)
    exits.add(1, Failed(1, "early"), failure(1, 10.1), 10.4)
    assert [rank for rank, _ in exits.tick(11.3)] == [1, 0]


def test_an_exit_known_from_the_status_is_ordered() -> None:
    exits = Exits(SETTINGS)
    exits.add(0, Failed(1, "consequence"), failure(0, 10.0, peer_lost=True), 10.0)
    exits.add(1, Killed(9, "OOMKilled"), None, 10.5)
    assert [rank for rank, _ in exits.tick(20.0)] == [1, 0]
