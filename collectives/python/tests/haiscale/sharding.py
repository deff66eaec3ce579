"""Models and training loops of the tests of haiscale.fsdp: forked ranks load it by its file."""

import contextlib
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from haiscale.ddp import DistributedDataParallel
from haiscale.fsdp import collectives, fully_shard, overlap
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
import training

WIDTH = 48


class OwnSGD(torch.optim.SGD):
    """An optimizer of the script's own."""


OPTIMIZERS = {**training.OPTIMIZERS, "own": lambda p: OwnSGD(p, lr=0.05, momentum=0.9)}


class Block(nn.Module):
    """A layer of a Llama: norm, attention, gated feed-forward; one weight is used twice."""

    def __init__(self, dtype):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 101)  # not divisible by 2, 4 or 8
        self.down = nn.Linear(101, WIDTH, bias=False)
        self.to(dtype)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.silu(self.gate(self.out(x))))


class Net(nn.Module):
    """0.1 M parameters, with a tied weight; `bias` has fewer elements than ranks."""

    def __init__(self, layers=4, dtype=torch.float32, extra=None):
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embed.weight
        self.bias = nn.Parameter(torch.zeros(3))
        self.to(dtype)
        self.extra = extra
        if extra == "frozen":
            for name in ("0.qkv.weight", "2.gate.weight"):
                self.blocks.get_parameter(name).requires_grad_(False)
            self.blocks[1].requires_grad_(False)
        if extra == "unused":
            self.blocks[1].spare = nn.Linear(5, 5, dtype=dtype)
            self.never = Block(dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.extra == "again" else block(x)
        if self.extra == "called twice":
            x = self.blocks[1](x)
        return self.head(self.norm(x)) + self.bias.sum()


class Lazy(dist.Work):
    """A collective that starts when it is waited for: its result is NaN until then."""

    def __init__(self, output, start):
        super().__init__()
        self._start = start
        own = output.clone()
        output.fill_(float("nan"))
        self._restore = lambda: output.copy_(own)

    def wait(self, timeout=None):
        start, self._start = self._start, None
        if start is not None:
            self._restore()
            start().wait()
        return True

    def is_completed(self):
        return self._start is None


@contextlib.contextmanager
def lazily():
    """Makes every gather and scatter land as late as possible."""

    def late(function):
        def call(output, *args, async_op, **kwargs):
            return Lazy(output, lambda: function(output, *args, async_op=True, **kwargs))

        return call

    plain = collectives.dist
    late_functions = {
        name: late(getattr(dist, name))
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
    }
    collectives.dist = SimpleNamespace(**{**vars(dist), **late_functions})
    try:
        yield
    finally:
        collectives.dist = plain


def mesh_of(replicas=1):
    size = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    shape = (replicas, size // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "shard"))


def shard(model, function, mesh, **options):
    for block in model.blocks:
        function(block, mesh=mesh, **options)
    if model.extra == "unused":
        function(model.never, mesh=mesh, **options)
    return function(model, mesh=mesh, **options)


def groups_of(model):
    """Two groups of parameters with different terms."""
    parameters = list(nn.Module.parameters(model))
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "lr": 2e-3, "weight_decay": 0},
    ]


def build(kind, optimizer="adamw", replicas=1, mesh=None, layers=4, dtype="float32", extra=None,
          policy=None, independent=False, **options):  # fmt: skip
    """Kinds: `ddp`, `torch` (its FSDP2), `plain` (ours without optimizer), `overlap`."""
    if policy is not None:
        options["mp_policy"] = MixedPrecisionPolicy(**policy)
    torch.manual_seed(0 if kind == "torch" else dist.get_rank())  # ours copies rank 0's values
    model = Net(layers, getattr(torch, dtype), extra)
    if kind == "ddp":
        made = OPTIMIZERS[optimizer](groups_of(model))
        return DistributedDataParallel(model, optimizer=made), made, None
    mesh = mesh or mesh_of(replicas)
    shard(model, torch_fully_shard if kind == "torch" else fully_shard, mesh, **options)
    made = OPTIMIZERS[optimizer](groups_of(model))
    if kind == "torch":
        return model, made, None
    optimizers = made if kind == "overlap" else ()
    reducer = overlap(model, optimizers, independent=independent)
    return model, made, reducer


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def state_of(model, optimizer):
    """Parameters and states of the optimizer, whole and by name."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    parameters = dict(module.named_parameters())
    optimizer.state_dict()
    states = {
        name: {key: whole(value) for key, value in optimizer.state.get(p, {}).items()}
        for name, p in parameters.items()
    }
    return {name: whole(p) for name, p in parameters.items()}, states


def accumulates(model, how, last):
    """Gradients are synchronized for the last micro-batch alone (`once`), for `each`, or only over
    the replicas for the last one (`shards`).
    """
    if isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext() if last else model.no_sync()
    if how == "once":
        model.set_requires_gradient_sync(last)
    elif how == "shards":
        model.set_requires_all_reduce(last)
    return contextlib.nullcontext()


def train(kind, steps=4, micro_steps=1, how="once", clip=None, read=False, schedule=False,
          lazy=False, keep_zeros=False, manual=False, **options):  # fmt: skip
    """Trains a Net; returns digests, how the last step was made, and what stayed in flight."""
    warnings.simplefilter("ignore")
    with lazily() if lazy else contextlib.nullcontext():
        model, optimizer, reducer = build(kind, **options)
        rank = dist.get_rank()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) if schedule else None
        if manual:
            model.set_manual_backward_finalization(True)
        in_flight, norms, blocks = 0, [], []
        for step in range(steps):
            for micro in range(micro_steps):
                with accumulates(model, how, micro == micro_steps - 1):
                    tokens = training.tokens_of(step * micro_steps + micro, rank)
                    loss = training.loss_of(model, tokens) / micro_steps
                    loss.backward()
            if manual:
                model.finalize_backward()
            in_flight = len(reducer.in_flight) if reducer else 0
            if read:
                assert all(whole(p.grad).isfinite().all() for p in model.parameters())
            if clip:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                norms.append(float(whole(norm)))
            optimizer.step()
            if scheduler:
                scheduler.step()
            optimizer.zero_grad(set_to_none=not keep_zeros)
            blocks.append(reducer.communication_blocks if reducer else 0)
        parameters, states = state_of(model, optimizer)
        return {
            "parameters": training.digest(parameters),
            "digest": training.digest(parameters, states),
            "flat": torch.cat([p.detach().flatten().float() for p in parameters.values()]),
            "in_flight": in_flight,
            "whole": reducer and reducer.whole_step,
            "norms": norms,
            "blocks": blocks,
        }


def train_all(rank, size, runs):
    """Several trainings on the same ranks, by name."""
    results = {}
    for name, options in runs.items():
        results[name] = train(**options)
        results[name]["flat"] = results[name]["flat"].tolist()
    return results
