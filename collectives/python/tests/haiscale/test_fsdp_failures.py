"""haiscale.fsdp when a rank dies: every other rank gets an error that names it, without a hang."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from haiscale.fsdp import StepError
from hfreduce.testing import Layout, run

sys.path.insert(0, str(Path(__file__).parent))
import sharding
import training

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300, func_only=True)]

LIVENESS = {"HFREDUCE_LIVENESS_SECONDS": "6"}
PATIENCE_SECONDS = 110
BAD = 1


def dies(rank, size, phase, kind, replicas):
    """Rank 1 kills itself in a phase of its third step; the others report how that ends."""
    model, optimizer, reducer = sharding.build(kind, optimizer="momentum", replicas=replicas)

    def end(now):
        if now == phase and rank == BAD and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    model.blocks[2].register_forward_pre_hook(lambda *_: end("forward"))
    model.blocks[2].gate.register_full_backward_hook(lambda *_: end("backward"))
    try:
        for number in range(6):
            loss = training.loss_of(model, training.tokens_of(number, rank))
            loss.backward()
            end("after backward")
            optimizer.step()
            optimizer.zero_grad()
            end("after step")
    except StepError as error:
        refused = 0
        calls = [
            lambda: model(training.tokens_of(0, rank)[:, :-1]), model.state_dict,
            reducer.synchronize,
        ]  # fmt: skip
        if kind == "overlap":
            calls += [optimizer.step, optimizer.state_dict]
        for call in calls:
            with pytest.raises(StepError):
                call()
            refused += 1
        return {
            "text": str(error), "stepped": error.stepped, "missing": error.missing,
            "refused": refused == len(calls), "number": number,
        }  # fmt: skip
    return "finished"


@pytest.mark.parametrize(
    ("kind", "replicas", "phase"),
    [
        ("overlap", 1, "forward"), ("overlap", 1, "backward"), ("overlap", 1, "after backward"),
        ("overlap", 1, "after step"), ("overlap", 2, "forward"), ("overlap", 2, "backward"),
        ("plain", 1, "backward"),
    ],
)  # fmt: skip
def test_a_killed_rank_ends_the_others_with_its_name(phase, kind, replicas):
    layout = Layout.one_node(4) if replicas == 1 else Layout.two_zones(1, 2)
    outcomes = run(
        dies, layout, phase, kind, replicas, environment=LIVENESS, lost_ranks=[BAD],
        timeout_seconds=PATIENCE_SECONDS, deadline_seconds=PATIENCE_SECONDS,
    )  # fmt: skip
    for outcome in outcomes:
        if outcome.rank == BAD:
            continue
        assert outcome.failure is None, outcome
        found = outcome.value
        assert found, outcome
        assert found != "finished"
        text = found["text"]
        # A group of some ranks numbers them from 0, and the message has both numbers.
        named = "rank 1 on node a0" in text or (
            "ranks 1, 3, numbered 0, 1" in text and "rank 0 on node a0" in text
        )
        assert named, text
        assert found["refused"]
        if found["stepped"] and found["missing"]:
            assert "load a checkpoint on every rank" in text
            assert "blocks." in text


def one_rank_skips(rank, size):
    """Rank 1 does not use a layer of the others: the scatters differ, and that is an error."""
    model, optimizer, _ = sharding.build("overlap", extra="unused")
    try:
        for number in range(2):
            tokens = training.tokens_of(number, rank)
            loss = training.loss_of(model, tokens)
            if rank != 1:
                loss = loss + model.never(torch.ones(1, 2, sharding.WIDTH)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.state_dict()
    except StepError as error:
        return str(error)
    return None


def test_a_layer_that_one_rank_does_not_use_is_an_error_on_all():
    outcomes = run(
        one_rank_skips, Layout.one_node(3), timeout_seconds=20, deadline_seconds=PATIENCE_SECONDS
    )
    for outcome in outcomes:
        assert outcome.value, outcome
        assert "rank" in outcome.value
