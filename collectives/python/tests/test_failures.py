"""Peers that die, stop, leave, come late or do something else: named, on every rank, in time."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from hfreduce.testing import Layout, run

pytestmark = pytest.mark.torch

LAYOUTS = {"one-node": Layout.one_node(3), "two-zones": Layout.two_zones(2, 1)}
LIVENESS = {"HFREDUCE_LIVENESS_SECONDS": "3"}
BAD = 1

PATIENCE_SECONDS = 110
PROMPT_SECONDS = 60
"""On a machine that does much else: far from what waiting for the patient would take."""


def survivors(outcomes, bad=BAD):
    return [outcome for outcome in outcomes if outcome.rank != bad]


def assert_named(outcome, bad=BAD):
    assert outcome.failure is not None, f"rank {outcome.rank} noticed nothing: {outcome}"
    assert outcome.failure.type == "CollectiveError", outcome
    assert outcome.failure.fields["peer"] == bad, outcome
    assert f"rank {bad}" in outcome.failure.text, outcome


def hit(rank, size, number, when):
    """Rank 1 is hit before an operation, or in the middle of a long one."""
    dist.all_reduce(torch.ones(10))
    if rank == BAD and when == "before":
        os.kill(os.getpid(), number)
    tensor = torch.ones(8_000_000)
    if rank == BAD:
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    for _ in range(100_000):
        dist.all_reduce(tensor)
        tensor.fill_(1)
    return "went on"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_peer_that_is_hit_is_named_by_every_survivor(number, when, layout):
    outcomes = run(
        hit, layout, int(number), when, environment=LIVENESS, lost=[BAD],
        timeout_seconds=PATIENCE_SECONDS, deadline_seconds=PATIENCE_SECONDS,
    )  # fmt: skip
    for outcome in survivors(outcomes):
        assert_named(outcome)
        assert outcome.seconds < PROMPT_SECONDS


def disagree(rank, size, how):
    dist.all_reduce(torch.ones(10))
    odd = rank == BAD
    if how == "size":
        dist.all_reduce(torch.ones(11 if odd else 10))
    elif how == "dtype":
        dist.all_reduce(torch.ones(10, dtype=torch.int32 if odd else torch.float32))
    elif how == "op":
        dist.all_reduce(torch.ones(10), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
    elif how == "collective" and odd:
        dist.broadcast(torch.ones(10), 0)
    elif how == "root":
        dist.broadcast(torch.ones(10), 2 if odd else 0)
    else:
        dist.all_reduce(torch.ones(10))
    # A root has sent its part and may go on: it hears of it in what follows.
    dist.barrier()
    return "agreed"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("how", ["size", "dtype", "op", "collective", "root"])
def test_a_peer_that_disagrees_is_named_on_every_rank(how, layout):
    outcomes = run(disagree, layout, how, environment=LIVENESS)
    odd = {
        "size": "rank 1 called allreduce(11 ",
        "dtype": "rank 1 called allreduce(10 × int32",
        "op": "rank 1 called allreduce(10 × float32, max)",
        "collective": "rank 1 called broadcast(",
        "root": "rank 1 called broadcast(10 × float32, root 2)",
    }
    for outcome in outcomes:
        assert outcome.failure is not None, f"rank {outcome.rank} noticed nothing: {outcome}"
        assert outcome.failure.fields["kind"] == "mismatch", outcome
        # Of two that disagree neither is right by itself: both calls are told.
        assert odd[how] in outcome.failure.text, outcome
        assert outcome.failure.text.count(" called ") == 2


def late(rank, size):
    if rank == BAD:
        threading.Event().wait(PATIENCE_SECONDS)
    dist.all_reduce(torch.ones(10))


def test_a_peer_that_never_calls_is_named_at_the_deadline():
    outcomes = run(late, LAYOUTS["two-zones"], timeout_seconds=4, lost=[BAD])
    for outcome in survivors(outcomes):
        assert_named(outcome)
        assert outcome.seconds < PROMPT_SECONDS


def nothing(rank, size):
    return rank


def test_a_rank_that_never_comes_is_named_by_those_that_wait():
    outcomes = run(nothing, LAYOUTS["two-zones"], absent=[2], timeout_seconds=6)
    for outcome in outcomes:
        if outcome.rank != 2:
            assert outcome.failure is not None
            assert outcome.failure.type == "RendezvousError", outcome
            assert outcome.failure.fields["absent"] == (2,)
            assert "rank 2 did not come in time (3 of 4 did)" in outcome.failure.text


def test_a_rank_of_another_job_is_named():
    outcomes = run(
        nothing, LAYOUTS["one-node"], timeout_seconds=60, per_rank={BAD: {"FLYER_JOB": "other/job"}}
    )
    for outcome in survivors(outcomes):
        assert outcome.failure is not None
        assert f"rank {BAD} belongs to job 'other/job'" in outcome.failure.text


def test_a_wrong_key_is_refused(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(b"g" * 32)
    bad.write_bytes(b"b" * 32)
    outcomes = run(
        nothing,
        Layout.two_zones(1, 1),
        timeout_seconds=6,
        environment={"HFREDUCE_KEY_FILE": str(good)},
        per_rank={BAD: {"HFREDUCE_KEY_FILE": str(bad)}},
    )
    assert all(outcome.failure is not None for outcome in outcomes), outcomes


def aborting(rank, size):
    dist.all_reduce(torch.ones(10))
    if rank == BAD:
        dist.group.WORLD.abort()
        return "aborted"
    dist.all_reduce(torch.ones(10))
    return "went on"


def test_an_abort_ends_every_wait():
    outcomes = run(aborting, LAYOUTS["two-zones"], deadline_seconds=60)
    assert outcomes[BAD].value == "aborted"
    for outcome in survivors(outcomes):
        assert_named(outcome)
