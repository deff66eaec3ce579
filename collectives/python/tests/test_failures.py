"""Peers that die, stop, leave, are late or call other operations: every rank names them in time."""

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import hfreduce.torch
import pytest
import torch
import torch.distributed as dist
from hfreduce.testing import Layout, run

# The time of the fixture below does not count for any test.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(300, func_only=True)]

LAYOUTS = {"one-node": Layout.one_node(3), "two-zones": Layout.two_zones(2, 1)}
JOB = {"FLYER_JOB": "default/gpt"}
LIVENESS = {"HFREDUCE_LIVENESS_SECONDS": "6"} | JOB  # longer than a busy machine keeps a rank off
BAD = 1
GROUPS = 40

PATIENCE_SECONDS = 110
PROMPT_SECONDS = 60
"""Allows for a busy machine, but far below the liveness timeout of `PATIENCE_SECONDS`."""


@pytest.fixture(scope="module", autouse=True)
def _server():
    """Imports torch before the measurements: from a cold disk that takes a minute."""
    run(nothing, Layout.one_node(1), backend=None, deadline_seconds=PATIENCE_SECONDS)


def survivors(outcomes, bad=BAD):
    return [outcome for outcome in outcomes if outcome.rank != bad]


def assert_named(outcome, bad=BAD):
    assert outcome.failure is not None, f"rank {outcome.rank} has no failure: {outcome}"
    assert outcome.failure.type == "CollectiveError", outcome
    assert outcome.failure.fields["peer"] == bad, outcome
    assert f"rank {bad}" in outcome.failure.text, outcome
    # The error also has this rank's job, rank, node, operation and phase.
    fields = outcome.failure.fields
    assert (fields["job"], fields["rank"]) == (JOB["FLYER_JOB"], outcome.rank), outcome
    assert all(fields[name] for name in ("node", "peer_node", "operation", "phase")), outcome
    for name in ("job", "node", "operation", "phase"):
        assert str(fields[name]) in outcome.failure.text, (name, outcome)
    assert_recorded(outcome)


def assert_recorded(outcome):
    """Every error leaves a record of what its rank did."""
    name = Path(outcome.failure.fields["flight_record"]).name
    assert f"-rank{outcome.rank}-" in name, outcome


def signaled(rank, size, number, when):
    """Rank 1 gets a signal before an operation, or in the middle of a long one."""
    dist.all_reduce(torch.ones(10))
    if rank == BAD and when == "before":
        os.kill(os.getpid(), number)
    tensor = torch.ones(8_000_000)
    if rank == BAD:
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    for _ in range(100_000):
        dist.all_reduce(tensor)
        tensor.fill_(1)
    return "continued"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_killed_or_stopped_peer_is_named_by_every_survivor(number, when, layout):
    outcomes = run(
        signaled, layout, int(number), when, environment=LIVENESS, lost_ranks=[BAD],
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
    elif how == "share":
        dist.all_gather_into_tensor(
            torch.ones(size * (9 if odd else 8)), torch.ones(9 if odd else 8)
        )
    elif how == "splits":
        # Rank 1 sends the others more than they expect; its own part has the right size.
        splits = [3 if odd and peer != rank else 2 for peer in range(size)]
        dist.all_to_all_single(torch.empty(2 * size), torch.ones(sum(splits)), [2] * size, splits)
    elif how == "message":
        if rank in (0, BAD):
            message = torch.ones(20 if odd else 10)
            dist.send(message, 0) if odd else dist.recv(message, BAD)
    else:
        dist.all_reduce(torch.ones(10))
    # A root has sent its part and may continue: the next operation raises its error.
    dist.barrier()
    return "agreed"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("how", ["size", "dtype", "op", "collective", "root", "share"])
def test_a_peer_that_disagrees_is_named_on_every_rank(how, layout):
    outcomes = run(disagree, layout, how, environment=LIVENESS)
    odd = {
        "size": "rank 1 called allreduce(11 ",
        "dtype": "rank 1 called allreduce(10 × int32",
        "op": "rank 1 called allreduce(10 × float32, max)",
        "collective": "rank 1 called broadcast(",
        "root": "rank 1 called broadcast(10 × float32, root 2)",
        "share": "rank 1 called allgather(9 × float32)",
    }
    for outcome in outcomes:
        assert outcome.failure is not None, f"rank {outcome.rank} has no failure: {outcome}"
        assert outcome.failure.fields["kind"] == "mismatch", outcome
        # Either of two different calls may be wrong: the error contains both.
        assert odd[how] in outcome.failure.text, outcome
        assert outcome.failure.text.count(" called ") == 2
        assert_recorded(outcome)


@pytest.mark.parametrize("how", ["splits", "message"])
def test_messages_of_other_lengths_are_an_error_on_every_rank(how):
    """Other backends abort the process, or accept a short message in place of a long one."""
    odd = {
        "splits": "rank 1 called alltoall(3 × float32 between these two)",
        "message": "with tag 0 rank 1 called send(20 × float32)",
    }
    for outcome in run(disagree, LAYOUTS["two-zones"], how, environment=LIVENESS):
        assert outcome.failure is not None, f"rank {outcome.rank} has no failure: {outcome}"
        assert outcome.failure.fields["kind"] == "mismatch", outcome
        assert odd[how] in outcome.failure.text, outcome


def refused_on_one(rank, size, then):
    dist.all_reduce(torch.ones(10))
    if rank != BAD:
        dist.all_reduce(torch.ones(10))
        return "continued"
    with pytest.raises(ValueError, match="share memory"):
        dist.all_reduce(torch.ones(1).expand(10))
    if then == "ends":
        dist.destroy_process_group()
        return "ended"
    dist.barrier()
    return "continued"


@pytest.mark.parametrize("then", ["ends", "continues"])
def test_a_rank_whose_tensor_is_refused_does_not_block_the_others(then):
    outcomes = run(refused_on_one, LAYOUTS["two-zones"], then, environment=LIVENESS)
    for outcome in survivors(outcomes):
        assert outcome.failure is not None, outcome
        kind = {"ends": "peer_left", "continues": "mismatch"}[then]
        assert outcome.failure.fields["kind"] == kind, outcome
        assert "rank 1" in outcome.failure.text, outcome


def aborts_what_has_ended(rank, size):
    for _ in range(GROUPS):
        group = dist.new_group()
        dist.all_reduce(torch.ones(10), group=group)
        dist.barrier(group)
        if rank == BAD:
            hfreduce.torch.communicator(group).abort("after the barrier")
    return "passed"


def test_an_abort_after_a_barrier_fails_the_barrier_on_no_rank():
    """The other ranks may look for its result only then."""
    layout = Layout.one_node(3)
    outcomes = run(aborts_what_has_ended, layout, deadline_seconds=PATIENCE_SECONDS)
    assert [outcome.value for outcome in outcomes] == ["passed"] * len(outcomes), outcomes


def ends_without_closing(rank, size):
    """A child of the fork server, whose end runs the finalizers of multiprocessing alone."""
    dist.all_reduce(torch.ones(10))
    if rank == BAD:
        raise SystemExit
    dist.all_reduce(torch.ones(10))


def test_a_forked_child_that_ends_has_left_and_not_died():
    outcomes = run(ends_without_closing, LAYOUTS["two-zones"], environment=LIVENESS)
    for outcome in survivors(outcomes):
        assert outcome.failure is not None, outcome
        assert outcome.failure.fields["kind"] == "peer_left", outcome


def patient(rank, size):
    dist.all_reduce(torch.ones(10))
    if rank == BAD:
        # Longer than the liveness timeout: the rank is computing.
        threading.Event().wait(8)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    return float(tensor[0])


def test_a_late_rank_is_not_reported_as_dead():
    outcomes = run(
        patient, LAYOUTS["two-zones"], environment=LIVENESS, timeout_seconds=PATIENCE_SECONDS,
        deadline_seconds=PATIENCE_SECONDS,
    )  # fmt: skip
    assert [outcome.value for outcome in outcomes] == [4.0] * 4, outcomes


def late(rank, size):
    dist.all_reduce(torch.ones(10))
    dist.set_timeout(timedelta(seconds=4))
    if rank == BAD:
        threading.Event().wait(PATIENCE_SECONDS)
    dist.all_reduce(torch.ones(10))


def test_a_peer_that_never_calls_is_named_at_the_deadline():
    outcomes = run(
        late, LAYOUTS["two-zones"], timeout_seconds=PATIENCE_SECONDS, lost_ranks=[BAD],
        deadline_seconds=PATIENCE_SECONDS, environment=JOB,
    )  # fmt: skip
    for outcome in survivors(outcomes):
        assert_named(outcome)
        assert outcome.seconds < PROMPT_SECONDS


def nothing(rank, size):
    return rank


def test_an_absent_rank_is_named_by_the_waiting_ranks():
    outcomes = run(nothing, LAYOUTS["two-zones"], absent=[2], timeout_seconds=15)
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
        timeout_seconds=15,
        environment={"HFREDUCE_KEY_FILE": str(good)},
        per_rank={BAD: {"HFREDUCE_KEY_FILE": str(bad)}},
    )
    for outcome in outcomes:
        failure = outcome.failure
        assert failure is not None, outcomes
        assert failure.fields["peer"] == 1 - outcome.rank, outcomes
        assert "another key" in failure.text, outcomes


def aborting(rank, size):
    dist.all_reduce(torch.ones(10))
    if rank == BAD:
        dist.group.WORLD.abort()
        return "aborted"
    dist.all_reduce(torch.ones(10))
    return "continued"


def test_an_abort_ends_every_wait():
    outcomes = run(aborting, LAYOUTS["two-zones"], deadline_seconds=60, environment=JOB)
    assert outcomes[BAD].value == "aborted"
    for outcome in survivors(outcomes):
        assert_named(outcome)
