"""haiscale.cpu_offload and haiscale.utils: less memory, the same bits."""

import contextlib
import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from haiscale import cpu_offload
from haiscale.cpu_offload import CPUOffload, Share
from haiscale.ddp import DistributedDataParallel
from haiscale.utils import on_demand_checkpoint
from hfreduce.testing import Layout, run, values
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import gpt_scripts as gpts

pytestmark = pytest.mark.torch

STEPS = 4


class OffloadedGPT(gpts.GPT):
    """A script's model, whose blocks are in the context."""

    def forward(self, tokens):
        embedding, *blocks, head = self.core
        x = embedding(tokens)
        with CPUOffload(offload_ratio=0.5, tag="blocks"):
            for block in blocks:
                x = block(x)
        return head(x)


class CheckpointedGPT(gpts.GPT):
    """A script's model, whose blocks are recomputed."""

    def forward(self, tokens):
        embedding, *blocks, head = self.core
        x = embedding(tokens)
        for block in blocks:
            x = on_demand_checkpoint(block, x)
        return head(x)


def trains(rank, size, kind):
    if kind == "offload":
        # A tensor of this processor is treated as one of an accelerator.
        cpu_offload.is_on_host = lambda _tensor: False
    model = {"offload": OffloadedGPT, "checkpoint": CheckpointedGPT, "plain": gpts.GPT}[kind]()
    model = DistributedDataParallel(model)
    optimizer = gpts.optimizer_of(model)
    history = []
    for step in range(STEPS):
        tokens = gpts.batch(step, rank, size)
        loss = gpts.Loss()(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    share = CPUOffload.shares.get("blocks")
    return history, gpts.plain(model.module.state_dict()), share and share.total_bytes


def test_training_has_the_bits_of_a_run_with_all_activations():
    results = {
        kind: values(run(trains, Layout.one_node(2), kind))
        for kind in ("plain", "offload", "checkpoint")
    }
    for kind in ("offload", "checkpoint"):
        for (losses, state, _), (own, other, _) in zip(
            results["plain"], results[kind], strict=True
        ):
            assert losses == own
            assert all((state[name] == other[name]).all() for name in state)
    assert all(total > 100_000 for *_, total in results["offload"])


@pytest.fixture
def moved(monkeypatch):
    """Sizes of the tensors that are moved, of all devices."""
    monkeypatch.setattr(cpu_offload, "is_on_host", lambda _tensor: False)
    monkeypatch.setattr(CPUOffload, "shares", {})
    sizes = []

    class Recorded(cpu_offload._Moved):
        def __new__(cls, tensor, device):
            sizes.append(tensor.numel())
            return super().__new__(cls, tensor, device)

    monkeypatch.setattr(cpu_offload, "_Moved", Recorded)
    return sizes


def passes(ratio, moved):
    """The tensors that three passes through four equal layers move."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.rand(2, 8, requires_grad=True)
    gradients, counts = [], []
    for _ in range(3):
        with CPUOffload(ratio, "layers"):
            y = layers(x)
        counts.append(len(moved))
        gradients.append(torch.autograd.grad(y.sum(), [x, *layers.parameters()]))
        moved.clear()
    plain = torch.autograd.grad(layers(x).sum(), [x, *layers.parameters()])
    assert all(torch.equal(a, b) for each in gradients for a, b in zip(each, plain, strict=True))
    return counts


@pytest.mark.parametrize(("ratio", "expected"), [(0, [0] * 3), (0.5, [4, 2, 2]), (1, [4] * 3)])
def test_the_first_pass_moves_everything_and_later_ones_their_share(ratio, expected, moved):
    """Each layer saves its input; its weight, of which it saves a view, stays."""
    assert passes(ratio, moved) == expected


def test_tensors_of_the_host_stay():
    with CPUOffload(1.0, "host"):
        torch.rand(4, requires_grad=True).exp()
    assert CPUOffload.shares.pop("host") == Share()


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_an_invalid_ratio_is_refused(ratio):
    with pytest.raises(ValueError, match=r"invalid offload_ratio .*: expected a number from 0"):
        CPUOffload(offload_ratio=ratio, tag="blocks")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_activations_leave_the_gpu():
    torch.cuda.reset_peak_memory_stats()
    layers = nn.Sequential(*(nn.ReLU() for _ in range(8))).cuda()
    x = torch.rand(1 << 20, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    with CPUOffload(1.0, "gpu"):
        y = layers(x)
    assert torch.cuda.memory_allocated() - before < 3 * x.nbytes
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


class PassError(Exception):
    """Raised in a forward pass."""


def test_a_pass_that_raises_is_not_counted(moved):
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.rand(2, 8, requires_grad=True)
    with contextlib.suppress(PassError), CPUOffload(0.5, "layers"):
        layers[0](x)
        raise PassError
    moved.clear()
    assert passes(0.5, moved) == [4, 2, 2]
    with contextlib.suppress(PassError), CPUOffload(0.5, "layers"):
        layers[0](x)
        raise PassError
    moved.clear()
    assert passes(0.5, moved) == [2, 2, 2]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_activations_of_a_pass_without_backward_are_released(ratio, moved):
    """An output that is kept in its place must not hold its own node."""
    x = torch.rand(8, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        with CPUOffload(ratio, "released"):
            y = x.exp()
        output = weakref.ref(y)
        del y
        assert output() is None
    finally:
        gc.enable()


def test_contexts_of_one_tag_inside_each_other_are_one_pass(moved):
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.rand(2, 8, requires_grad=True)
    counts = []
    for _ in range(2):
        with CPUOffload(0.5, "nested"):
            y = layers[:1](x)
            with CPUOffload(0.5, "nested"):
                y = layers[1:2](y)
            with CPUOffload(0, "inner"):
                y = layers[2:3](y)
            layers[3:](y).sum().backward()
        counts.append(len(moved))
        moved.clear()
    assert counts == [3, 1]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_an_output_that_is_changed_in_place_is_refused_or_has_its_copy(ratio, moved):
    x = torch.rand(8, requires_grad=True)
    with CPUOffload(ratio, "changed"):
        y = x.exp()
    expected = y.detach().clone()
    y.detach().mul_(2)
    if ratio:
        y.sum().backward()
        assert torch.equal(x.grad, expected)
    else:
        with pytest.raises(RuntimeError, match=r"shape \(8,\).* at version 1; expected version 0"):
            y.sum().backward()


def test_parameters_and_their_views_stay(moved):
    weight = nn.Parameter(torch.rand(8, 8))
    x = torch.rand(8, requires_grad=True)
    with CPUOffload(1.0, "views"):
        y = x * weight[0] * weight.t()[1].view(2, 4).flatten()
    assert moved == [8, 8]  # x and the first product
    y.sum().backward()


def test_strides_and_types_are_kept(moved):
    x = torch.rand(6, 4, requires_grad=True)
    numbers, mask = torch.tensor([4, 1, 1]), torch.rand(4, 6) > 0.5

    def function(x):
        y = x.t()[:, ::2] * x.t()[:, 1::2].exp()
        z = x.index_select(0, numbers).cumsum(0).expand(2, 3, 4) ** 2
        return (y.sum() + torch.where(mask, x.t(), 0).sum()) * z.std()

    with CPUOffload(1.0, "strides"):
        output = function(x)
    (own,) = torch.autograd.grad(output, x)
    (plain,) = torch.autograd.grad(function(x), x)
    assert torch.equal(own, plain)
    assert 24 in moved  # the mask


def test_an_expanded_tensor_stays(moved):
    x = torch.rand(4, requires_grad=True)
    with CPUOffload(1.0, "expanded"):
        y = x * torch.rand(4, 1).expand(4, 4)
    assert moved == []
    y.sum().backward()


def test_backward_of_a_part_of_the_graph_leaves_the_rest(moved):
    x = torch.rand(8, requires_grad=True)
    with CPUOffload(1.0, "parts"):
        first, second = x.exp(), x.sin()
    first.sum().backward()
    with CPUOffload(1.0, "parts"):
        third = x.exp()
    (second + third).sum().backward()
    expected = 2 * x.detach().exp() + x.detach().cos()
    torch.testing.assert_close(x.grad, expected)


def test_a_checkpoint_recomputes_in_backward_alone():
    calls = []

    def function(x, power):
        calls.append(torch.is_grad_enabled())
        return nn.functional.dropout(x, 0.5) ** power

    x = torch.rand(100, requires_grad=True)
    torch.manual_seed(0)
    y = on_demand_checkpoint(function, x, 3)
    assert calls == [True]
    y.sum().backward()
    assert calls == [True, True]
    kept = y.detach() > 0
    assert torch.allclose(x.grad[kept], 3 * 8 * x.detach()[kept] ** 2)
    assert not x.grad[~kept].any()
    with torch.no_grad():
        on_demand_checkpoint(function, x, 3)
    assert calls == [True, True, False]


class Pair(nn.Module):
    """Two outputs, with a random mask and a matrix product in the type of autocast."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, *, scale, debug):
        y = nn.functional.dropout(self.linear(x), 0.5)
        return y, (y * scale).exp() * debug


def test_a_checkpoint_keeps_arguments_by_name_autocast_and_tuples():
    """`debug` is an option of torch's function, too."""
    pair = Pair()
    x, scale = torch.rand(4, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    gradients = []
    for function in (pair, lambda *args, **more: on_demand_checkpoint(pair, *args, **more)):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = function(x, scale=scale, debug=2)
        assert [each.dtype for each in outputs] == [torch.bfloat16, torch.float32]
        loss = sum(each.float().sum() for each in outputs)
        gradients.append(torch.autograd.grad(loss, [x, scale, *pair.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_random_state_of_a_device_is_kept_for_arguments_by_name(monkeypatch):
    """torch keeps it for the devices of the arguments of `checkpoint`."""
    arguments = []
    kept = torch.utils.checkpoint._infer_device_type

    def recorded(*args):
        arguments.extend(args)
        return kept(*args)

    monkeypatch.setattr(torch.utils.checkpoint, "_infer_device_type", recorded)
    x = torch.rand(2, requires_grad=True)
    on_demand_checkpoint(lambda *, x: x.exp(), x=x)
    assert any(isinstance(each, dict) and each["x"] is x for each in arguments)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_normalization_counts_a_recomputed_batch_once(momentum):
    def layers():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Tanh())

    kept, module, method = layers(), layers(), layers()
    x = torch.rand(8, 4, requires_grad=True)
    buffers = dict(module.named_buffers())
    for _ in range(2):
        kept(x).square().sum().backward()
        on_demand_checkpoint(module, x).square().sum().backward()
        on_demand_checkpoint(method.forward, x).square().sum().backward()
    for other in (module, method):
        for name, value in kept.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
        for one, two in zip(kept.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)
    assert all(buffer is buffers[name] for name, buffer in module.named_buffers())
    assert kept[1].num_batches_tracked == 2
