"""haiscale.ddp when a rank dies, raises or hangs: every other rank gets a `StepError` that states
which buckets are stepped, and nothing that is between two steps can be saved or trained on.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from haiscale.ddp import StepError
from hfreduce.testing import Layout, run

sys.path.insert(0, str(Path(__file__).parent))
import training

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300, func_only=True)]

LIVENESS = {"HFREDUCE_LIVENESS_SECONDS": "6"}
PATIENCE_SECONDS = 110
BAD = 1


def until(condition):
    """Waits for a condition, at most as long as the operations of the test."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.002)


def refuses(ddp, model, optimizer, rank):
    """After a failure nothing is trained, stepped or saved."""
    refused = [
        lambda: ddp(training.tokens_of(0, rank)[:, :-1]),
        lambda: model(training.tokens_of(0, rank)[:, :-1]),
        model.state_dict,
        ddp.synchronize,
    ]
    if ddp.reducer.defers:
        refused += [optimizer.state_dict, optimizer.step]
    for call in refused:
        with pytest.raises(StepError):
            call()


def dies(rank, size, phase, kind, folder):
    """Rank 1 kills itself in a phase of its third step; the others report how that ends."""
    torch.manual_seed(0)
    model = training.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = training.wrap(kind, model, optimizer)
    held = dict(torch.nn.Module.named_parameters(model))
    snapshots = {}

    def end(*_):
        if rank == BAD and step == 2:
            if phase == "between steps of buckets":
                until(Path(folder, "stepped").exists)
            os.kill(os.getpid(), signal.SIGKILL)

    # Of the last bucket but one: the allreduces before it are under way.
    model.twice.weight.register_hook(lambda g: end() if "bucket" in phase else None)
    model.wide[2].weight.register_hook(lambda g: end() if phase == "early backward" else None)
    model.wide.register_forward_pre_hook(lambda *_: end() if phase == "forward" else None)
    try:
        for step in range(6):
            # Steps of the one before are made in the forward pass.
            loss = training.loss_of(ddp, training.tokens_of(step, rank))
            snapshots = {name: p.detach().clone() for name, p in held.items()}
            if phase == "before backward":
                end()
            loss.backward()
            if phase == "after backward":
                end()
            if phase == "between steps of buckets" and step == 2 and rank == 0:
                first = ddp.reducer.in_flight[0]
                until(first.work.is_completed)
                optimizer.step()
                Path(folder, "stepped").touch()
            else:
                optimizer.step()
            if phase == "after step":
                end()
    except StepError as error:
        refuses(ddp, model, optimizer, rank)
        changed = {n for n, p in held.items() if not torch.equal(p, snapshots[n])}
        by_bucket = [set(bucket.names) for bucket in ddp.reducer.buckets]
        return {
            "text": str(error),
            "stepped": error.stepped,
            "missing": error.missing,
            "changed": [i for i, names in enumerate(by_bucket) if names <= changed],
            "touched": [i for i, names in enumerate(by_bucket) if names & changed],
            "buckets": len(by_bucket),
        }
    return "finished"


PHASES = (
    "forward", "before backward", "early backward", "bucket in backward", "after backward",
    "after step",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["overlap", "late", "plain"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank_is_named_and_the_extent_of_the_step_is_right(phase, kind, tmp_path):
    outcomes = run(
        dies, Layout.one_node(3), phase, kind, str(tmp_path), environment=LIVENESS,
        lost_ranks=[BAD], timeout_seconds=PATIENCE_SECONDS, deadline_seconds=PATIENCE_SECONDS,
    )  # fmt: skip
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.failure is None, outcome
        assert outcome.value != "finished"
        found = outcome.value
        assert "rank 1" in found["text"], found
        if found["missing"]:
            assert tuple(found["changed"]) == found["stepped"], found
            assert found["changed"] == found["touched"], found
        else:
            assert found["stepped"] == (), found
            assert "no parameter was updated by this step" in found["text"]


def test_a_step_between_buckets_is_reported_and_cannot_be_saved(tmp_path):
    outcomes = run(
        dies, Layout.one_node(2), "between steps of buckets", "overlap", str(tmp_path),
        environment=LIVENESS, lost_ranks=[BAD], timeout_seconds=PATIENCE_SECONDS,
        deadline_seconds=PATIENCE_SECONDS,
    )  # fmt: skip
    assert outcomes[0].failure is None, outcomes[0]
    found = outcomes[0].value
    assert found["stepped"], found
    assert found["missing"], found
    assert sorted(found["stepped"] + found["missing"]) == list(range(found["buckets"]))
    assert tuple(found["changed"]) == found["stepped"]
    assert "load a checkpoint on every rank" in found["text"]


class Error(Exception):
    pass


def raises(rank, size, where, resumes):
    """Rank 1 raises in its third step; it ends, or continues with its next batch."""
    model = training.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = training.wrap("overlap", model, optimizer)

    def end(*_):
        if rank == BAD and step == 2:
            raise Error

    model.twice.weight.register_hook(lambda g: end() if where == "backward" else None)
    model.wide.register_forward_pre_hook(lambda *_: end() if where == "forward" else None)
    for step in range(6):
        try:
            training.loss_of(ddp, training.tokens_of(step, rank)).backward()
        except Error:
            if not resumes:
                raise
            continue
        optimizer.step()
        optimizer.zero_grad()
    ddp.synchronize()
    return "finished"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_of_one_rank_ends_the_others(where):
    outcomes = run(
        raises, Layout.one_node(3), where, False, timeout_seconds=PATIENCE_SECONDS,
        deadline_seconds=PATIENCE_SECONDS,
    )  # fmt: skip
    assert outcomes[BAD].failure.type == "Error"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.failure.type == "StepError", outcome
        assert "rank 1" in outcome.failure.text


def test_a_script_that_continues_after_an_exception_in_backward_is_refused():
    """Its gradients are of two batches; the others learn of it now, not at their deadline."""
    outcomes = run(
        raises, Layout.one_node(3), "backward", True, timeout_seconds=10 * PATIENCE_SECONDS,
        deadline_seconds=PATIENCE_SECONDS,
    )  # fmt: skip
    assert outcomes[BAD].failure.type == "StepError"
    assert "the last backward pass did not complete" in outcomes[BAD].failure.text
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.failure.type == "StepError", outcome
        assert "rank 1" in outcome.failure.text


def hangs(rank, size, folder):
    model = training.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = training.wrap("overlap", model, optimizer)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for step in range(3):
        if step == 1:
            backend.set_timeout(timedelta(seconds=2))
        loss = training.loss_of(ddp, training.tokens_of(step, rank))
        if rank == BAD and step == 1:
            until(Path(folder, "reported").exists)
            return "waited"
        try:
            loss.backward()
            optimizer.step()
            ddp.synchronize()
        except StepError:
            Path(folder, "reported").touch()
            raise
    return "finished"


def test_a_rank_that_does_not_call_is_named_at_the_deadline(tmp_path):
    outcomes = run(hangs, Layout.one_node(2), str(tmp_path))
    assert outcomes[BAD].value == "waited"
    assert outcomes[0].failure.type == "StepError", outcomes[0]
    assert "rank 1" in outcomes[0].failure.text


def resets(rank, size, backend):
    """An error before any collective leaves the group whole: after `reset` training continues."""
    torch.manual_seed(0)
    model = training.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = training.wrap("late", model, optimizer, 25.0)

    def end(*_):
        if step == 1:
            raise Error

    model.twice.weight.register_hook(end)
    for step in range(4):
        try:
            training.loss_of(ddp, training.tokens_of(step, rank)).backward()
        except Error:
            ddp.reset()
            continue
        optimizer.step()
    return training.digest(list(model.parameters()))


def expected_without(rank, size):
    torch.manual_seed(0)
    model = training.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = training.wrap("barrier", model, optimizer, 25.0)
    for step in (0, 1, 2, 3):
        loss = training.loss_of(ddp, training.tokens_of(step, rank))  # batch norm sees step 1
        if step != 1:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return training.digest(list(model.parameters()))


def test_reset_drops_the_failed_step():
    outcomes = run(resets, Layout.one_node(2), "hfreduce")
    expected = run(expected_without, Layout.one_node(2))
    assert [o.failure for o in outcomes] == [None, None]
    assert [o.value for o in outcomes] == [o.value for o in expected]
