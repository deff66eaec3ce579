"""Models and rank functions of the tests of haiscale.moe: forked ranks load it by its file."""

import contextlib
import hashlib
import os
import signal
import time

import hfreduce
import torch
import torch.distributed as dist
from haiscale import moe
from haiscale.clip import clip_grad_norm, grad_norm
from haiscale.ddp import DistributedDataParallel
from haiscale.mesh import build
from haiscale.placement import Sizes
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN, TOKENS = 48, 32, 24


class Feed(nn.Module):
    """A shared expert."""

    def __init__(self, width=WIDTH, hidden=HIDDEN):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))


class Net(nn.Module):
    """Two layers of experts with shared ones, residual."""

    def __init__(self, experts, routing, links=None, width=WIDTH, hidden=HIDDEN, overlap=True):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(
            moe.MoE(width, hidden, experts, routing, links=links,
                    shared=Feed(width, hidden), overlap=overlap)
            for _ in range(2)
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return x


def links_of(ep, size):
    """Links of the axis ep, on the nodes of the test's layout; and the mesh."""
    nodes = int(os.environ.get("TEST_NODES", "1"))
    meshes = build(Sizes(dp=size, ep=ep, ep_nodes=nodes))
    return moe.connect(meshes), meshes


def batch(step, parts, part=None, tokens=TOKENS, width=WIDTH):
    """Inputs and targets: part `part` of `parts`, or all of them."""
    generator = torch.Generator().manual_seed(77 + step)
    data = torch.randn(2, parts, tokens, width, generator=generator)
    return data.flatten(1, 2) if part is None else data[:, part]


def loss_of(model, data, factor):
    loss = (model(data[0]) - data[1]).square().mean()
    return loss + factor * moe.balance_loss(model) if factor else loss


def train(model, steps, parts, part=None, average=lambda: None, factor=0.0, mean=lambda x: x):
    """Trains; returns the first step's gradients, all losses and a digest."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first, losses = {}, []
    for step in range(steps):
        loss = loss_of(model, batch(step, parts, part), factor)
        optimizer.zero_grad()
        loss.backward()
        average()
        if step == 0:
            first = {n: p.grad.clone() for n, p in model.named_parameters()}
        losses.append(mean(loss.item()))
        optimizer.step()
        moe.balance(model)
    return first, losses, digest(model)


def digest_of(tensors):
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def digest(model):
    fingerprint = hashlib.sha256()
    for name, value in model.state_dict().items():
        fingerprint.update(name.encode() + value.contiguous().numpy().tobytes())
    return fingerprint.hexdigest()


def mean_of(value):
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item() / dist.get_world_size()


def trained(rank, size, ep, experts, options, factor, steps=4):
    """Trains on all ranks, twice with overlap and once without."""
    torch.use_deterministic_algorithms(True)
    links, meshes = links_of(ep, size)
    replicas = meshes.expert.get_group("expert_dp") if meshes.expert else dist.group.WORLD
    runs = []
    for overlap in (True, True, False):
        torch.manual_seed(5)
        model = Net(experts, moe.Routing(**options), links, overlap=overlap)
        runs.append(
            train(model, steps, size, meshes.data_rank,
                  lambda model=model: moe.average_gradients(model, experts=replicas),
                  factor, mean_of)
        )  # fmt: skip
    first, losses, _ = runs[0]
    gradients = {name: gradient.tolist() for name, gradient in first.items()}
    return {
        "gradients": gradients,
        "losses": losses,
        "digests": [run[2] for run in runs],
        "position": links.position,
        "bias": [layer.router.bias.tolist() for layer in model.layers],
    }


def recomputed(rank, size, reentrant):
    """Trains with activations kept, and computed again in backward: digests and loads."""
    links, meshes = links_of(size, size)
    runs = []
    for again in (False, True):
        torch.manual_seed(5)
        model = Net(16, moe.Routing(2), links)
        if again:
            for layer in model.layers:
                forward = layer.forward
                layer.forward = lambda x, forward=forward: checkpoint(
                    forward, x, use_reentrant=reentrant
                )
        model(batch(0, size, rank)[0]).sum().backward()
        loads = [layer.load.tolist() for layer in model.layers]
        _, losses, fingerprint = train(
            model, 3, size, meshes.data_rank, lambda model=model: moe.average_gradients(model)
        )
        runs.append((loads, losses, fingerprint))
    return runs


def heads(rank, size):
    """Rank 0 uses head a, rank 1 head b, none of them c: the gradients of each rank, averaged."""
    model = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in "abc"})
    model["ab"[rank]](torch.full((1, 2), 1.0 + rank)).sum().backward()
    moe.average_gradients(model)
    return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


def wrapped(rank, size, ep):
    """The error of a wrapper over all ranks, and whether it or one of the replicas changed values.

    Ranks have different values, those of replicas included.
    """
    links, meshes = links_of(ep, size)
    torch.manual_seed(rank)
    model = Net(16, moe.Routing(2), links)
    before, error = digest(model), None
    try:
        DistributedDataParallel(model)
    except ValueError as refused:
        error = str(refused)
    is_kept = digest(model) == before
    DistributedDataParallel(
        model.layers[0].experts,
        process_group=meshes.dense.get_group("dp")
        if meshes.expert is None
        else meshes.expert.get_group("expert_dp"),
    )
    return error, is_kept, digest(model.layers[0].experts)


def norms(rank, size, ep):
    """The norm of all gradients on this rank, and that of the experts after clipping to 0.01."""
    links, meshes = links_of(ep, size)
    torch.manual_seed(5)
    model = Net(16, moe.Routing(2), links)
    loss_of(model, batch(0, size, meshes.data_rank), 0.0).backward()
    replicas = meshes.expert.get_group("expert_dp") if meshes.expert else dist.group.WORLD
    moe.average_gradients(model, experts=replicas)
    norm = clip_grad_norm(model, 0.01)
    return norm, grad_norm(model), digest_of([model.first.weight.grad])


class Uniform(nn.Module):
    """A router that chooses uniformly, as the model of traffic assumes."""

    def __init__(self, experts, top_k, seed):
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, tokens):
        count = tokens.shape[0]
        scores = torch.rand(count, self.experts, generator=self.generator)
        chosen = scores.topk(self.top_k, dim=1).indices.sort(1).values
        weights = torch.full((count, self.top_k), 1 / self.top_k)
        return moe.Choice(chosen, weights, scores / scores.sum(1, keepdim=True))


def traffic(rank, size, ep, experts, top_k, tokens, width):
    """Sends uniform tokens forward and back; returns counters, and what was given to the wire."""
    links, _ = links_of(ep, size)
    layer = moe.MoE(width, 8, experts, moe.Routing(top_k), links=links)
    layer.router = Uniform(experts, top_k, rank)
    sent = watch(links.across)
    x = torch.randn(tokens, width, requires_grad=True)
    layer(x).sum().backward()
    counters = links.counters
    return {"tokens": counters.tokens, "copies": counters.copies, "pairs": counters.pairs,
            "bytes": counters.bytes, "sent": sum(sent), "exchanges": len(sent)}  # fmt: skip


def watch(group):
    """Bytes for other ranks, of each all-to-all of a group from here on."""
    sent, start, own = [], dist.all_to_all_single, dist.get_rank(group)

    def all_to_all(output, source, received, counts, used=None, **options):
        if used is group:
            rows = sum(count for rank, count in enumerate(counts) if rank != own)
            sent.append(rows * source[:1].nbytes)
        return start(output, source, received, counts, used, **options)

    dist.all_to_all_single = all_to_all
    return sent


class Fixed(nn.Module):
    """A router with given experts."""

    def __init__(self, chosen):
        super().__init__()
        self.chosen = chosen

    def forward(self, tokens):
        count = tokens.shape[0]
        weights = torch.linspace(0.2, 1.0, max(1, self.chosen.numel()))[: self.chosen.numel()]
        return moe.Choice(self.chosen[:count], weights.view_as(self.chosen)[:count],
                          torch.full((count, 16), 1 / 16))  # fmt: skip


def pair_of_layers(links, routing=None, experts=16):
    """The same layer on these links, and with all experts in this process."""
    layers = []
    for own in (links, None):
        torch.manual_seed(9)
        layers.append(moe.MoE(WIDTH, HIDDEN, experts, routing or moe.Routing(2), links=own,
                              shared=Feed()))  # fmt: skip
    return layers


def extremes(rank, size):
    """Unusual but valid choices: the largest error of outputs and gradients, by name."""
    links, _ = links_of(size, size)
    rows = 12
    cases = {
        "all tokens to one expert": torch.full((rows, 1), 9),
        "no expert for a token": torch.tensor([[-1, -1], [-1, 3], [2, 15]]).repeat(rows // 3, 1),
        "no expert for any token": torch.full((rows, 2), -1),
        "no token on rank 1": torch.tensor([[0, 5]]).repeat(0 if rank == 1 else rows, 1),
        "no token": torch.empty(0, 2, dtype=torch.int64),
        "tokens on rank 1 alone": torch.tensor([[4, 11]]).repeat(rows if rank == 1 else 0, 1),
        "all experts": torch.arange(16).repeat(rows, 1),
        "uneven": torch.tensor([[rank, 8 + rank]]).repeat(1 + 3 * rank, 1),
    }
    errors = {}
    for name, chosen in cases.items():
        torch.manual_seed(rank)
        x = torch.randn(chosen.shape[0], WIDTH)
        outputs, gradients = [], []
        for layer in pair_of_layers(links):
            layer.router = Fixed(chosen)
            own = x.clone().requires_grad_()
            y = layer(own)
            y.sin().sum().backward()
            outputs.append(y)
            gradients.append(own.grad)
            assert all(p.grad is not None for p in layer.experts.parameters()), name
        errors[name] = max(
            (float((a - b).abs().max()) if a.numel() else 0.0) for a, b in (outputs, gradients)
        )
        assert outputs[0].shape == x.shape
    return errors


def wrong(rank, size):
    """Wrong input on one rank: the error of each rank; valid calls succeed afterwards."""
    links, _ = links_of(size, size)
    layer, _ = pair_of_layers(links)
    second, _ = pair_of_layers(links)
    x = torch.randn(6, WIDTH)
    found = {}

    def attempt(name, call):
        try:
            call()
        except (moe.MoEError, ValueError) as error:
            found[name] = [type(error).__name__, str(error), getattr(error, "rank", None),
                           getattr(error, "layer", None)]  # fmt: skip
        else:
            found[name] = None
        # The numbers of calls may differ now, as after any call that not all ranks made.
        layer._calls = second._calls = 100 * len(found)
        layer(x).sum().backward()

    layer(x), second(x)
    attempt("NaN", lambda: layer(x * torch.nan if rank == 2 else x))
    attempt("infinity", lambda: layer(x * torch.inf if rank == 0 else x))
    attempt("width", lambda: layer(x[:, :-1] if rank == 1 else x))
    attempt("order", lambda: (second if rank == 3 else layer)(x))
    attempt("expert", lambda: chosen(layer, 99 if rank == 1 else 0, x))
    for name, changed in {
        "top_k": {"routing": moe.Routing(3)}, "hidden": {"hidden": 8}, "experts": {"experts": 32},
    }.items():  # fmt: skip
        arguments = {"width": WIDTH, "hidden": HIDDEN, "experts": 16, "routing": moe.Routing(2)}
        other = moe.MoE(**(arguments | (changed if rank == 3 else {})), links=links)
        attempt(name, lambda other=other: other(x))
    return found


def wrong_alone(rank, size):
    """The rank that the error of a layer with all experts names, with links and without."""
    links, _ = links_of(1, size)
    named = []
    for own in (links, None):
        layer = moe.MoE(WIDTH, HIDDEN, 16, moe.Routing(2), links=own)
        try:
            layer(torch.full((6, WIDTH), torch.nan))
        except moe.NonFiniteError as error:
            named.append(error.rank)
    return named


def chosen(layer, expert, x):
    """Calls a layer with a router that chooses this expert."""
    router, layer.router = layer.router, Fixed(torch.full((6, 1), expert))
    try:
        layer(x)
    finally:
        layer.router = router


class Bad(nn.Module):
    """A shared expert that fails in a phase of its third call, by an exception or a kill."""

    def __init__(self, phase, kind):
        super().__init__()
        self.phase, self.kind, self.calls = phase, kind, 0
        self.weight = nn.Parameter(torch.ones(()))

    def fail(self):
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("out of memory, for example")

    def forward(self, x):
        self.calls += 1
        y = x * self.weight
        if self.calls == 3 and self.phase == "forward":
            self.fail()
        if self.calls == 3 and self.phase == "backward":
            y.register_hook(lambda _gradient: self.fail())
        return y


def fails(rank, size, phase, kind):
    """Rank 1 fails while tokens are under way; the error of the others, and its seconds."""
    links, _ = links_of(size, size)
    torch.manual_seed(0)
    bad = Bad(phase if rank == 1 else "", kind)
    layer = moe.MoE(WIDTH, HIDDEN, 16, moe.Routing(2), links=links, shared=bad, name="deep")
    x = torch.randn(6, WIDTH, requires_grad=True)
    step, started = 0, time.monotonic()
    try:
        while step < 6:
            started = time.monotonic()
            layer(x).sum().backward()
            step += 1
    except Exception as error:
        if rank == 1 and phase == "forward":
            # It stays, as a rank that cleans up: the others must not wait for its end.
            with contextlib.suppress(RuntimeError, hfreduce.CollectiveError):
                dist.barrier()
        return [step, type(error).__name__, str(error), getattr(error, "layer", None),
                getattr(error, "rank", None), time.monotonic() - started]  # fmt: skip
    return "finished"
