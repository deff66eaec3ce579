"""torch without Python backends: the group is a process group with the same results."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

# The first lines make the installed torch behave like such a version.
SCRIPT = """
import hashlib, json, os, sys
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

store, rank, older = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "older"
if older:
    class Backend(c10d.Backend):
        def __init__(self, *args):
            raise TypeError("No constructor defined!")
    c10d.Backend = Backend
import hfreduce.torch
dist.init_process_group("hfreduce", init_method=f"file://{store}", rank=rank, world_size=2)
assert isinstance(dist.group.WORLD, hfreduce.torch.HFReduceBackend) is older
results = {}
tensor = torch.arange(5.0) + rank
dist.all_reduce(tensor, async_op=True).wait()
results["sum"] = tensor.tolist()
whole = torch.empty(4)
dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
results["gathered"] = whole.tolist()
share = torch.empty(2)
dist.reduce_scatter_tensor(share, torch.arange(4.0))
results["share"] = share.tolist()
both = [torch.empty(2), torch.empty(4)]
with dist._coalescing_manager():
    for output in both:
        dist.all_gather_into_tensor(output, torch.full((output.numel() // 2,), float(rank)))
results["coalesced"] = [output.tolist() for output in both]
each = torch.empty(4)
dist.all_to_all_single(each, torch.full((4,), float(rank)))
results["exchanged"] = each.tolist()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(30, 20))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((4, 30), rank + step / 10)).square().mean().backward()
    optimizer.step()
bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
results["trained"] = hashlib.sha256(bits).hexdigest()
results["ranks"] = hfreduce.torch.stats()["operations"] > 0
print(json.dumps(results))
dist.destroy_process_group()
"""


def two_ranks(folder, torch_is):
    """The results of both ranks."""
    command = [sys.executable, "-c", SCRIPT, str(folder / torch_is)]
    ranks = [
        subprocess.Popen([*command, str(rank), torch_is], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    return [json.loads(rank.communicate(timeout=100)[0].splitlines()[-1]) for rank in ranks]


@pytest.mark.timeout(240, func_only=True)
def test_an_older_torch_gives_the_same_results(tmp_path):
    older, today = two_ranks(tmp_path, "older"), two_ranks(tmp_path, "today")
    assert older == today
    for rank, results in enumerate(older):
        assert results["sum"] == [1.0, 3.0, 5.0, 7.0, 9.0]
        assert results["gathered"] == [0.0, 0.0, 1.0, 1.0]
        assert results["coalesced"] == [[0.0, 1.0], [0.0, 0.0, 1.0, 1.0]]
        assert results["share"] == [[0.0, 2.0], [4.0, 6.0]][rank]
        assert results["exchanged"] == [0.0, 0.0, 1.0, 1.0]
    assert older[0]["trained"] == older[1]["trained"]


def test_a_torch_that_is_too_old_is_refused():
    script = "import torch; torch.__version__ = '2.8.0+cpu'; import hfreduce.torch"
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 1
    assert "ImportError: torch 2.8.0+cpu: hfreduce needs 2.9 or later" in result.stderr
