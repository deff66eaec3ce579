"""Replicas in pipelines of training scripts: buffers and no_sync of DistributedDataParallel."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from haiscale.ddp import DistributedDataParallel
from haiscale.pipeline import PipeDream, make_subgroups, partition
from haiscale.pipeline.errors import PipelineError
from hfreduce.testing import Layout, run, values
from torch import nn

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200, func_only=True)]

CHUNKS = 2


class Offset(nn.Linear):
    """A layer with a buffer."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x):
        return super().forward(x) + self.offset


def pipeline_of(broadcast_buffers=True):
    """Two stages of two replicas."""
    dp_group, pp_group = make_subgroups(pp_size=2)
    torch.manual_seed(3)
    part = partition(nn.Sequential(Offset(), Offset()), pp_group.rank(), pp_group.size())
    data = DistributedDataParallel(
        part, process_group=dp_group, broadcast_buffers=broadcast_buffers
    )
    return PipeDream(data, CHUNKS, process_group=pp_group), part[0], dp_group.rank()


def squares(outputs):
    return outputs.square().sum()


def offsets(rank, size, broadcast_buffers):
    """The buffer of each replica after a step; they differ before it."""
    pipeline, layer, replica = pipeline_of(broadcast_buffers)
    pipeline.forward_backward(torch.rand(8, 4), criterion=squares)
    layer.offset.fill_(1 + replica)
    pipeline.forward_backward(torch.rand(8, 4), criterion=squares)
    return replica, layer.offset.tolist()


@pytest.mark.parametrize(("broadcast_buffers", "expected"), [(True, [1, 1]), (False, [1, 2])])
def test_a_step_starts_with_the_buffers_of_the_first_replica(broadcast_buffers, expected):
    for replica, offset in values(run(offsets, Layout.one_node(4), broadcast_buffers)):
        assert offset == [expected[replica]] * 4


def leaves_averages_out(rank, size):
    pipeline, *_ = pipeline_of()
    dist.barrier(dist.new_group())  # every rank has its pipeline; a refusal does not end this wait
    with (
        pipeline.module.no_sync() if rank == 0 else nullcontext(),
        pytest.raises(PipelineError) as raised,
    ):
        pipeline.forward_backward(torch.rand(8, 4), criterion=squares)
    return str(raised.value)


def test_a_step_inside_no_sync_is_refused_on_all_ranks():
    texts = values(run(leaves_averages_out, Layout.one_node(4)))
    assert texts[0].startswith("rank 0, stage 0: the DistributedDataParallel is in no_sync()")
    assert len(texts) == 4
