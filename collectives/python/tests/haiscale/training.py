"""Models and training loops of the tests of haiscale.ddp: forked ranks load it by its file."""

import contextlib
import hashlib
import warnings

import torch
from haiscale.ddp import DistributedDataParallel, groups
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP


class Net(nn.Module):
    """Batch norm, a layer that is called twice, attention, and tied weights: 0.1 M parameters."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(64, 96)
        self.twice = nn.Linear(96, 96)
        self.norm = nn.BatchNorm1d(96)
        self.attention = nn.MultiheadAttention(96, 4, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(96, 400), nn.GELU(), nn.Linear(400, 96))
        self.head = nn.Linear(96, 64, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.twice(functional.gelu(self.twice(x)))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x + self.wide(x))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}


def tokens_of(step, rank, sequences=4, length=16):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(64, (sequences, length + 1), generator=generator)


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def digest(*trees):
    """Of all tensors, with their names, in the order of the names."""
    fingerprint = hashlib.sha256()

    def visit(name, value):
        if isinstance(value, torch.Tensor):
            fingerprint.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            fingerprint.update(value.detach().contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                visit(f"{name}.{key}", value[key])
        elif isinstance(value, list | tuple):
            for index, each in enumerate(value):
                visit(f"{name}.{index}", each)
        else:
            fingerprint.update(f"{name} {value!r}".encode())

    for tree in trees:
        visit("", tree)
    return fingerprint.hexdigest()


class Late:
    """The work of an allreduce that never reports its end: a bucket is used only where it must."""

    def __init__(self, work):
        self.wait = work.wait

    def is_completed(self):
        return False


def land_late():
    """Makes every allreduce of this process land as late as possible."""
    start = groups.allreduce
    groups.allreduce = lambda *args: Late(start(*args))


def wrap(kind, model, optimizer=(), cap_mb=0.05, **options):
    """`overlap`, `late` (the same, all buckets land late), `barrier` (the same class without
    overlap), `plain` (no optimizer) or `torch`.
    """
    if kind == "torch":
        warnings.simplefilter("ignore")
        return TorchDDP(model, bucket_cap_mb=cap_mb, find_unused_parameters=True)
    if kind == "late":
        land_late()
    optimizers = () if kind == "plain" else optimizer
    overlap = kind in {"overlap", "late"}
    return DistributedDataParallel(
        model, bucket_cap_mb=cap_mb, optimizer=optimizers, overlap=overlap, **options
    )


def train(
    rank, size, kind, optimizer_name="adamw", steps=5, micro_steps=1, clip=None, dtype="float32",
    schedule=False, zero="before", cap_mb=0.05, levels=None,
):  # fmt: skip
    """Trains a Net; returns its digest, flat parameters, and how the last step was made."""
    torch.manual_seed(rank)  # rank 0's first values reach all
    model = Net(getattr(torch, dtype))
    optimizer = OPTIMIZERS[optimizer_name](
        [{"params": [p for p in model.parameters() if p.dim() > 1]},
         {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 2e-3, "weight_decay": 0}]
    )  # fmt: skip
    options = {} if kind == "torch" else {"levels": levels}
    ddp = wrap(kind, model, optimizer, cap_mb, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) if schedule else None
    whole = []
    for step in range(steps):
        if zero == "before":
            optimizer.zero_grad()
        for micro in range(micro_steps):
            last = micro == micro_steps - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = loss_of(ddp, tokens_of(step * micro_steps + micro, rank)) / micro_steps
                if zero == "inside" and micro == 0:
                    optimizer.zero_grad()
                loss.backward()
        if clip == "own" and kind != "torch":
            ddp.clip_grad_norm_(0.1)
        elif clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if scheduler:
            scheduler.step()
        if zero == "after":
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        whole.append(getattr(ddp, "whole_step", None))
    in_flight = len(ddp.reducer.in_flight) if kind != "torch" else 0
    state = digest(model.state_dict(), optimizer.state_dict())
    flat = torch.cat([p.detach().flatten().float() for p in model.parameters()])
    return {"digest": state, "flat": flat.tolist(), "whole": whole[-1], "in_flight": in_flight}
