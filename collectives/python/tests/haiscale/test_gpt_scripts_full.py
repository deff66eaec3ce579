"""summon_full_params of haiscale.fsdp's wrapper: optimizers it finds, calls of scripts inside."""

import contextlib
import copy
import gc
import io
import weakref

import pytest
import torch
from haiscale.ddp import DistributedDataParallel
from haiscale.fsdp import FullParametersError, FullyShardedDataParallel
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


def raised(call):
    """The message of the error that a call raises."""
    try:
        call()
    except FullParametersError as error:
        return str(error)
    return "nothing"


def misuses(rank, size):
    before = small()
    early = adam(before)
    wrapped = FullyShardedDataParallel(before)
    wrapped(torch.ones(2, 4)).sum().backward()
    errors = [raised(early.step)]
    model = sharded()
    optimizer = adam(model)
    steps(model, optimizer)
    file = io.BytesIO()
    with model.summon_full_params():
        own = adam(model)
        errors.append(raised(optimizer.step))
        x = torch.ones(4, requires_grad=True)
        product = (model.module[0].weight * x).sum()
        errors.append(raised(product.backward))
        (gradient,) = torch.autograd.grad(model.module[0].weight @ x, x, torch.ones(4))
        optimizer.zero_grad()
        step_of_another = adam(small())
        step_of_another.step()
        torch.save(dict(model.module.named_parameters()), file)
    torch.optim.SGD(torch.load(io.BytesIO(file.getvalue())).values()).step()
    errors.append(raised(own.step))
    steps(model, optimizer)
    return errors, gradient.shape == (4,)


def test_steps_and_gradients_that_would_be_lost_are_refused_on_every_rank():
    for (early, inside, backward, made_inside), works in on_ranks(misuses):
        assert "AdamW was made before FullyShardedDataParallel, with parameters" in early
        assert "a step of AdamW inside summon_full_params would be overwritten" in inside
        assert "a backward pass inside summon_full_params would lose" in backward
        assert "AdamW was made inside summon_full_params, with parameters" in made_inside
        assert works


def nests(rank, size):
    """A wrapper inside another one."""
    inner = FullyShardedDataParallel(nn.Linear(4, 4))
    model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(4, 4)))
    refused = raised(lambda: inner.summon_full_params().__enter__())
    optimizer = adam(model)
    steps(model, optimizer)
    with model.summon_full_params():
        in_context = raised(lambda: inner(torch.ones(2, 4)))
        again = raised(lambda: inner.summon_full_params().__enter__())
        full = [tuple(p.shape) for p in model.parameters()]
        state = shapes(optimizer.state_dict())
    steps(model, optimizer)
    return refused, again, in_context, full, state


def test_a_part_of_a_model_is_summoned_with_the_model():
    for rank, (refused, again, in_context, full, state) in enumerate(on_ranks(nests)):
        assert "Linear, a part of a sharded model: call it of the outermost Fully" in refused
        assert again == refused
        assert "a forward pass inside summon_full_params" in in_context
        assert full == FULL
        assert state == ([None] * 4 if rank else FULL)


def leaves(rank, size):
    """One rank cannot write its file; all continue with the same parameters."""
    model = sharded()
    optimizer = adam(model)
    steps(model, optimizer)
    with contextlib.suppress(OSError), model.summon_full_params():
        expected = {name: value.clone() for name, value in model.module.state_dict().items()}
        if rank == 0:
            raise OSError("no space left on device")
    kinds = {type(p) for p in model.parameters()}
    same = [torch.equal(p.full_tensor(), expected[n]) for n, p in model.module.named_parameters()]
    steps(model, optimizer)
    with model.summon_full_params():
        state = optimizer.state_dict()
    outside = optimizer.state_dict()
    return kinds == {DTensor}, same, shapes(state), shapes(outside)


def test_a_context_that_one_rank_leaves_by_an_error_is_left_by_all():
    first, other = on_ranks(leaves)
    assert first == (True, [True] * 4, FULL, [None] * 4)
    assert other == (True, [True] * 4, [None] * 4, [None] * 4)


def replaces(rank, size, kind):
    model = sharded()
    layer = model.module[0]
    expected = model.module[1].bias.full_tensor() + 1

    def change():
        with model.summon_full_params():
            model.module[1].bias.data.add_(1)
            if kind == "deleted":
                del layer.weight
            else:
                layer.weight = nn.Parameter(torch.ones(8, 4))

    error = raised(change)
    kept = torch.equal(model.module[1].bias.full_tensor(), expected)
    return error, kept, tuple(layer.weight.shape), type(layer.weight).__name__


@pytest.mark.parametrize(
    ("kind", "words"),
    [("deleted", "nothing"), ("shape", "a parameter of shape (4, 4) was replaced by one of shape")],
)
def test_shards_are_put_back_for_parameters_that_were_replaced(kind, words):
    for error, kept, shape, name in on_ranks(replaces, kind):
        assert words in error
        assert (kept, shape, name) == (True, (4, 4), "DTensor")


def differs(rank, size, kind):
    """States that one rank alone has."""
    model = sharded()
    optimizer = adam(model)
    steps(model, optimizer)
    with model.summon_full_params():
        state = [optimizer.state_dict()]
    torch.distributed.broadcast_object_list(state, 0)
    if kind == "states":
        optimizer = adam(model)
        if rank == 0:
            optimizer.load_state_dict(state[0])
        for parameter in model.parameters():
            parameter.grad = None
        optimizer.step()  # without gradients: it is found
    elif rank == 0:
        adam(model).step()
    error = raised(lambda: model.summon_full_params().__enter__())
    model(torch.ones(2, 4))
    return error


@pytest.mark.parametrize(
    ("kind", "words"),
    [("states", "AdamW has states of 0 parameters on rank 1, AdamW of 4 on rank 0"),
     ("steps", "different numbers of optimizers, 1 to 2: make each step on every rank")],
)  # fmt: skip
def test_optimizers_that_differ_between_ranks_are_refused_on_every_rank(kind, words):
    for error in on_ranks(differs, kind):
        assert words in error


def halves(model):
    """Optimizers of disjoint parameters."""
    return [torch.optim.AdamW(layer.parameters(), lr=0.1) for layer in model.module]


def saved(model, optimizers):
    """What rank 0 writes, on every rank."""
    with model.summon_full_params():
        state = [copy.deepcopy([each.state_dict() for each in optimizers])]
    torch.distributed.broadcast_object_list(state, 0)
    return state[0]


def equal(one, other):
    """Whether lists of states have equal full tensors."""
    return [
        torch.equal(value, after["state"][number][name])
        for before, after in zip(one, other, strict=True)
        for number, values in before["state"].items()
        for name, value in values.items()
    ]


def continues(rank, size):
    """Optimizers that load states before their first step, in place of others."""
    model = sharded()
    optimizers = halves(model)
    steps(model, *optimizers)
    first = saved(model, optimizers)
    later = halves(model)
    for each, state in zip(later, first, strict=True):
        each.load_state_dict(state)
    loaded = equal(first, saved(model, later))
    weights = {n: p.full_tensor().clone() for n, p in model.module.named_parameters()}
    results = []
    for chosen in (later, optimizers):
        with model.summon_full_params():
            model.module.load_state_dict(weights)
        steps(model, *chosen)
        results.append([p.full_tensor().clone() for p in model.parameters()])
    same = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
    return loaded, same, equal(saved(model, later), saved(model, optimizers))


def test_loaded_states_are_saved_before_the_first_step_and_continue_equally():
    assert on_ranks(continues) == [([True] * 12, [True] * 4, [True] * 12)] * 2
