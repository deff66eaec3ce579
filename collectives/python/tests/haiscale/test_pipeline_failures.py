"""haiscale.pipeline when a rank raises, dies, hangs or differs: every rank ends with an error that
names rank, stage and micro-batch, and no optimizer has stepped.
"""

import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from haiscale.ddp import ModelMismatchError
from haiscale.pipeline.errors import PipelineError
from haiscale.pipeline.module import Pipeline
from hfreduce import CollectiveError
from hfreduce.testing import Layout, run, values
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import pipelines

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300, func_only=True)]

LIVENESS = {"HFREDUCE_LIVENESS_SECONDS": "6"}
RANKS, MICROBATCHES, BAD = 4, 8, 2
PATIENCE_SECONDS = 100


class Trap(nn.Module):
    """Passes its input on, and does something in one of its forward or backward passes."""

    def __init__(self, what, at):
        super().__init__()
        self.what, self.at, self.count = what, at, 0

    def forward(self, x):
        self.count += torch.is_grad_enabled()
        if self.count - 1 == self.at:
            if self.what == "raise":
                raise KeyError("a wrong key")
            if self.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "hang":
                threading.Event().wait(PATIENCE_SECONDS)
            if self.what == "shape":
                return torch.cat([x, x])
            if self.what == "backward":
                return _Raise.apply(x)
        return x


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("a wrong gradient")


def fails(rank, size, name, what, at, timeout_seconds):
    """Trains with a trap in stage 2; reports how the failing step ends."""
    layers = pipelines.model()
    if rank == BAD:
        # After the module whose name all ranks describe, so that the models agree.
        block = layers["blocks.3"]
        trap = Trap(what, at)
        block.register_forward_hook(lambda module, args, output: trap(output))
    pipeline = Pipeline(
        layers, pipelines.schedule_of(name, size, MICROBATCHES), pipelines.loss_fn,
        split=[2, 2, 2, 2] if name != "ZBVZeroBubble" else None,
        timeout=timedelta(seconds=timeout_seconds),
    )  # fmt: skip
    optimizer = pipelines.optimizer_of(list(pipeline.parameters()))
    for step in range(4):
        before = {n: p.detach().clone() for n, p in pipeline.module.named_parameters()}
        optimizer.zero_grad()
        try:
            pipeline.step(*pipelines.batch(step, MICROBATCHES))
        except PipelineError as error:
            with pytest.raises(PipelineError, match="restart the job"):
                pipeline.step(*pipelines.batch(step, MICROBATCHES))
            same = all(torch.equal(p, before[n]) for n, p in pipeline.module.named_parameters())
            return {
                "text": str(error), "step": step, "same": same, "rank": error.rank,
                "stage": error.stage, "microbatch": error.microbatch, "peer": error.peer,
            }  # fmt: skip
        optimizer.step()
    return "finished"


def outcomes_of(name, what, at, timeout_seconds=PATIENCE_SECONDS, lost=()):
    outcomes = run(
        fails, Layout.one_node(RANKS), name, what, at, timeout_seconds, environment=LIVENESS,
        timeout_seconds=PATIENCE_SECONDS, deadline_seconds=PATIENCE_SECONDS, lost_ranks=lost,
    )  # fmt: skip
    reports = []
    for outcome in outcomes:
        if outcome.rank in lost:
            continue
        assert outcome.failure is None, outcome
        assert outcome.value != "finished", outcome
        reports.append(outcome.value)
    # The first pass of a stage finds out shapes: pass 8 k + 1 + i is micro-batch i of step k.
    assert len({(report["step"], report["same"]) for report in reports}) == 1, reports
    assert all(report["same"] for report in reports)
    return reports


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise", "forward pass: KeyError: 'a wrong key'"),
        ("backward", "backward pass: ValueError: a wrong gradient"),
        ("shape", "activation 0 has shape (8, 8, 48)"),
    ],
)
def test_an_exception_ends_all_ranks_with_its_place(name, what, words):
    reports = outcomes_of(name, what, 8 + 1 + 3)
    for rank, report in enumerate(reports):
        assert report["step"] == 1
        assert f"rank {BAD}, stage 2, micro-batch 3: " in report["text"], report
        assert words in report["text"], report
        assert report["rank"] == rank
    own = reports[BAD]
    assert (own["stage"], own["microbatch"], own["peer"]) == (2, 3, None)


def test_an_exception_in_the_first_pass_of_all_ends_all_ranks():
    for report in outcomes_of("1F1B", "raise", 0):
        assert report["step"] == 0
        assert f"rank {BAD}, stage 2, micro-batch 0: forward pass: KeyError" in report["text"]


def loses(rank, size, at):
    """Trains with a loss that raises for one micro-batch; reports the error."""
    count = 0

    def loss_fn(logits, tokens):
        nonlocal count
        count += 1
        if count - 1 == at:
            raise ZeroDivisionError("no tokens")
        return pipelines.loss_fn(logits, tokens)

    schedule = pipelines.schedule_of("1F1B", size, MICROBATCHES)
    pipeline = Pipeline(pipelines.model(), schedule, loss_fn)
    with pytest.raises(PipelineError) as caught:
        pipeline.step(*pipelines.batch(0, MICROBATCHES))
    return str(caught.value)


@pytest.mark.parametrize(("at", "microbatch"), [(0, 0), (1 + 3, 3)])
def test_an_exception_of_the_loss_ends_all_ranks_with_its_place(at, microbatch):
    """The first loss is that of the pass that finds out shapes."""
    place = f"rank 1, stage 1, micro-batch {microbatch}: loss: ZeroDivisionError: no tokens"
    for text in values(run(loses, Layout.one_node(2), at, environment=LIVENESS)):
        assert place in text


def test_a_killed_rank_is_named():
    for report in outcomes_of("1F1B", "die", 8 + 1 + 3, lost=[BAD]):
        assert f"rank {BAD}" in report["text"], report


def test_a_wait_for_a_hanging_rank_ends_with_stage_micro_batch_and_peer():
    """Each rank names the one that it waits for; the chain ends at the hanging one."""
    reports = outcomes_of("1F1B", "hang", 8 + 1 + 3, timeout_seconds=15, lost=[BAD])
    places = [(r["rank"], r["stage"], r["microbatch"], r["peer"]) for r in reports]
    assert places == [(0, 0, 2, 1), (1, 1, 2, BAD), (3, 3, 3, BAD)], reports
    assert "waiting for the gradient from stage 2 on rank 2: " in reports[1]["text"]
    assert "waiting for the activation from stage 2 on rank 2: " in reports[2]["text"]


def uneven(rank, size, kind):
    """Passes micro-batches that are not equal."""
    inputs, targets = pipelines.batch(0, MICROBATCHES)
    if kind == "rows":
        inputs = inputs[:-1]
    elif kind == "list":
        inputs = [*inputs.split(4)]
        inputs[5] = inputs[5][:3]
    elif kind == "targets":
        targets = [*targets.split(4)]
        targets[6] = targets[6][:, :4]
    elif kind == "count":
        inputs = [*inputs.split(4), inputs[:4]]
    elif kind == "missing":
        inputs = None
    try:
        pipeline = Pipeline(
            pipelines.model(), pipelines.schedule_of("1F1B", size, MICROBATCHES), pipelines.loss_fn
        )
        pipeline.step(inputs, targets)
    except (PipelineError, CollectiveError) as error:
        # The latter where the group ends before the rank has compared its model with the others'.
        return str(error)
    return "finished"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("rows", "rank 0, stage 0: inputs: 31 rows cannot be divided into 8 equal micro-batches"),
        ("list", "rank 0, stage 0, micro-batch 5: inputs: this micro-batch is (3, 8)"),
        ("targets", "rank 3, stage 3, micro-batch 6: targets: this micro-batch is (4, 4)"),
        ("count", "rank 0, stage 0: inputs: 9 micro-batches, but the schedule has 8"),
        ("missing", "rank 0, stage 0: inputs are missing"),
    ],
)
def test_unequal_micro_batches_end_all_ranks(kind, words):
    for outcome in run(uneven, Layout.one_node(RANKS), kind):
        assert outcome.failure is None, outcome
        assert words in outcome.value, outcome


def differs(rank, size, kind):
    """Rank 2 passes something else than the others."""
    bad = rank == BAD
    name = "Eager1F1B" if bad and kind == "schedule" else "1F1B"
    layers = pipelines.model(tied=bad and kind == "tied")
    if bad and kind == "width":
        layers["blocks.5"].wide = nn.Linear(pipelines.WIDTH, 64)
    if bad and kind == "frozen":
        layers["embed"].requires_grad_(False)
    split = [2, 2, 2, 2] if not (bad and kind == "split") else [1, 3, 2, 2]
    count = 16 if bad and kind == "micro-batches" else MICROBATCHES
    Pipeline(layers, pipelines.schedule_of(name, size, count), pipelines.loss_fn, split=split)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("schedule", "at 'schedule': schedule Eager1F1B, 8 micro-batches"),
        ("micro-batches", "at 'schedule': schedule 1F1B, 16 micro-batches"),
        ("split", "at 'stage 0': stage 0 embed on rank 2, stage 0 embed blocks.0 on rank 0"),
        ("width", "at 'blocks.5.wide.weight'"),
        ("frozen", "at 'embed.weight'"),
        ("tied", "at 'shared'"),
    ],
)
def test_a_rank_with_another_schedule_or_model_is_refused_before_the_first_step(kind, words):
    for outcome in run(differs, Layout.one_node(RANKS), kind):
        assert outcome.failure.type == ModelMismatchError.__name__
        assert "rank 2" in outcome.failure.text
        assert words in outcome.failure.text, outcome.failure
