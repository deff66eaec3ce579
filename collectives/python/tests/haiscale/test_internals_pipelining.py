"""haiscale.internals.pipelining: torch has the names, and its schedules are ours."""

import inspect

import pytest
import torch
import torch.distributed as dist
from haiscale.internals import pipelining
from haiscale.pipeline import schedules
from hfreduce.testing import Layout, run, values
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, get_schedule_class

pytestmark = pytest.mark.torch

ADDED = {"buffers", "computing_loss", "_is_divisible", "_send"}


def own_methods(cls):
    return {name for name, value in vars(cls).items() if inspect.isfunction(value)}


def test_what_we_override_is_there_with_the_same_arguments():
    overridden = own_methods(pipelining.Stage) - ADDED
    assert len(overridden) > 8
    for name in overridden - {"__init__"}:
        theirs = inspect.signature(getattr(PipelineStage, name))
        first = [*inspect.signature(getattr(pipelining.Stage, name)).parameters][1:2]
        assert set(first) <= {*theirs.parameters, "args"}, name


def test_names_that_the_runtime_uses_are_there():
    names = {
        "_prepare_schedule_with_comms",
        "register_custom_function",
        "step",
        "_maybe_compute_loss",
    }
    assert names <= set(dir(_PipelineScheduleRuntime))
    source = inspect.getsource(_PipelineScheduleRuntime)
    # Losses are stored in order, and buffers are torch's: check.py and Stage rely on both.
    assert "release_fwd_send_outputs" in source
    assert "_maybe_get_loss" in source


def orders(rank, size, ranks, microbatches):
    """The computations of torch's schedules, by name and rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = {}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    for name, chunks in (("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)):
        stages = [
            PipelineStage(nn.Identity(), k, ranks * chunks, torch.device("cpu"))
            for k in range(chunks)
        ]
        schedule = get_schedule_class(name)(stages, microbatches, loss_fn=nn.MSELoss())
        found[name] = {
            rank: [str(action) for action in actions if action is not None]
            for rank, actions in schedule.pipeline_order.items()
        }
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_orders_are_those_of_torch(ranks, microbatches):
    (found,) = values(run(orders, Layout.one_node(1), ranks, microbatches, backend=None))
    for name, order in found.items():
        own = schedules.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=2)
        assert {r: [str(a) for a in row] for r, row in enumerate(own.ranks)} == order, name
