"""Pipelines of training scripts in less common uses: labels, outputs, replaced layers, errors."""

import pytest
import torch
from haiscale.pipeline import PipeDream, partition
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
