"""A small Llama and rank functions of the tests of haiscale.tensor."""

import os
from copy import deepcopy
from dataclasses import replace

import torch
import torch.distributed as dist
from haiscale import moe, tensor
from haiscale.clip import grad_norm
from haiscale.ddp import DistributedDataParallel
from haiscale.mesh import build
from haiscale.placement import Sizes
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

WIDTH, HEAD, TOKENS, VOCABULARY = 64, 16, 12, 96


class Attention(nn.Module):
    def __init__(self, width, head):
        super().__init__()
        self.head = head
        self.wq = nn.Linear(width, width)
        self.wk = nn.Linear(width, width // 2, bias=False)
        self.wv = nn.Linear(width, width // 2, bias=False)
        self.wo = nn.Linear(width, width)

    def forward(self, x):
        batch, length, _ = x.shape
        query, key, value = (
            w(x).view(batch, length, -1, self.head).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True,
                                                    enable_gqa=True)  # fmt: skip
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class Feed(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width, head):
        super().__init__()
        self.attention = Attention(width, head)
        self.feed_forward = Feed(width, 2 * width)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Meta's names."""

    def __init__(self, width=WIDTH, layers=2, head=HEAD, vocabulary=VOCABULARY):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width, padding_idx=vocabulary - 2)
        self.layers = nn.ModuleList(Block(width, head) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def tokens_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (3, TOKENS + 1), generator=generator)


def train(model, *, divided=False, steps=3):
    """Trains; returns the first step's gradients, their norm, and all losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first, losses, norm = {}, [], 0.0
    for step in range(steps):
        tokens = tokens_of(step)
        optimizer.zero_grad()
        with tensor.loss_parallel() if divided else torch.enable_grad():
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        loss = loss.full_tensor() if divided else loss
        losses.append(loss.item())
        if step == 0:
            first = {name: whole(p.grad) for name, p in model.named_parameters()}
            norm = grad_norm(model)
        optimizer.step()
    return first, norm, losses


def whole(gradient):
    full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full.clone()


def modes(rank, size):
    """Trains in each mode with tp 2; gradients, their norm, losses, and the size of this part."""
    os.environ.pop("FLYER_TOPOLOGY", None)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"] = str(size)
    mesh = build(Sizes(tp=size)).dense["tp"]
    results = {}
    for sequence in (False, True):
        for divided in (False, True):
            torch.manual_seed(11 + rank)  # the values of rank 0 are used
            model = Llama()
            for layer in model.layers:
                nn.init.normal_(layer.ffn_norm.weight)
            tensor.parallelize(model, mesh, head_width=HEAD, sequence=sequence,
                               divided_logits=divided)  # fmt: skip
            own = sum(
                (p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters()
            )
            first, norm, losses = train(model, divided=divided)
            gradients = {name: gradient.tolist() for name, gradient in first.items()}
            results[sequence, divided] = [gradients, norm, losses, own]
    errors = []
    if size > 1:
        whole = tokens_of(0)
        for tokens, kind, sequence in (
            (whole[:, :7], tensor.SizeError, True),
            (torch.full_like(whole, VOCABULARY), IndexError, False),
        ):
            try:
                tensor.parallelize(Llama(), mesh, sequence=sequence)(tokens)
            except kind as error:
                errors.append(str(error))
    dist.barrier()
    return results, errors, copies(mesh)


def copies(mesh):
    """Whether a copy has separate parameters, and whether a failed pass left DTensors."""
    model = tensor.parallelize(Llama(), mesh)
    expected = model(tokens_of(0))
    copy = deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    linear = model.layers[0].attention.wo
    try:
        linear(torch.zeros(1, 1, 7))
    except RuntimeError:
        is_restored = all(isinstance(p, DTensor) for p in linear.parameters())
    return bool(copy(tokens_of(0)).equal(expected)), is_restored


def without_weights(model):
    """The model with norms that have no parameters."""
    for layer in model.layers:
        layer.attention_norm = nn.RMSNorm(WIDTH, elementwise_affine=False)
        layer.ffn_norm = nn.RMSNorm(WIDTH, elementwise_affine=False)
    model.norm = nn.RMSNorm(WIDTH, elementwise_affine=False)
    return model


def bare(rank, size):
    """Gradients with norms without parameters, and the error with a plan that has none."""
    os.environ.pop("FLYER_TOPOLOGY", None)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"] = str(size)
    mesh = build(Sizes(tp=size)).dense["tp"]
    torch.manual_seed(11)
    model = without_weights(Llama())
    first, _, _ = train(tensor.parallelize(model, mesh, head_width=HEAD), steps=1)
    model = tensor.parallelize(without_weights(Llama()), mesh, replace(tensor.LLAMA, norms=()))
    try:
        train(model, steps=1)
    except tensor.PlanError as error:
        return {name: gradient.tolist() for name, gradient in first.items()}, str(error)


def wrapped(rank, size):
    """The error of haiscale.ddp around a divided model."""
    os.environ.pop("FLYER_TOPOLOGY", None)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"] = str(size)
    model = tensor.parallelize(Llama(), build(Sizes(tp=size)).dense["tp"])
    try:
        DistributedDataParallel(model)
    except ValueError as error:
        return str(error)


def averaged(rank, size):
    """Averages gradients of DTensors over two replicas of a divided model: all their values."""
    os.environ.pop("FLYER_TOPOLOGY", None)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"] = str(size)
    meshes = build(Sizes(dp=size // 2, tp=2))
    model = tensor.parallelize(Llama(), meshes.dense["tp"], head_width=HEAD)
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if name != "output.weight" or meshes.data_rank:
            parameter.grad = torch.full_like(parameter, 1.0 + meshes.data_rank)
    moe.average_gradients(model, meshes.dense.get_group("dp"))
    output = named.pop("output.weight")
    is_divided = all(isinstance(p.grad, DTensor) for p in model.parameters())
    return is_divided, *(
        sorted({value for p in each for value in p.grad.to_local().flatten().tolist()})
        for each in ([output], named.values())
    )
