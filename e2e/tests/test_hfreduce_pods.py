"""`torch.distributed` over HFReduce between pods of two zones, as a script of a user has it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from e2e.tests.test_first_job import job, wait_phase

if TYPE_CHECKING:
    from e2e import chart
    from e2e.cluster.handle import Cluster

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


def test_one_word_changes_the_backend(
    cluster: Cluster, operator_release: chart.Release, namespace: str
) -> None:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        pytest.skip("torch is not installed here, so pods cannot have it either")
    manifest = job("sum", 4, SUM, ranksPerNode=2, group="a100")
    # The user's image would bring torch; this one has it from this machine, and HFReduce from us.
    spec = manifest["spec"]["template"]["spec"]
    folder = str(Path(found.origin).parents[1])
    spec["volumes"] = [{"name": "site", "hostPath": {"path": folder, "type": "Directory"}}]
    (container,) = spec["containers"]
    container["volumeMounts"] = [{"name": "site", "mountPath": "/site", "readOnly": True}]
    container["env"] = [{"name": "PYTHONPATH", "value": "/site"}]

    cluster.apply(manifest, namespace=namespace)
    done = wait_phase(cluster, "sum", namespace, "Succeeded", "Failed")
    assert done["status"]["phase"] == "Succeeded", (done["status"], operator_release.diagnosis())
    assert done["status"]["zones"] == "A+B"
    pods = cluster.get("pods", namespace=namespace, selector="fireflyer.dev/job=sum")
    said = "".join(
        cluster.kubectl("logs", pod["metadata"]["name"], f"--namespace={namespace}") for pod in pods
    )
    # Each of the two trees crosses once.
    assert said.count("sum 36.0 crossings [1, 1]") == 8, said
