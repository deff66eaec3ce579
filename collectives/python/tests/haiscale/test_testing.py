"""Timed layers: the order and the duration of their parts, and gradients as computed by autograd.

Sleeps are recorded instead of made.
"""

import pytest
import torch
from haiscale import testing
from haiscale.testing import TimedLayer, timed_model
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

pytestmark = pytest.mark.torch

SECONDS = {"forward_seconds": 1.0, "input_backward_seconds": 10.0, "weight_backward_seconds": 100.0}


@pytest.fixture
def sleeps(monkeypatch):
    """The seconds of each sleep; the clock stands still."""
    seconds = []
    monkeypatch.setattr(testing.time, "monotonic", lambda: 50.0)
    monkeypatch.setattr(testing.time, "sleep", seconds.append)
    return seconds


def test_each_pass_takes_its_time(sleeps):
    model = timed_model(2, 4, 8, **SECONDS)
    y = model(torch.ones(3, 4, requires_grad=True))
    assert sleeps == [1.0, 1.0]
    sleeps.clear()
    y.sum().backward()
    assert sleeps == [10.0, 100.0] * 2, "the last layer first: its input, then its weight"


def test_the_first_layer_does_not_compute_an_unused_gradient(sleeps):
    timed_model(2, 4, 8, **SECONDS)(torch.ones(3, 4)).sum().backward()
    assert sleeps == [1.0, 1.0, 10.0, 100.0, 100.0]


def test_the_backward_pass_can_be_split_as_zero_bubble_schedules_do(sleeps):
    model = timed_model(2, 4, 8, **SECONDS)
    x = torch.ones(3, 4, requires_grad=True)
    y = model(x)
    sleeps.clear()
    (input_gradient,), groups = stage_backward_input(
        [y], [torch.ones_like(y)], [x], model.parameters()
    )
    assert sleeps == [10.0, 10.0]
    sleeps.clear()
    stage_backward_weight(model.parameters(), groups)
    assert sleeps == [100.0, 100.0]
    split = [input_gradient, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    x.grad = None
    model(x).sum().backward()
    whole = [x.grad, *(parameter.grad for parameter in model.parameters())]
    assert all(a.equal(b) for a, b in zip(split, whole, strict=True))


def test_a_late_part_does_not_sleep(monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(testing.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(testing.time, "sleep", lambda seconds: pytest.fail(f"slept {seconds}"))
    TimedLayer(4, 8, 5.0)(torch.ones(3, 4)).sum().backward()


def test_gradients_are_those_of_the_formula(sleeps):
    layer = TimedLayer(4, 12, 0.0).double()
    x = torch.rand(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))
    layer(x).square().sum().backward()
    twin = layer.weight.detach().clone().requires_grad_()
    (x * (1 + (twin / torch.tensor([[3.0], [6.0], [9.0]])).sum(0))).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, twin.grad)
    assert layer.weight.grad.unique(dim=0).shape == layer.weight.grad.shape, "each row differs"


def test_values_depend_on_the_seed_alone():
    first, second = (timed_model(2, 4, 8, 0.0) for _ in range(2))
    torch.manual_seed(7)
    third = timed_model(2, 4, 8, 0.0)
    for model in (second, third):
        assert all(a.equal(b) for a, b in zip(first.parameters(), model.parameters(), strict=True))
    assert not first[0].weight.equal(first[1].weight)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((4, 6, 0.0), "invalid parameters 6: expected a multiple of the width 4"),
        ((4, 0, 0.0), "invalid parameters 0"),
        ((0, 0, 0.0), "invalid parameters 0"),
        ((4, 4, -1.0), "invalid forward_seconds -1.0"),
        ((4, 4, float("nan")), "invalid forward_seconds nan"),
    ],
)
def test_invalid_sizes_and_times_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        TimedLayer(*arguments)
