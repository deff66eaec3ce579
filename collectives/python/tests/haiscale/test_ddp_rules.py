"""haiscale.ddp: which gradients and parameters a script may read when, and which steps wait."""

import copy
import io
import sys
from pathlib import Path

import pytest
import torch
from haiscale.ddp import DistributedDataParallel
from haiscale.ddp.steps import INDEPENDENT
from hfreduce.testing import run
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import training
from training import LAYOUT, on_ranks

pytestmark = pytest.mark.torch


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


def reads(rank, size, how):
    """Reads between backward and step, or after step, in the ways of scripts."""
    torch.manual_seed(0)
    model = training.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = list(model.parameters())
    ddp = training.wrap("late", model, optimizer)
    training.loss_of(ddp, training.tokens_of(0, rank)).backward()
    if how == "a held gradient":
        return bool(held[0].grad.isnan().all())
    if how == "writing a held gradient":
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.nn.utils.clip_grad_norm_(held, 1.0)
        ddp.synchronize()
        return float(torch.nn.utils.clip_grad_norm_(held, 1.0)) > 0
    if how == "parameters":
        finite = all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        return finite and ddp.whole_step == "GradientsRead"
    if how == "param_groups":
        finite = all(p.grad.isfinite().all() for p in optimizer.param_groups[0]["params"])
        optimizer.step()
        return finite and ddp.whole_step == "GradientsRead"
    before = [p.detach().clone() for p in held]
    optimizer.step()
    if how == "held parameters":
        return all(torch.equal(p, b) for p, b in zip(held, before, strict=True))
    if how == "gradients after the step":
        return all(p.grad is None for p in held)
    if how == "copying in flight":
        with pytest.raises(RuntimeError, match="synchronize"):
            copy.deepcopy(model)
        return True
    now = {
        "model.parameters": lambda: list(model.parameters()),
        "ddp.parameters": lambda: list(ddp.parameters()),
        "model.state_dict": lambda: [model.state_dict(keep_vars=True)[n] for n in names],
        "optimizer.state_dict": lambda: optimizer.state_dict() and held,
        "synchronize": lambda: ddp.synchronize() or held,
        "evaluation": lambda: model.eval()(training.tokens_of(1, 0)[:, :-1]).sum() and held,
        "stop": lambda: ddp.reducer.stop() or held,
    }[how]
    names = [name for name, _ in nn.Module.named_parameters(model)]
    return not any(torch.equal(p, b) for p, b in zip(now(), before, strict=True))


@pytest.mark.parametrize(
    "how",
    [
        "a held gradient", "writing a held gradient", "parameters", "param_groups",
        "held parameters", "gradients after the step", "copying in flight", "model.parameters",
        "ddp.parameters", "model.state_dict", "optimizer.state_dict", "synchronize", "evaluation",
        "stop",
    ],
)  # fmt: skip
def test_reading(how):
    assert on_ranks(reads, how) == [True, True]


class Late(torch.optim.SGD):
    """A subclass may do anything."""


def whole(rank, size, how):
    model = training.Net()
    kind = torch.optim.SGD
    if how in {"subclass", "independent"}:
        kind = Late
    if how == "lbfgs":
        kind = torch.optim.LBFGS
    optimizer = kind(model.parameters(), lr=0.01)
    calls = []
    if how == "hooks before":
        optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05, overlap=how != "off")
    ddp.overlap(optimizer, independent=how == "independent")
    if how == "hooks":
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=how == "scaler")
    skipped = torch.zeros(())
    for step in range(3):

        def closure():
            optimizer.zero_grad()
            loss = training.loss_of(ddp, training.tokens_of(step, rank))  # noqa: B023
            loss.backward()
            return loss

        if how in {"lbfgs", "closure"}:
            optimizer.step(closure)
            continue
        optimizer.zero_grad()
        loss = training.loss_of(ddp, training.tokens_of(step, rank))
        if how == "scaler" and step == 1 and rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if how == "scaler":
        skipped += scaler.get_scale() == 4.0
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert flat.isfinite().all()
    return ddp.whole_step, training.digest(flat), bool(skipped)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("plain", None),
        ("off", "OverlapOff"),
        ("subclass", "NotIndependent"),
        ("independent", None),
        ("lbfgs", "NotIndependent"),
        ("closure", "Closure"),
        ("hooks", "StepHooks"),
        ("hooks before", "StepHooks"),
        ("scaler", "GradientsRead"),
    ],
)
def test_a_step_that_cannot_be_split_says_why(how, reason):
    first, second = on_ranks(whole, how)
    assert first == second, "ranks differ"
    assert first[0] == reason
    assert first[2] == (how == "scaler"), "the step after an infinite gradient is skipped"


class Reaches(nn.Module):
    """Reads a layer's weight long before the layer is called."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)

    def forward(self, x):
        return self.second(self.first(x) @ self.second.weight).sum()


def reaches(rank, size, synchronizes):
    model = Reaches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ddp = training.wrap("late", model, optimizer, 0.001)
    for _ in range(3):
        if synchronizes:
            ddp.synchronize()
        ddp(torch.ones(4, 64)).backward()
        optimizer.step()
    return True


def test_a_parameter_that_is_read_before_its_step_is_an_error():
    """torch's own check of what backward needs, as `second` steps between read and backward."""
    for outcome in run(reaches, LAYOUT, False):
        assert outcome.failure is not None
        assert "modified by an inplace operation" in outcome.failure.text
    assert on_ranks(reaches, True) == [True, True]


class Hidden(nn.Module):
    """Its second forward pass reads a bias of a layer that only the first has called."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.is_first = True

    def forward(self, x):
        x = self.first(x)
        if self.is_first:
            self.is_first = False
            return self.second(x).sum()
        return (x + self.second.bias).sum()


def hidden(rank, size):
    model = Hidden()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ddp = training.wrap("late", model, optimizer, 1e-5)
    for _ in range(2):
        ddp(torch.ones(4, 8)).backward()
        optimizer.step()


def test_a_gradient_of_a_parameter_before_its_step_is_an_error():
    for outcome in run(hidden, LAYOUT):
        assert outcome.failure is not None
        assert outcome.failure.type == "StepError"
        assert "before its last step" in outcome.failure.text or "aborted" in outcome.failure.text


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
