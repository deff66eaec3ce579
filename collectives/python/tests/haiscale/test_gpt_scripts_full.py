"""summon_full_params of haiscale.fsdp's wrapper: optimizers it finds, calls of scripts inside."""

import gc
import weakref

import pytest
import torch
from haiscale.ddp import DistributedDataParallel
from haiscale.fsdp import FullyShardedDataParallel
from hfreduce.testing import Layout, run, values
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ConstantLR

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200, func_only=True)]


def on_ranks(function, *arguments):
    return values(run(function, Layout.one_node(2), *arguments))


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def sharded():
    return FullyShardedDataParallel(
        small(),
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, nn.Linear),
    )


def steps(model, *optimizers):
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def shapes(state):
    """Shapes of the first moments; None for a shard."""
    moments = [each["exp_avg"] for each in state["state"].values()]
    return [None if isinstance(each, DTensor) else tuple(each.shape) for each in moments]


FULL = [(4, 4), (4,)] * 2


def finds(rank, size):
    """Optimizers that are made later, of which one rank keeps the first longer."""
    model = sharded()
    first = adam(model)
    schedule = ConstantLR(first)  # a cycle: only the collector frees the optimizer
    steps(model, first)
    reference = weakref.ref(first)
    del schedule
    kept = first if rank == 0 else None
    del first
    gc.collect()
    exists = reference() is not None
    second = adam(model)
    steps(model, second)
    with model.summon_full_params():
        state = second.state_dict()
    if kept is not None:
        kept.zero_grad()
    return exists, shapes(state)


def test_a_later_optimizer_is_found_and_an_earlier_one_is_released():
    assert on_ranks(finds) == [(True, FULL), (False, [None] * 4)]


def observes(rank, size):
    """A model without an optimizer leaves the steps of another model split."""
    teacher = sharded()
    model = small()
    optimizer = adam(model)
    student = DistributedDataParallel(model, optimizer=optimizer)
    for _ in range(2):
        with torch.no_grad():
            target = teacher(torch.ones(2, 4))
        (student(torch.ones(2, 4)) - target).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return student.whole_step


def test_a_wrapper_leaves_the_steps_of_other_models_split():
    assert on_ranks(observes) == [None] * 2


def calls(rank, size, layer):
    model = sharded()
    with model.summon_full_params():
        called = model.module if layer is None else model.module[layer]
        with pytest.raises(RuntimeError, match="a forward pass inside summon_full_params"):
            called(torch.ones(2, 4))
        kinds = {type(value) for value in model.module.state_dict().values()}
        for parameter in model.parameters():
            nn.init.constant_(parameter, 3)
    model(torch.ones(2, 4))
    return kinds == {torch.Tensor}, [bool((p.full_tensor() == 3).all()) for p in model.parameters()]


@pytest.mark.parametrize("layer", [None, 1])
def test_a_forward_pass_of_the_inner_module_is_refused_and_changes_nothing(layer):
    assert on_ranks(calls, layer) == [(True, [True] * 4)] * 2


def assigns(rank, size):
    model = sharded()
    with model.summon_full_params():
        best = {name: torch.full_like(v, 5) for name, v in model.module.state_dict().items()}
        model.module.load_state_dict(best, assign=True)
    return [bool((p.full_tensor() == 5).all()) for p in model.parameters()]


def test_parameters_that_are_assigned_inside_stay():
    assert on_ranks(assigns) == [[True] * 4] * 2


def loads(rank, size):
    model = sharded()
    optimizer = adam(model)
    steps(model, optimizer)
    outside = optimizer.state_dict()
    with model.summon_full_params():
        best = optimizer.state_dict()
        for number, each in best["state"].items():
            if rank == 0:
                each["exp_avg"] = torch.full_like(each["exp_avg"], number)
            else:  # as from rank 0's file
                each["exp_avg"] = torch.full(FULL[number], float(number))
        optimizer.load_state_dict(best)
        again = optimizer.state_dict()
        same = rank or all((v["exp_avg"] == n).all() for n, v in again["state"].items())
        refused = ""
        try:
            optimizer.load_state_dict(outside)
        except RuntimeError as error:
            refused = str(error)
    moments = [each["exp_avg"] for each in optimizer.state_dict()["state"].values()]
    return shapes(again), bool(same), refused, [type(m).__name__ for m in moments]


def test_a_state_that_is_loaded_inside_is_saved_inside():
    (shape, same, refused, kinds), other = on_ranks(loads)
    assert (shape, same, kinds) == (FULL, True, ["DTensor"] * 4)
    assert "AdamW.load_state_dict: a state with shards inside summon_full_params" in refused
    assert other == ([None] * 4, True, "", ["DTensor"] * 4)
