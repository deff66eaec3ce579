"""`torch.distributed` over HFReduce between pods of two zones, with a user's script."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from e2e.lib.jobs import job, logs, wait_phase
from e2e.lib.pods import mount_torch

if TYPE_CHECKING:
    from e2e.lib import chart
    from testcluster.handle import Cluster

# Eight ranks import torch on a machine that does other things too.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

SUM = """
import torch, torch.distributed as dist
dist.init_process_group("hfreduce")
rank, count = dist.get_rank(), dist.get_world_size()
numbers = torch.full((1 << 20,), float(rank + 1))
dist.all_reduce(numbers)
assert torch.equal(numbers, torch.full((1 << 20,), count * (count + 1) / 2)), numbers[:4]
import hfreduce.torch
print("sum", numbers[0].item(), "crossings", hfreduce.torch.plan()["crossings"], flush=True)
dist.destroy_process_group()
"""


def test_a_changed_backend_name_is_enough_in_pods(
    cluster: Cluster, release: chart.Release, namespace: str
) -> None:
    manifest = job("sum", 4, SUM, ranksPerNode=2, nodeClass="a100")
    mount_torch(manifest)
    cluster.apply(manifest, namespace=namespace)
    job_status = wait_phase(cluster, "sum", namespace, "Succeeded", "Failed")
    assert job_status["phase"] == "Succeeded", (job_status, release.diagnosis())
    assert job_status["zones"] == "A+B"
    output = logs(cluster, "sum", namespace)
    # Each of the two trees crosses once.
    assert output.count("sum 36.0 crossings [1, 1]") == 8, output
