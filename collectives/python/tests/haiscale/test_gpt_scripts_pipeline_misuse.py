"""Pipelines of training scripts in less common uses: labels, outputs, replaced layers, errors."""

import copy

import pytest
import torch
from haiscale.pipeline import GPipe, PipeDream, partition
from haiscale.pipeline.errors import PipelineError
from hfreduce.testing import Layout, run, values
from torch import nn

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200, func_only=True)]

CHUNKS = 2


def on_ranks(function, *arguments, ranks=2):
    return values(run(function, Layout.one_node(ranks), *arguments))


def layers(count=4):
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def squares(outputs, *labels):
    return (outputs - sum(labels)).square().sum()


def learns_from_labels(rank, size, count):
    """Losses, and whether the gradients are those of one process."""
    model = layers()
    x, *labels = torch.rand(1 + count, 8, 4, generator=torch.Generator().manual_seed(1)).unbind()
    expected = squares(model(x), *labels)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    pipeline = PipeDream(partition(model, rank, size), CHUNKS)
    losses, _ = pipeline.forward_backward(x, criterion=squares, labels=labels)
    for name, parameter in pipeline.module.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
    return None if losses is None else (losses.sum().item(), expected.item())


@pytest.mark.parametrize("count", [0, 2])
def test_a_criterion_has_any_number_of_labels(count):
    first, (losses, expected) = on_ranks(learns_from_labels, count)
    assert first is None
    assert losses == pytest.approx(expected)


class Squares(nn.Module):
    """A criterion with a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, outputs):
        return self.weight * outputs.square().sum()


def changes_the_criterion(rank, size):
    pipeline = PipeDream(partition(layers(), rank, size), CHUNKS)
    names = list(pipeline.state_dict())
    for criterion in (Squares(), squares, Squares()):
        pipeline.forward_backward(torch.rand(8, 4), criterion=criterion)
    assert list(pipeline.state_dict()) == names
    return len(list(pipeline.parameters()))


def test_a_criterion_is_of_one_step_and_not_part_of_the_pipeline():
    assert on_ranks(changes_the_criterion) == [4, 4]


def passes_other_rows(rank, size, kind):
    """One rank alone passes rows that do not divide: no rank waits for it."""
    pipeline = PipeDream(partition(layers(), rank, size), CHUNKS)
    x = torch.rand(8 + (rank == (1 if kind == "labels" else 0)), 4)

    def computes():
        # A rank may still be in this step when the other one fails in the next.
        pipeline.forward_backward(torch.rand(8, 4), criterion=squares)
        if kind != "evaluation":
            pipeline.forward_backward(x, criterion=squares, labels=(x,))
        with torch.no_grad():
            pipeline(torch.rand(8, 4), x)

    with pytest.raises(PipelineError) as raised:
        computes()
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "rank", "words"),
    [
        ("inputs", 0, "rank 0, stage 0: inputs[0]: 9 rows cannot be divided into 2"),
        ("labels", 1, "rank 1, stage 1: labels[0]: 9 rows cannot be divided into 2"),
        ("evaluation", 0, "rank 0, stage 0: inputs have [8, 9] rows: pass tensors with the same"),
    ],
)
def test_rows_of_one_rank_that_do_not_divide_end_the_step_of_all(kind, rank, words):
    texts = on_ranks(passes_other_rows, kind)
    assert words in texts[rank]
    assert words in texts[1 - rank]


class Auxiliary(nn.Linear):
    """Its second output has no dimensions."""

    def forward(self, x):
        output = super().forward(x)
        return output, output.square().mean()


class Total(nn.Linear):
    """Its only output has no dimensions."""

    def forward(self, x):
        return super().forward(x).sum()


def total(outputs):
    return outputs[0].sum() + outputs[1] if isinstance(outputs, tuple) else outputs


def has_outputs_without_dimensions(rank, size, is_tuple):
    model = nn.Sequential(nn.Linear(4, 4), Auxiliary(4, 4) if is_tuple else Total(4, 4))
    x = torch.rand(8, 4)
    pipeline = PipeDream(partition(model, rank, size), CHUNKS)
    losses, outputs = pipeline.forward_backward(x, criterion=total)
    with torch.no_grad():
        evaluated = pipeline(x)
    if rank == 0:
        return None
    torch.testing.assert_close(outputs, evaluated)
    found = outputs if is_tuple else [outputs]
    return [tuple(each.shape) for each in (losses, *found)]


@pytest.mark.parametrize(
    ("is_tuple", "shapes"),
    [(False, [(CHUNKS,), (CHUNKS,)]), (True, [(CHUNKS,), (8, 4), (CHUNKS,)])],
)
def test_outputs_without_dimensions_become_vectors(is_tuple, shapes):
    assert on_ranks(has_outputs_without_dimensions, is_tuple)[1] == shapes


class Ragged(nn.Linear):
    """The number of its columns is different in each micro-batch."""

    def __init__(self):
        super().__init__(4, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)[:, : self.calls]


def has_outputs_of_other_shapes(rank, size):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), Ragged())
    pipeline = PipeDream(partition(model, rank, size), CHUNKS)
    with pytest.raises(PipelineError) as raised:
        pipeline.forward_backward(torch.rand(8, 4), criterion=torch.sum)
    return str(raised.value)


def test_outputs_that_cannot_be_joined_end_the_step_of_all_ranks():
    for text in on_ranks(has_outputs_of_other_shapes):
        assert "rank 1, stage 1, micro-batch 0: loss: ValueError: the outputs have the" in text
        assert "[(4, 2)] after [(4, 1)]: make all dimensions but the first equal" in text


def normalizes(rank, size, checkpoint):
    """Whether the running statistics are those of one process with the same micro-batches."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
    x = torch.rand(8, 4, generator=torch.Generator().manual_seed(1))
    expected = copy.deepcopy(model)
    for part in x.chunk(CHUNKS):
        squares(expected(part)).backward()
    pipeline = GPipe(partition(model, rank, size), CHUNKS, checkpoint=checkpoint)
    pipeline.forward_backward(x, criterion=squares)
    state = dict(expected.named_buffers())
    return {n: torch.equal(b, state[n]) for n, b in pipeline.module.named_buffers()}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_batch_normalization_counts_each_micro_batch_once(checkpoint):
    for found in on_ranks(normalizes, checkpoint):
        assert len(found) == 3
        assert all(found.values()), found
