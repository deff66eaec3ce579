"""Models and training loops of the tests of haiscale.pipeline: forked ranks load it by its file."""

import torch
import torch.distributed as dist
from haiscale.clip import clip_grad_norm
from haiscale.pipeline.actions import from_csv, to_csv
from haiscale.pipeline.module import Pipeline
from haiscale.pipeline.schedules import build, zb_v
from torch import nn
from torch.nn import functional

ROWS, LENGTH, WORDS, WIDTH = 4, 8, 32, 48


class Block(nn.Module):
    """A block with normalization and two matrices."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.narrow(functional.gelu(self.wide(self.norm(x))))


def model(blocks=6, tied=False, seed=5):
    """Layers by name, as of a model with a list of blocks: 0.1 M parameters."""
    torch.manual_seed(seed)
    layers = {"embed": nn.Embedding(WORDS, WIDTH)}
    layers |= {f"blocks.{k}": Block() for k in range(blocks)}
    layers["head"] = nn.Linear(WIDTH, WORDS, bias=False)
    if tied:
        layers["head"].weight = layers["embed"].weight
    return layers


def loss_fn(logits, tokens):
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def batch(step, microbatches, replica=0):
    """Inputs and targets of all micro-batches."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    tokens = torch.randint(WORDS, (microbatches * ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def schedule_of(name, ranks, microbatches):
    """A schedule by name; `csv` is one of others, `interleaved` has two stages on each rank."""
    if name == "csv":
        return from_csv(to_csv(zb_v(ranks, microbatches)), "theirs")
    chunks = 2 if name == "Interleaved1F1B" else 1
    return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=chunks)


def optimizer_of(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def reference(microbatches, steps=3, tied=False, replicas=1, clip=0.5):
    """One process that accumulates the micro-batches one after the other."""
    layers = model(tied=tied)
    whole = nn.Module()
    for name, layer in layers.items():
        whole.add_module(name.replace(".", "_"), layer)
    named = {
        f"{name}.{inner}": p for name, layer in layers.items()
        for inner, p in layer.named_parameters()
    }  # fmt: skip
    optimizer = optimizer_of(list(dict.fromkeys(named.values())))
    history = []
    for step in range(steps):
        sums = []
        for replica in range(replicas):
            optimizer.zero_grad()
            inputs, targets = batch(step, microbatches, replica)
            total = torch.zeros((), dtype=torch.float64)
            for x, t in zip(inputs.split(ROWS), targets.split(ROWS), strict=True):
                for layer in layers.values():
                    x = layer(x)
                loss = loss_fn(x, t) * (1 / microbatches)
                loss.backward()
                total += loss.detach()
            sums.append([p.grad for p in named.values()])
        for column, p in zip(zip(*sums, strict=True), named.values(), strict=True):
            p.grad = sum(column[1:], start=column[0]) / replicas if replicas > 1 else column[0]
        norm = clip_grad_norm(whole, clip)
        optimizer.step()
        history.append((total.item(), norm))
    return {name: p.detach().clone() for name, p in named.items()}, history


def train(pipeline, steps=3, replica=0, clip=0.5):
    """Trains a pipeline; returns the losses and norms of its steps."""
    optimizer = optimizer_of(list(pipeline.parameters()))
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(step, pipeline.schedule.microbatches, replica)
        loss = pipeline.step(inputs, targets)
        norm = pipeline.clip_grad_norm_(clip)
        optimizer.step()
        history.append((loss, norm))
    return history


def differences(pipeline, expected):
    """Names whose parameters have other bits than expected, and the largest relative difference."""
    names, largest = [], 0.0
    state = pipeline.state_dict()
    assert state
    for name, value in state.items():
        if not torch.equal(value, expected[name]):
            names.append(name)
            error = (value - expected[name]).norm() / expected[name].norm()
            largest = max(largest, error.item())
    return names, largest


def bits(rank, size, cases):
    """For each case (name, micro-batches, tied): how a pipeline differs from one process."""
    results = []
    for name, microbatches, tied in cases:
        expected, history = reference(microbatches, tied=tied)
        schedule = schedule_of(name, size, microbatches)
        pipeline = Pipeline(model(tied=tied), schedule, loss_fn)
        own = train(pipeline)
        names, largest = differences(pipeline, expected)
        results.append((name, names, largest, own, history, sorted(pipeline.state_dict())))
    return results


def replicas(rank, size, name, microbatches, tied):
    """Two pipelines of two ranks: stages are averaged over the pipelines."""
    pipelines = [dist.new_group([r, r + size // 2]) for r in range(size // 2)]
    data = [dist.new_group(range(k * size // 2, (k + 1) * size // 2)) for k in range(2)]
    replica, stage = rank % (size // 2), rank // (size // 2)
    torch.manual_seed(rank)
    pipeline = Pipeline(
        model(tied=tied, seed=5 + 100 * replica), schedule_of(name, 2, microbatches), loss_fn,
        group=pipelines[replica], data_group=data[stage],
    )  # fmt: skip
    own = train(pipeline, replica=replica)
    expected, history = reference(microbatches, tied=tied, replicas=2)
    return differences(pipeline, expected), own, history


def accumulated(rank, size, microbatches, tied):
    """Gradients of two steps without zero_grad, of a loss that adds over tokens."""

    def added(logits, tokens):
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")

    scale = 1 / (2 * microbatches * ROWS * LENGTH)
    layers = model(tied=tied)
    for step in range(2):
        inputs, targets = batch(step, microbatches)
        for x, t in zip(inputs.split(ROWS), targets.split(ROWS), strict=True):
            for layer in layers.values():
                x = layer(x)
            (added(x, t) * scale).backward()
    expected = {
        f"{name}.{inner}": p.grad
        for name, layer in layers.items()
        for inner, p in layer.named_parameters()
    }
    pipeline = Pipeline(model(tied=tied), schedule_of("1F1B", size, microbatches), added)
    for step in range(2):
        pipeline.step(*batch(step, microbatches), scale=scale)
    return {
        name: (torch.equal(p.grad, expected[name]), relative(p.grad, expected[name]))
        for name, p in pipeline.module.named_parameters()
    }


def relative(value, expected):
    return ((value - expected).norm() / expected.norm()).item()
