"""The hooks of DistributedDataParallel in torch: each trains as over Gloo."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from hfreduce.testing import Layout, run, values
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.torch

STEPS = 6


def power(hook, rank, **options):
    return lambda ddp: ddp.register_comm_hook(
        powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            min_compression_rate=0.5,
            **options,
        ),
        hook,
    )


def plain(hook):
    return lambda ddp: ddp.register_comm_hook(None, hook)


def post_local(ddp):
    group = dist.new_group()
    state = local_sgd.PostLocalSGDState(None, group, start_localSGD_iter=3)
    ddp.register_comm_hook(state, local_sgd.post_localSGD_hook)


def quantized(hook):
    return lambda ddp: ddp.register_comm_hook(dist.group.WORLD, hook)


def overlapped(ddp):
    """Registers `optimizer_overlap_hooks._hook_then_optimizer` around the default hook."""
    ddp._register_fused_optim(torch.optim.SGD, lr=0.05)


def in_backward(ddp):
    """DDP registers `optimizer_overlap_hooks._apply_optim_in_backward_hook` by itself."""
    assert all(hasattr(p, "_in_backward_optimizers") for p in ddp.parameters())


def builtin(kind):
    """A hook in C++."""
    return lambda ddp: ddp._register_builtin_comm_hook(kind)


def mixed(ddp):
    """DDP registers `mixed_precision_hooks._reducer_allreduce_and_upcast_hook` by itself."""
    assert ddp.mixed_precision is not None


def zero(hook):
    def register(ddp):
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(),
            optimizer_class=torch.optim.SGD,
            overlap_with_ddp=True,
            lr=0.05,
        )
        ddp.register_comm_hook(None, hook(default_hooks.allreduce_hook, ddp, optimizer))
        return optimizer

    return register


HOOKS = {
    "none": lambda ddp: None,
    "noop": plain(debugging_hooks.noop_hook),
    "allreduce": plain(default_hooks.allreduce_hook),
    "fp16": plain(default_hooks.fp16_compress_hook),
    "bf16": plain(default_hooks.bf16_compress_hook),
    "fp16-wrapper": plain(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16-wrapper": plain(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "powerSGD": power(powerSGD_hook.powerSGD_hook, 1),
    "powerSGD-rank-2": power(powerSGD_hook.powerSGD_hook, 2, warm_start=False),
    "powerSGD-no-feedback": power(powerSGD_hook.powerSGD_hook, 1, use_error_feedback=False),
    "batched-powerSGD": power(powerSGD_hook.batched_powerSGD_hook, 1),
    "batched-powerSGD-rank-2": power(powerSGD_hook.batched_powerSGD_hook, 2),
    "builtin-allreduce": builtin(dist.BuiltinCommHookType.ALLREDUCE),
    "builtin-fp16": builtin(dist.BuiltinCommHookType.FP16_COMPRESS),
    "quantization-pertensor": quantized(quantization_hooks.quantization_pertensor_hook),
    "quantization-perchannel": quantized(quantization_hooks.quantization_perchannel_hook),
    "post-localSGD": post_local,
    "optimizer-overlap": overlapped,
    "optimizer-in-backward": in_backward,
    "mixed-precision": mixed,
    "zero-step": zero(ddp_zero_hook.hook_with_zero_step),
    "zero-step-interleaved": zero(ddp_zero_hook.hook_with_zero_step_interleaved),
}


def train(rank, size, name):
    """Trains with one hook; returns the parameters, or the error that torch raises."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 48), nn.Linear(48, 8))
    options = {}
    if name == "mixed-precision":
        from torch.nn.parallel.distributed import _MixedPrecision

        options["mixed_precision"] = _MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
        )
    if name == "optimizer-in-backward":
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    try:
        ddp = DistributedDataParallel(model, **options)
        optimizer = HOOKS[name](ddp) or torch.optim.SGD(ddp.parameters(), lr=0.05)
        data = torch.Generator().manual_seed(100 + rank)
        for _ in range(STEPS):
            optimizer.zero_grad()
            ddp(torch.randn(16, 32, generator=data)).square().mean().backward()
            optimizer.step()
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        return f"{type(error).__name__}: {str(error)[:60]}"
    dist.barrier()
    return [parameter.detach().tolist() for parameter in model.parameters()]


REFUSED = {"builtin-fp16": "isTensorList"}
"""torch's C++ hook expects the future's value of C++ backends; the hook `fp16` does the same
in Python."""

LAYOUTS = {"one-node": Layout.one_node(2), "two-nodes": Layout.two_zones(1, 1)}


@pytest.mark.parametrize("name", HOOKS)
def test_training_with_a_torch_hook_equals_training_over_gloo(name):
    gloo = values(run(train, LAYOUTS["one-node"], name, backend="gloo"))
    for layout in LAYOUTS.values():
        hfreduce_values = values(run(train, layout, name))
        if name in REFUSED:
            assert all(REFUSED[name] in our for our in hfreduce_values), hfreduce_values
            continue
        if isinstance(gloo[0], str) and "Gloo" not in gloo[0]:
            # A hook that torch itself does not support without a GPU fails the same way.
            assert hfreduce_values == gloo
            continue
        assert not isinstance(hfreduce_values[0], str), hfreduce_values
        if isinstance(gloo[0], str):
            # torch refuses Gloo by its name, as its threads may hang there; HFReduce trains.
            assert hfreduce_values[0] == hfreduce_values[1]
            continue
        for rank, parameters in enumerate(hfreduce_values):
            for own, expected in zip(parameters, gloo[rank], strict=True):
                torch.testing.assert_close(
                    torch.tensor(own), torch.tensor(expected), rtol=2e-3, atol=2e-4
                )
