"""What torch hands out for an operation: asked whether it has ended, and who sent."""

import time
from datetime import timedelta

import hfreduce.torch
import pytest
import torch
import torch.distributed as dist
from hfreduce import SettingError
from hfreduce.testing import Layout, run, values

pytestmark = pytest.mark.torch

LAYOUT = Layout.two_zones(1, 2)
POLL_SECONDS = 60


def polled(work):
    """As scripts do it that have something else to do meanwhile."""
    deadline = time.monotonic() + POLL_SECONDS
    while not work.is_completed():
        assert time.monotonic() < deadline, "never completed"
        time.sleep(0.001)


def poll(rank, size):
    tensor = torch.full((1000,), float(rank))
    # The others call it when we have seen that it is under way.
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
        store.set("go", "go")
    else:
        store.wait(["go"], timedelta(seconds=POLL_SECONDS))
        work = dist.all_reduce(tensor, async_op=True)
    polled(work)
    assert tensor.eq(sum(range(size))).all()
    # Whose results are put in their places afterwards, and are read without a wait.
    pieces = [torch.full((3, 2), -1.0)[:, 0] for _ in range(size)]
    work = dist.all_gather(pieces, torch.full((3,), float(rank)), async_op=True)
    polled(work)
    assert [piece[0].item() for piece in pieces] == list(range(size))
    assert work.is_success()
    with pytest.raises(RuntimeError, match="no receive from anybody"):
        work._source_rank()
    # The works of another backend are asked as ever.
    gloo = dist.new_group(backend="gloo")
    work = dist.all_reduce(torch.ones(3), group=gloo, async_op=True)
    polled(work)
    return True


def test_a_work_that_is_polled_completes():
    values(run(poll, LAYOUT))


def levels(rank, size):
    options = hfreduce.torch.Options(priority="high")
    high = dist.new_group(pg_options=options)
    low = dist.new_group(pg_options=hfreduce.torch.Options(priority="low"))
    tensors = [torch.full((1 << 16,), float(rank)) for _ in range(8)]
    works = [
        dist.all_reduce(tensor, group=(low, high)[at % 2], async_op=True)
        for at, tensor in enumerate(tensors)
    ]
    for work in works:
        work.wait()
    assert all(tensor.eq(sum(range(size))).all() for tensor in tensors)
    # One that nothing is above is never held back.
    assert hfreduce.torch.stats(high)["held_back"] == 0
    with pytest.raises(SettingError, match=r"Options\.priority='urgent': expected low or normal"):
        hfreduce.torch.Options(priority="urgent")
    with pytest.raises(TypeError, match=r"give hfreduce\.torch\.Options"):
        dist.new_group(pg_options=object())
    return True


def test_groups_have_levels():
    values(run(levels, LAYOUT))


def from_anybody(rank, size):
    told = []
    if rank == 0:
        for _ in range(2 * (size - 1)):
            tensor = torch.zeros(5)
            told.append((dist.recv(tensor), tensor.tolist()))
    else:
        for step in range(2):
            dist.send(torch.full((5,), 10.0 * rank + step), 0)
    # In a group whose ranks are counted otherwise.
    few = dist.new_group([1, 3])
    if rank == 1:
        tensor = torch.zeros(1)
        told.append((dist.recv(tensor, group=few), tensor.tolist()))
    elif rank == 3:
        dist.send(torch.tensor([7.0]), 1, group=few)
    return told


def test_a_receive_from_anybody_says_who_sent():
    told = values(run(from_anybody, LAYOUT))
    # Of one sender in order; of several, as they came.
    expected = [(rank, [10.0 * rank + step] * 5) for rank in (1, 2, 3) for step in (0, 1)]
    assert sorted(told[0]) == expected
    assert told[1] == [(3, [7.0])]


def waits_for_anybody(rank, size):
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(Exception, match="waiting for a message from any rank") as caught:
            dist.recv(torch.zeros(1), group=group)
        return str(caught.value)
    return None


def test_nobody_who_sends_is_a_timeout():
    assert "the timeout of 1.0 s" in values(run(waits_for_anybody, Layout.one_node(2)))[0]
