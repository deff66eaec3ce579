"""torch's works of operations: completion and source ranks."""

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
    """Polls like a script that works on something else meanwhile."""
    deadline = time.monotonic() + POLL_SECONDS
    while not work.is_completed():
        assert time.monotonic() < deadline, "never completed"
        time.sleep(0.001)


def poll(rank, size):
    tensor = torch.full((1000,), float(rank))
    # The others call it when rank 0 has seen that it is in progress.
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
    # Outputs that are copied to their destinations at the end, and are read without a wait.
    pieces = [torch.full((3, 2), -1.0)[:, 0] for _ in range(size)]
    work = dist.all_gather(pieces, torch.full((3,), float(rank)), async_op=True)
    polled(work)
    assert [piece[0].item() for piece in pieces] == list(range(size))
    assert work.is_success()
    with pytest.raises(RuntimeError, match="not a receive from any rank"):
        work._source_rank()
    # The works of another backend behave as before.
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
    # A group of the highest priority is never held back.
    assert hfreduce.torch.stats(high)["held_back"] == 0
    with pytest.raises(SettingError, match=r"Options\.priority='urgent': expected low, normal"):
        hfreduce.torch.Options(priority="urgent")
    with pytest.raises(TypeError, match=r"give hfreduce\.torch\.Options"):
        dist.new_group(pg_options=object())
    return True


def test_groups_have_priorities():
    values(run(levels, LAYOUT))


def from_any_rank(rank, size):
    received = []
    if rank == 0:
        for _ in range(2 * (size - 1)):
            tensor = torch.zeros(5)
            received.append((dist.recv(tensor), tensor.tolist()))
    else:
        for step in range(2):
            dist.send(torch.full((5,), 10.0 * rank + step), 0)
    # In a group with other rank numbers.
    few = dist.new_group([1, 3])
    if rank == 1:
        tensor = torch.zeros(1)
        received.append((dist.recv(tensor, group=few), tensor.tolist()))
    elif rank == 3:
        dist.send(torch.tensor([7.0]), 1, group=few)
    return received


def test_a_receive_from_any_rank_returns_the_sender():
    received = values(run(from_any_rank, LAYOUT))
    # Messages of one sender arrive in order; those of several senders in any order.
    expected = [(rank, [10.0 * rank + step] * 5) for rank in (1, 2, 3) for step in (0, 1)]
    assert sorted(received[0]) == expected
    assert received[1] == [(3, [7.0])]


def waits_for_any_rank(rank, size):
    group = dist.new_group()  # with time for the other rank to come
    dist.set_timeout(timedelta(seconds=1), group)
    if rank == 0:
        with pytest.raises(Exception, match="waiting for a message from any rank") as excinfo:
            dist.recv(torch.zeros(1), group=group)
        return str(excinfo.value)
    return None


def test_a_receive_without_a_sender_times_out():
    assert "the timeout of 1.0 s" in values(run(waits_for_any_rank, Layout.one_node(2)))[0]
