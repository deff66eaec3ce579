"""haiscale.ddp with unused parameters, saved states, checkpoints, several optimizers and groups."""

import copy
import io
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from haiscale.ddp import DistributedDataParallel, StepError
from haiscale.overlap.steps import INDEPENDENT
from hfreduce.testing import Layout, run, values
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import training

pytestmark = pytest.mark.torch

LAYOUT = Layout.one_node(2)
STABLE = {"HFREDUCE_DETERMINISM": "stable"}


def on_ranks(function, *arguments, layout=LAYOUT, **options):
    return values(run(function, layout, *arguments, environment=STABLE, **options))


class Branches(nn.Module):
    """Parameters that a forward pass uses on all ranks, on some, or on none."""

    def __init__(self):
        super().__init__()
        self.common = nn.Linear(16, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.never = nn.Linear(16, 16)

    def forward(self, x, branch):
        return self.branches[branch](self.common(x)).square().mean()


def unused(rank, size, kind):
    torch.manual_seed(0)
    model = Branches()
    never = copy.deepcopy(model.never.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    ddp = training.wrap(kind, model, optimizer, 0.002)
    for step in range(6):
        optimizer.zero_grad()
        # Both ranks use one branch, or different ones; branch 2 is used by one alone, late.
        branch = (0, rank, 1, 1 - rank, 2 * rank, 0)[step]
        ddp(training.tokens_of(step, rank)[:, :16].float(), branch).backward()
        optimizer.step()
    states = training.digest(model.state_dict(), optimizer.state_dict())
    kept = all(torch.equal(value, never[key]) for key, value in model.never.state_dict().items())
    return states, kept, len(optimizer.state)


def test_parameters_that_some_ranks_use_are_averaged_and_those_of_none_are_not_stepped():
    expected = on_ranks(unused, "torch")
    assert on_ranks(unused, "late") == expected
    assert on_ranks(unused, "overlap") == expected
    assert [(kept, count) for _, kept, count in expected] == [(True, 8)] * 2


def averages(rank, size, kind):
    """Gradients after backward, of parameters that rank 0 alone uses and that none uses."""
    torch.manual_seed(0)
    model = Branches()
    ddp = training.wrap(kind, model)
    ddp(torch.ones(4, 16), rank).backward()
    return [None if p.grad is None else training.digest(p.grad) for p in model.parameters()]


def test_gradients_after_backward_are_those_of_torch():
    ours = on_ranks(averages, "plain")
    assert ours == on_ranks(averages, "torch")
    assert ours[0] == ours[1]
    assert ours[0].count(None) == 4, "the branch and the layer of no rank"


def state(rank, size, kind, load):
    """Trains on from a state that a run with the other kind has left."""
    torch.manual_seed(0)
    model = training.Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ddp = training.wrap(kind, model, optimizer)
    if load:
        load = torch.load(io.BytesIO(load))
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model.load_state_dict(load[0])
        optimizer.load_state_dict(load[1])
        assert training.digest(before) != training.digest(load)
    for step in range(3):
        training.loss_of(ddp, training.tokens_of(step + 3 * bool(load), rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    return file.getvalue()


def trained(kind, load):
    """Of rank 0, whose buffers those of the others become."""
    return on_ranks(state, kind, load)[0]


def test_states_load_into_a_plain_optimizer_and_back():
    expected = training.digest(torch.load(io.BytesIO(trained("torch", trained("torch", None)))))
    for first, second in (("late", "torch"), ("torch", "late"), ("late", "late")):
        half = trained(first, None)
        plain = torch.optim.Adam(training.Net().parameters(), lr=1e-3)
        saved = torch.load(io.BytesIO(half))[1]
        plain.load_state_dict(saved)
        assert training.digest(plain.state_dict()) == training.digest(saved)
        ended = torch.load(io.BytesIO(trained(second, half)))
        assert training.digest(ended) == expected, (first, second)


def skipped_step(rank, size, kind):
    """A script that drops gradients, one that keeps them, two losses, a penalty, checkpoints."""
    torch.manual_seed(0)
    model = training.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = training.wrap(kind, model, optimizer)
    for step in range(7):
        if step != 3:
            optimizer.zero_grad()
        tokens = training.tokens_of(step, rank)
        loss = training.loss_of(ddp, tokens)
        if step == 4 and kind != "torch":
            torch.autograd.grad(loss, model.embed.weight, retain_graph=True)
        if step == 5:
            optimizer.zero_grad(set_to_none=False)
        loss.backward()
        if step in {1, 2}:
            continue  # step 3 adds to the gradients of step 2; those of step 1 are dropped
        optimizer.step()
    return training.digest(list(model.parameters()))


def test_dropped_and_kept_gradients():
    expected = on_ranks(skipped_step, "torch")
    assert on_ranks(skipped_step, "late") == expected
    assert on_ranks(skipped_step, "overlap") == expected
    assert on_ranks(skipped_step, "plain") == expected


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(
                lambda v, layer=layer: layer(v).tanh(), x, use_reentrant=self.reentrant
            )
        return x.sum()


def checkpointed(rank, size, kind, reentrant):
    import torch.utils.checkpoint

    torch.manual_seed(0)
    model = Checkpointed(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = training.wrap(kind, model, optimizer, 0.005)
    for step in range(3):
        data = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(data.requires_grad_()).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole_step = None if kind == "torch" else ddp.whole_step
    return training.digest(list(model.parameters())), whole_step


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints(reentrant):
    expected = on_ranks(checkpointed, "plain", reentrant)
    assert on_ranks(checkpointed, "late", reentrant) == expected
    if not reentrant:
        assert on_ranks(checkpointed, "torch", reentrant) == expected


def two_optimizers(rank, size, kind):
    torch.manual_seed(0)
    model = training.Net()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    outside = nn.Parameter(torch.ones(3))
    optimizers = [
        torch.optim.SGD([{"params": matrices}, {"params": [outside]}], lr=0.1, weight_decay=0.1),
        torch.optim.Adam(others),
    ]
    ddp = training.wrap(kind, model, optimizers)
    for step in range(3):
        outside.grad = torch.ones(3)
        training.loss_of(ddp, training.tokens_of(step, rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if kind == "late":
        assert ddp.whole_step is None
        assert len(ddp.reducer.in_flight) > 3
    return training.digest(list(model.parameters()), outside)


def test_two_optimizers_and_parameters_of_another_model():
    expected = on_ranks(two_optimizers, "torch")
    assert on_ranks(two_optimizers, "late") == expected
    assert on_ranks(two_optimizers, "barrier") == expected


def autocast(rank, size, kind):
    torch.manual_seed(0)
    model = training.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ddp = training.wrap(kind, model, optimizer)
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = training.loss_of(ddp, training.tokens_of(step, rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return training.digest(model.state_dict(), optimizer.state_dict())


def test_autocast():
    expected = on_ranks(autocast, "torch")
    assert on_ranks(autocast, "late") == expected


def nan(rank, size):
    model = training.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = training.wrap("late", model, optimizer)
    for step in range(2):
        loss = training.loss_of(ddp, training.tokens_of(step, rank))
        (loss * float("nan") if rank else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return all(bool(p.isnan().any()) for p in model.parameters())


def test_a_nan_of_one_rank_reaches_all():
    assert on_ranks(nan) == [True, True]


def unaligned(rank, size, which):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if rank == 1 and which == "shape":
        model[1] = nn.Linear(8, 9)
    if rank == 1 and which == "type":
        model[1].bias.data = model[1].bias.data.double()
    if rank == 1 and which == "name":
        model.add_module("2", nn.Linear(2, 2))
    if rank == 1 and which == "trained":
        model[0].bias.requires_grad_(False)
    return DistributedDataParallel(model, bucket_cap_mb=1.0 + (rank == 1 and which == "settings"))


@pytest.mark.parametrize(
    ("which", "name"),
    [("shape", "1.weight"), ("type", "1.bias"), ("name", "2.weight"), ("trained", "0.bias"),
     ("settings", "settings")],
)  # fmt: skip
def test_a_model_that_differs_is_refused_on_every_rank(which, name):
    for outcome in run(unaligned, Layout.one_node(3), which):
        assert outcome.failure is not None
        assert outcome.failure.type == "ModelMismatchError"
        assert f"rank 1 differs from that of rank 0, first at {name!r}" in outcome.failure.text


def without_gradients(rank, size):
    with pytest.raises(ValueError, match="no parameter"):
        DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=0)
    with pytest.raises(ValueError, match="one device"):
        DistributedDataParallel(nn.Linear(2, 2), device_ids=[0, 1])
    model = nn.Embedding(4, 4, sparse=True)
    ddp = DistributedDataParallel(model)
    with pytest.raises(TypeError, match=r"'weight' is torch.sparse_coo: use dense"):
        ddp(torch.zeros(2, dtype=torch.long)).sum().backward()
    with pytest.raises(StepError, match="did not complete"):
        ddp(torch.zeros(2, dtype=torch.long))


def test_invalid_arguments():
    run_ok = run(without_gradients, LAYOUT)
    assert [outcome.failure for outcome in run_ok] == [None, None]


def subgroups(rank, size):
    """Two groups of two ranks train two models."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(rank)
    model = training.Net()
    optimizer = torch.optim.AdamW(model.parameters())
    ddp = DistributedDataParallel(
        model, process_group=groups[rank % 2], optimizer=optimizer, find_unused_parameters=True
    )
    training.loss_of(ddp, training.tokens_of(0, rank)).backward()
    optimizer.step()
    return training.digest(list(model.parameters()))


def test_ranks_of_a_group_train_together():
    first = on_ranks(subgroups, layout=Layout.one_node(4))
    assert first[0] == first[2] != first[1] == first[3]


@pytest.mark.parametrize("kind", sorted(INDEPENDENT, key=str))
def test_an_independent_optimizer_steps_parts_as_the_whole(kind):
    """Without parameters it does nothing; two halves are one whole."""
    torch.manual_seed(0)
    values_of = [torch.randn(4, 6) for _ in range(4)]
    gradients = [[torch.randn(4, 6) for _ in range(4)] for _ in range(3)]
    digests = []
    for parts in ([slice(0, 4)], [slice(2, 4), slice(0, 0), slice(0, 2)]):
        parameters = [nn.Parameter(value.clone()) for value in values_of]
        optimizer = kind(parameters, lr=0.01)
        (group,) = optimizer.param_groups
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            for part in parts:
                chosen = parameters[part]
                optimizer.param_groups = [{**group, "params": chosen}] if chosen else []
                optimizer.step()
            optimizer.param_groups = [group]
        digests.append(training.digest(parameters, optimizer.state_dict()))
    assert digests[0] == digests[1]
