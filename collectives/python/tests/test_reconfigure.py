"""After a failure the survivors continue, and newcomers replace the lost ranks."""

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
LIVENESS = {"HFREDUCE_LIVENESS_SECONDS": "6"}  # longer than a busy machine keeps a rank off


def summed(communicator):
    """Sum of rank + 1 over all ranks, checked on every rank."""
    array = np.full(50_000, communicator.rank + 1, np.float32)
    hfreduce.allreduce(array, communicator)
    assert (array == array[0]).all()
    return float(array[0])


def mapped_segments():
    """Number of nodes' shared-memory segments that this process has mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("/memfd:hfreduce " in line for line in lines)  # registered memory has another name


def sums_until_it_fails():
    for _ in range(10_000):
        dist.all_reduce(torch.ones(100_000))


def continues(rank, size, number):
    dist.all_reduce(torch.ones(10))
    if rank == BAD:
        os.kill(os.getpid(), number)
    communicator = hfreduce.torch.communicator()
    mapped = mapped_segments()
    with pytest.raises(CollectiveError) as failed:
        sums_until_it_fails()
    assert failed.value.peer == BAD
    survivors = [member for member in range(size) if member != failed.value.peer]
    following = communicator.reconfigure(survivors, 50.0)
    assert (following.epoch, following.rank) == (1, survivors.index(rank))
    epochs, completed = zip(*following.came_from, strict=True)
    assert epochs == (0,) * len(survivors)
    assert completed[following.rank] == communicator.completed == failed.value.sequence
    # Some ranks may have completed it at the failure, but none starts the next one alone.
    assert max(completed) - min(completed) <= 1
    result = summed(following)
    # torch still holds the communicator of the old epoch, but its mappings are released.
    assert 0 < mapped_segments() <= mapped
    following.close()
    return result


@pytest.mark.parametrize("layout", [Layout.one_node(3), Layout.two_zones(1, 3)], ids=str)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_survivors_continue_without_the_lost_ranks(number, layout):
    outcomes = run(
        continues, layout, int(number), environment=LIVENESS, lost_ranks=[BAD],
        timeout_seconds=90, deadline_seconds=110,
    )  # fmt: skip
    remaining = layout.world_size - 1
    for outcome in outcomes:
        if outcome.rank != BAD:
            assert outcome.value == remaining * (remaining + 1) / 2, outcome


def test_a_newcomer_joins_and_arguments_are_checked():
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
