"""haiscale.ddp: two wrappers, optimizers that it does not know, and steps after errors."""

import pytest
import torch
import torch.distributed as dist
from haiscale.ddp import DistributedDataParallel, StepError
from hfreduce.testing import Layout, run, values
from torch import nn

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120, func_only=True)]


def on_ranks(function, *arguments):
    results = values(run(function, Layout.one_node(2), *arguments, timeout_seconds=20.0))
    assert results[0] == results[1]
    return results[0]


def layers(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def wrapped(model, *optimizers):
    return DistributedDataParallel(model, optimizer=optimizers, bucket_cap_mb=1e-5)


def train(ddp, *optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    ddp(torch.ones(2, 4)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def weights(model):
    return [p.tolist() for p in model.parameters()]


def reference(steps):
    model = layers()
    optimizer = sgd(model.parameters())
    for _ in range(steps):
        train(model, optimizer)
    return weights(model)


def wraps_again(rank, size, closes):
    model = layers()
    optimizer = sgd(model.parameters())
    first = wrapped(model, optimizer)
    train(first, optimizer)
    if closes:
        first.close()
        optimizer = sgd(model.parameters())
    try:
        second = wrapped(model, optimizer)
    except ValueError as error:
        return str(error)
    train(second, optimizer)
    second.synchronize()
    return weights(model)


def test_a_second_wrapper_of_a_parameter_is_refused_until_the_first_is_closed():
    assert on_ranks(wraps_again, False).startswith(
        "the gradient of '0.weight' is averaged by another DistributedDataParallel: call its close"
    )
    assert on_ranks(wraps_again, True) == reference(2)


def steps_after_an_error(rank, size):
    model = layers()
    optimizer = sgd(model.parameters())
    ddp = wrapped(model, optimizer)
    before = weights(model)
    both = dist.new_group()  # the step that fails ends all waits of the model's group

    def fails(_gradient):
        raise ValueError("in backward")

    model[0].weight.register_hook(fails)
    with pytest.raises(ValueError, match="in backward"):
        ddp(torch.ones(2, 4)).square().mean().backward()
    dist.barrier(both)  # the gradients of both have failed
    with pytest.raises(StepError, match="the last backward pass did not complete"):
        optimizer.step()
    ddp.reset()
    return weights(model) == before


def test_a_step_after_a_backward_pass_that_raised_changes_nothing():
    assert on_ranks(steps_after_an_error)


def other_optimizer(rank, size):
    model = layers()
    known, other = sgd(model[:2].parameters()), sgd(model[2:].parameters())
    ddp = wrapped(model, known)
    for _ in range(2):
        train(ddp, other, known)
    ddp.synchronize()
    return str(ddp.whole_step), weights(model)


def test_an_optimizer_that_was_not_passed_gets_the_averages():
    assert on_ranks(other_optimizer) == ("OtherOptimizer", reference(2))


def raises_at_the_request(rank, size):
    """Adam refuses the sparse gradient of an embedding that is not wrapped."""
    model, embedding = layers(), nn.Embedding(4, 4, sparse=True)
    optimizer = torch.optim.Adam([*model.parameters(), *embedding.parameters()])
    ddp = wrapped(model, optimizer)
    before = weights(model)
    ddp(embedding(torch.tensor([1, 2]))).square().mean().backward()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()
    ddp.synchronize()
    ddp(torch.ones(2, 4))
    return weights(model) == before


def test_a_step_that_raises_at_its_request_is_not_made_later():
    assert on_ranks(raises_at_the_request)


class Counting(torch.optim.SGD):
    """It counts its steps in its parameter groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 1000) + 1000
        return super().step(closure)


def changes_its_groups(rank, size):
    model = layers()
    optimizer = Counting([{"params": model.parameters(), "steps": 1000}], lr=0.1)
    ddp = wrapped(model)
    ddp.overlap(optimizer, independent=True)

    def trains():
        train(ddp, optimizer)
        ddp.synchronize()

    with pytest.raises(StepError, match="Counting changes its parameter groups in a step"):
        trains()


def test_an_optimizer_that_changes_its_groups_in_a_step_is_refused():
    on_ranks(changes_its_groups)


class Stages(nn.Module):
    """Returns what its layers compute, and a parameter."""

    def __init__(self):
        super().__init__()
        self.layers = layers(6)

    def forward(self, x):
        return [x := layer(x) for layer in self.layers], self.layers[0].bias


def intermediate_outputs(rank, size):
    model = Stages()
    optimizer = sgd(model.parameters())
    ddp = wrapped(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        outputs, _ = ddp(torch.ones(2, 4))
        sum(each.square().mean() for each in outputs).backward()
        in_flight = len(ddp.reducer.in_flight)
        optimizer.step()
    ddp.synchronize()
    hooks = model.layers[0].bias._backward_hooks
    return in_flight, len(ddp.reducer.buckets), len(hooks or ())


def test_outputs_that_depend_on_each_other_do_not_end_the_overlap():
    in_flight, buckets, hooks = on_ranks(intermediate_outputs)
    assert in_flight == buckets
    assert hooks == 0
