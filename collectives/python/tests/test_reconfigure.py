"""After a failure the survivors go on, and newcomers take the places of the lost."""

import os
import signal
import threading
from pathlib import Path

import hfreduce
import hfreduce.torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hfreduce import CollectiveError, _native
from hfreduce.testing import Layout, run

pytestmark = pytest.mark.torch

BAD = 1
LIVENESS = {"HFREDUCE_LIVENESS_SECONDS": "3"}


def summed(communicator):
    """Everybody's rank + 1, summed by everybody."""
    array = np.full(50_000, communicator.rank + 1, np.float32)
    hfreduce.allreduce(array, communicator)
    assert (array == array[0]).all()
    return float(array[0])


def boards():
    """How many nodes' boards this process has mapped, its own and those that are lent to it."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("/memfd:hfreduce " in line for line in lines)  # registered memory has another name


def sums_until_it_fails():
    for _ in range(10_000):
        dist.all_reduce(torch.ones(100_000))


def goes_on(rank, size, number):
    dist.all_reduce(torch.ones(10))
    if rank == BAD:
        os.kill(os.getpid(), number)
    communicator = hfreduce.torch.communicator()
    mapped = boards()
    with pytest.raises(CollectiveError) as failed:
        sums_until_it_fails()
    assert failed.value.peer == BAD
    survivors = [member for member in range(size) if member != failed.value.peer]
    following = communicator.reconfigure(survivors, 50.0)
    assert (following.epoch, following.rank) == (1, survivors.index(rank))
    epochs, completed = zip(*following.came_from, strict=True)
    assert epochs == (0,) * len(survivors)
    assert completed[following.rank] == communicator.completed == failed.value.sequence
    # Some may have been through when it happened, but nobody begins the next one alone.
    assert max(completed) - min(completed) <= 1
    result = summed(following)
    # The communicator of the old epoch is still held, by torch; what was lent to it is not.
    assert 0 < boards() <= mapped
    following.close()
    return result


@pytest.mark.parametrize("layout", [Layout.one_node(3), Layout.two_zones(1, 3)], ids=str)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_survivors_go_on_without_the_lost(number, layout):
    outcomes = run(
        goes_on, layout, int(number), environment=LIVENESS, lost=[BAD],
        timeout_seconds=90, deadline_seconds=110,
    )  # fmt: skip
    left = layout.world_size - 1
    for outcome in outcomes:
        if outcome.rank != BAD:
            assert outcome.value == left * (left + 1) / 2, outcome


def test_a_newcomer_is_taken_in_and_arguments_are_checked():
    key = b"k" * 32
    newcomer = _native.Newcomer("c", "A", key)
    alone = _native.Endpoint(0, 1, [("a", "A")], key)
    communicator = alone.connect([alone.info()], 30.0)
    with pytest.raises(ValueError, match="rank 3 is not in an epoch"):
        communicator.reconfigure([0, 3])
    with pytest.raises(ValueError, match="first member"):
        communicator.reconfigure([newcomer.info(), 0])
    with pytest.raises(TypeError):
        communicator.reconfigure(["a"])
    results = []

    def join():
        joined = newcomer.join(60.0)
        results.append(summed(joined))

    thread = threading.Thread(target=join)
    thread.start()
    following = communicator.reconfigure([0, newcomer.info()], 60.0)
    results.append(summed(following))
    thread.join(60.0)
    assert results == [3.0, 3.0]
    assert following.flight()["epoch"] == 1
    assert following.came_from == [(0, 1), None]
