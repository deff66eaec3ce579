"""Nodes and NodeHealths reach the engine: hardware faults, deleted nodes."""

import pytest
from flyer.api import API_VERSION, NodeHealth, Phase

from fakekube.nodes.exits import Exit

XID = {
    "state": "Unhealthy", "reason": "Xid79", "message": "GPU 3 has fallen off the bus",
    "devices": [
        {"id": "gpu-3", "kind": "GPU", "state": "Unhealthy", "reason": "Xid79",
         "recovery": "reset of the GPU", "since": "2026-01-01T00:00:00Z"},
    ],
}  # fmt: skip


def health(name, status):
    metadata = {"name": name}
    return {"apiVersion": API_VERSION, "kind": "NodeHealth", "metadata": metadata, "status": status}


async def test_a_failed_rank_on_a_node_with_a_hardware_fault_restarts_the_job(cluster, until):
    """The job is not at fault, so it neither ends nor uses one of its maxRestarts."""
    cluster.nodes("AA")
    cluster.operator(failure_window_seconds=1.0)
    cluster.submit("job", maxRestarts=0)
    await until(lambda: cluster.phase("job") is Phase.RUNNING)
    (bad,) = cluster.status("job").assignment.names
    cluster.store.create("nodehealths", health(bad, None))
    cluster.store.patch("nodehealths", bad, {"status": XID}, "", "status")
    cluster.finish("job", Exit(1))
    await until(
        lambda: cluster.phase("job") is Phase.RUNNING and cluster.status("job").history.attempt == 2
    )
    status = cluster.status("job")
    assert status.eviction.reason == "HardwareFault"
    assert "Xid79: GPU 3 has fallen off the bus" in status.eviction.message
    assert status.history.restarts_without_progress == 0
    assert bad not in status.assignment.names


@pytest.mark.parametrize("state", ["Healthy", "Suspect", "Unknown"])
def test_only_an_unhealthy_node_has_a_fault(state):
    assert NodeHealth.model_validate(health("a", XID)).fault.startswith("Xid79")
    assert NodeHealth.model_validate(health("a", {"state": state, "reason": "Xid79"})).fault == ""
    assert NodeHealth.model_validate({**health("a", None)}).fault == ""


async def test_a_deleted_node_is_removed(cluster, until):
    cluster.nodes("AA")
    operator = cluster.operator()
    cluster.submit("job")
    await until(lambda: cluster.phase("job") is Phase.RUNNING)
    (free,) = {"a0", "a1"} - set(cluster.status("job").assignment.names)
    cluster.store.delete("nodes", free)
    await until(lambda: free not in operator.leader.term.state.nodes)
    cluster.submit("large", 2)
    await until(lambda: cluster.status("large").pending is not None)
    await until(lambda: cluster.status("large").pending.verdict == "Never")
