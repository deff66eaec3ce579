"""Operations as events of torch's profiler."""

import pytest
import torch
import torch.distributed as dist
from hfreduce.testing import Layout, run, values

pytestmark = pytest.mark.torch

LAYOUT = Layout.two_zones(1, 2)


def events_of(work):
    with torch.profiler.profile(record_shapes=True) as profile:
        work()
    return sorted(
        (event.name, event.input_shapes, event.is_async)
        for event in profile.events()
        if event.name.startswith("hfreduce:")
    )


def profiled(rank, size):
    tensor, message = torch.ones(3, 4), torch.ones(5)
    after, before = (rank + 1) % size, (rank - 1) % size

    def operations():
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 0)
        dist.all_gather([torch.empty(3, 4) for _ in range(size)], tensor)
        dist.all_to_all_single(torch.empty(size), torch.ones(size))
        works = [dist.isend(message, after), dist.irecv(torch.empty(5), before)]
        for work in works:
            work.wait()
        dist.reduce_scatter(torch.empty(2), [torch.ones(2)] * size)
        dist.all_gather_into_tensor(torch.empty(size), torch.ones(1))
        dist.barrier()

    names = events_of(operations)
    # Nothing is recorded or kept without a profiler.
    operations()
    coalesced = events_of(lambda: dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)]))
    future = events_of(lambda: dist.all_reduce(tensor, async_op=True).get_future().wait())
    return names, coalesced, future


def test_operations_are_events_with_the_sizes_of_their_tensors():
    for names, coalesced, future in values(run(profiled, LAYOUT, deadline_seconds=100.0)):
        assert names == [
            ("hfreduce:all_gather", [[3, 4]], True),
            ("hfreduce:all_gather_into_tensor", [[1]], True),
            ("hfreduce:all_reduce", [[3, 4]], True),
            ("hfreduce:all_to_all", [[4]], True),
            ("hfreduce:barrier", [], True),
            ("hfreduce:broadcast", [[3, 4]], True),
            ("hfreduce:recv", [[5]], True),
            ("hfreduce:reduce", [[3, 4]], True),
            ("hfreduce:reduce_scatter", [[2]], True),
            ("hfreduce:send", [[5]], True),
        ]
        assert coalesced == [("hfreduce:all_reduce", [[2], [3]], True)]
        assert future == [("hfreduce:all_reduce", [[3, 4]], True)]
