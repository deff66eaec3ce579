"""haiscale.ddp: gradients and parameters that a script may read, and steps that wait for it."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from haiscale.ddp import DistributedDataParallel
from hfreduce.testing import Layout, run, values
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import training

pytestmark = pytest.mark.torch

LAYOUT = Layout.one_node(2)
STABLE = {"HFREDUCE_DETERMINISM": "stable"}


def on_ranks(function, *arguments, layout=LAYOUT, **options):
    return values(run(function, layout, *arguments, environment=STABLE, **options))


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
