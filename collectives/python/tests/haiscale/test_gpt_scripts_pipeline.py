"""haiscale.pipeline's names of training scripts: stages on ranks, and their replicas."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from haiscale.ddp import DistributedDataParallel, groups
from haiscale.pipeline import (
    GPipe,
    Interleaved1F1B,
    PipeDream,
    SequentialModel,
    make_subgroups,
    partition,
)
from haiscale.pipeline.errors import PartitionError, PipelineError
from hfreduce.testing import Layout, run, values
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import gpt_scripts as gpts

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200, func_only=True)]

CHUNKS, STEPS = 4, 4
BALANCE = [3, 3]
LAYERS = {
    "PipeDream": [range(3), range(3, 6)],
    "GPipe": [range(3), range(3, 6)],
    "Interleaved1F1B": [[0, 1, 4], [2, 3, 5]],
}
"""Of each rank."""
STABLE = {"HFREDUCE_DETERMINISM": "stable"}


def on_ranks(function, ranks, *arguments):
    return values(run(function, Layout.one_node(ranks), *arguments, environment=STABLE))


def trains(rank, size, method, replicas):
    """A script: pipelines of two ranks, and replicas of each stage if there are four ranks."""
    dp_group, pp_group = make_subgroups(pp_size=size // replicas)
    stage, stages = pp_group.rank(), pp_group.size()
    model = gpts.GPT(seed=7 if dp_group.rank() == 0 else 8).core
    if method == "Interleaved1F1B":
        parts = partition(model, stage, stages, num_model_chunks=2)
        if replicas > 1:
            parts = [DistributedDataParallel(part, process_group=dp_group) for part in parts]
        pipeline = Interleaved1F1B(parts, CHUNKS, process_group=pp_group)
    else:
        part = partition(model, stage, stages, balance=BALANCE)
        if replicas > 1:
            part = DistributedDataParallel(part, process_group=dp_group)
        if method == "GPipe":
            pipeline = GPipe(part, CHUNKS, process_group=pp_group, checkpoint="except_last")
        else:
            pipeline = PipeDream(part, CHUNKS, process_group=pp_group)
    criterion, is_last = gpts.Loss(CHUNKS), stage == stages - 1
    started, start = [], groups.allreduce
    groups.allreduce = lambda *args: (started.append(args), start(*args))[1]
    optimizer = gpts.optimizer_of(pipeline)
    history = []
    for step in range(STEPS):
        pipeline.train()
        tokens = gpts.batch(step, dp_group.rank(), replicas)
        losses, outputs = pipeline.forward_backward(tokens, criterion=criterion, labels=(tokens,))
        gpts.clip(pipeline.parameters())
        optimizer.step()
        optimizer.zero_grad()
        assert (losses is None, outputs is None) == (not is_last, not is_last)
        if is_last:
            assert losses.shape == (CHUNKS,)
            assert outputs.shape == (len(tokens), gpts.CONTEXT, gpts.WORDS)
            assert torch.allclose(gpts.Loss()(outputs, tokens), losses.sum(), atol=1e-5)
            history.append(sum(losses.tolist()))
    pipeline.eval()
    with torch.no_grad():
        tokens = gpts.batch(100)
        logits = pipeline(tokens)
    assert (logits is None) == (not is_last)
    validation = gpts.Loss()(logits, tokens).item() if is_last else None
    modules = list(pipeline.module) if method == "Interleaved1F1B" else [pipeline.module]
    # Gradients are averaged once in a step, not for each micro-batch: in one bucket of each stage.
    assert len(started) == (STEPS * len(modules) if replicas > 1 else 0)
    if replicas > 1:
        for module in modules:
            module.reducer.stop()
        modules = [module.module for module in modules]
    state = {
        f"core.{n}": p for module in modules for n, p in gpts.plain(module.state_dict()).items()
    }
    dist.barrier()
    return dp_group.rank(), stage, history, validation, state


@pytest.mark.parametrize("method", ["PipeDream", "GPipe", "Interleaved1F1B"])
def test_a_pipeline_trains_as_one_process_that_accumulates(method):
    losses, validation, expected = gpts.reference(STEPS, chunks=CHUNKS, clipped=LAYERS[method])
    outcomes = on_ranks(trains, 2, method, 1)
    assert outcomes[1][2] == losses
    assert outcomes[1][3] == pytest.approx(validation, abs=1e-5)
    assert losses[-1] < losses[0]
    merged = {name: p for *_, state in outcomes for name, p in state.items()}
    assert merged.keys() == expected.keys()
    assert all(np.array_equal(merged[name], expected[name]) for name in expected)


@pytest.mark.parametrize("method", ["PipeDream", "Interleaved1F1B"])
def test_replicas_in_a_pipeline_train_on_the_batches_of_all(method):
    losses, validation, expected = gpts.reference(
        STEPS, size=2, chunks=CHUNKS, clipped=LAYERS[method]
    )
    outcomes = on_ranks(trains, 4, method, 2)
    assert {each[:2] for each in outcomes} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    last = [each for each in outcomes if each[1] == 1]
    for pair, loss in zip(zip(*(each[2] for each in last), strict=True), losses, strict=True):
        assert sum(pair) / 2 == pytest.approx(loss, abs=1e-4)
    for *_, own, state in outcomes:
        assert own is None or own == pytest.approx(validation, abs=1e-4)
        assert not gpts.differences(state, expected)


def groups_with(rank, size, variables):
    for name in ("FLYER_TOPOLOGY", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        groups = make_subgroups(pp_size=2)
    except ValueError as error:
        return str(error)
    return [dist.get_process_group_ranks(group) for group in groups]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        # Four nodes with one rank, two with two, as WORLD_SIZE counts them; then by torchrun.
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, [[0, 2], [0, 1]]),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, [[0, 1], [0, 2]]),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, [[0, 1], [0, 2]]),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, [[0, 1], [0, 2]]),
        ({"WORLD_SIZE": "1"}, [[0, 1], [0, 2]]),
        ({}, [[0, 1], [0, 2]]),
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE=3, but the default group has 4 ranks: start the same"),
    ],
)  # fmt: skip
def test_world_size_counts_nodes_or_ranks(variables, expected):
    found = on_ranks(groups_with, 4, variables)[0]
    assert found == expected if isinstance(expected, list) else found.startswith(expected)


class Two(nn.Module):
    """Two inputs, two outputs: the tuple goes to the next layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y):
        return self.linear(x) + y, y


def passes_tuples(rank, size):
    torch.manual_seed(3)
    model = SequentialModel(*(Two() for _ in range(4)))
    x, y, target = torch.rand(3, 8, 4).unbind()

    def criterion(outputs, target):
        return (outputs[0] - target).square().sum()

    losses = criterion(model(x, y), target)
    losses.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    pipeline = PipeDream(partition(model, rank, size), 2)
    own, outputs = pipeline.forward_backward(x, y, criterion=criterion, labels=[target])
    with torch.no_grad():
        evaluated = pipeline(x[:7], y[:7])  # parts of four and three rows
        if rank == size - 1:
            assert torch.allclose(own.sum(), losses)
            whole = model.to("cpu")(x, y)
            assert all(torch.allclose(a, b) for a, b in zip(outputs, whole, strict=True))
            assert all(torch.allclose(a, b[:7]) for a, b in zip(evaluated, whole, strict=True))
    own, outputs = pipeline.forward_backward(
        x, y, criterion=criterion, labels=[target], return_outputs=False
    )
    assert outputs is None
    return [
        torch.allclose(p.grad, 2 * expected[name], atol=1e-4)
        for name, p in pipeline.module.named_parameters()
    ]


def test_layers_pass_tuples_and_outputs_may_be_dropped():
    for found in on_ranks(passes_tuples, 2):
        assert len(found) == 4
        assert all(found)


def counts(rank, size, checkpoint):
    """Forward passes of this rank's first layer in the second step."""
    part = partition(gpts.GPT().core, rank, size)
    pipeline = GPipe(part, CHUNKS, checkpoint=checkpoint)
    calls = []
    part[0].register_forward_pre_hook(lambda *_: calls.append(len(calls)))
    for step in range(2):
        calls.clear()
        tokens = gpts.batch(step)
        pipeline.forward_backward(tokens, criterion=gpts.Loss(CHUNKS), labels=(tokens,))
    return len(calls)


@pytest.mark.parametrize(
    ("checkpoint", "passes"),
    [("never", CHUNKS), ("except_last", 2 * CHUNKS - 1), ("always", 2 * CHUNKS)],
)
def test_chosen_micro_batches_are_recomputed(checkpoint, passes):
    assert on_ranks(counts, 2, checkpoint) == [passes] * 2


def shares(rank, size):
    """The first and the last layer share a matrix."""
    torch.manual_seed(2)
    middle = [nn.Linear(8, 8) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(16, 8), *middle, nn.Linear(8, 16, bias=False))
    model[3].weight = model[0].weight
    tokens = torch.arange(16).view(4, 4)
    gpts.Loss()(model(tokens), tokens).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False)}
    model.zero_grad()
    pipeline = PipeDream(partition(model, rank, size), 2)
    pipeline.forward_backward(tokens, criterion=gpts.Loss(2), labels=(tokens,))
    state = pipeline.module.named_parameters()
    return {name: torch.allclose(p.grad, expected[name], atol=1e-6) for name, p in state}


def test_a_matrix_of_two_stages_gets_both_gradients():
    first, last = on_ranks(shares, 2)
    assert first == {"0.weight": True, "1.weight": True, "1.bias": True}
    assert last == {"2.weight": True, "2.bias": True, "3.weight": True}


def misuses(rank, size, kind):
    model = gpts.GPT().core
    part = partition(model, rank, size)
    if kind == "whole model":
        PipeDream(model, CHUNKS)
    elif kind == "another rank":
        PipeDream(partition(model, min(rank + 1, size - 1), size), CHUNKS)
    elif kind == "one chunk":
        Interleaved1F1B(partition(model, rank, size, num_model_chunks=2)[:1], 4)
    elif kind == "some wrapped":
        first, second = partition(model, rank, size, num_model_chunks=2)
        alone = dist.new_group([rank], use_local_synchronization=True)
        Interleaved1F1B([DistributedDataParallel(first, process_group=alone), second], 4)
    elif kind == "few chunks":
        PipeDream(part, 1)
    elif kind == "no list":
        Interleaved1F1B(part, 4)
    elif kind == "checkpoint":
        GPipe(part, CHUNKS, checkpoint="sometimes")
    elif kind == "gradients":
        PipeDream(part, CHUNKS)(gpts.batch(0))
    elif kind.startswith("subgroups"):
        make_subgroups(pp_size=int(kind.removeprefix("subgroups ")))


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("whole model", "PartitionError", "the module is of type Sequential: pass what partition"),
        ("another rank", "PartitionError", "that of rank 1 of 2, but this is rank 0 of 2"),
        ("one chunk", "PartitionError", "4 stages, but 2 ranks pass 1 each"),
        ("some wrapped", "PartitionError", "some stages have a DistributedDataParallel"),
        ("few chunks", "ScheduleError", "1 micro-batches do not fill 2 ranks"),
        ("no list", "UnsupportedArgumentError", "modules='ModelPart': pass the list that"),
        ("checkpoint", "UnsupportedArgumentError", "checkpoint='sometimes': pass one of always"),
        ("gradients", "RuntimeError", "call forward_backward to train, or use torch.no_grad()"),
        ("subgroups 3", "LayoutError", "pp_size=3 does not divide the 2 ranks of the default"),
        ("subgroups 0", "LayoutError", "pp_size=0 does not divide the 2 ranks of the default"),
    ],
)
def test_misuse_is_refused_on_every_rank(kind, error, words):
    for outcome in run(misuses, Layout.one_node(2), kind):
        assert outcome.failure is not None, outcome
        assert outcome.failure.type == error, outcome
        assert words in outcome.failure.text


def raises(*_):
    raise KeyError("a wrong key")


def fails_in_evaluation(rank, size):
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    pipeline = PipeDream(partition(model, rank, size), CHUNKS)
    if rank == 1:
        pipeline.module[0].register_forward_hook(raises)
    # Of this size a send waits for its receive: the first stage learns of the failure.
    with torch.no_grad(), pytest.raises(PipelineError) as raised:
        pipeline(torch.rand(4 * CHUNKS, 512))
    return str(raised.value)


def test_an_exception_in_evaluation_ends_all_ranks_with_its_place():
    for text in on_ranks(fails_in_evaluation, 2):
        assert "stage 1, micro-batch 0: forward pass: KeyError: 'a wrong key'" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": nn.Linear(1, 1)}, "model is of type Linear: pass an nn.Sequential"),
        ({"rank": 2}, "rank 2 of size 2: expected a rank from 0 to 1"),
        ({"balance": [5, 2]}, "split [5, 2] does not divide 6 layers into 2 stages"),
        ({"num_model_chunks": 0}, "num_model_chunks=0: expected at least 1"),
    ],
)
def test_partition_refuses_what_does_not_fit(arguments, words):
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(6)))
    with pytest.raises(PartitionError) as raised:
        partition(**{"model": model, "rank": 0, "size": 2, **arguments})
    assert words in str(raised.value)
