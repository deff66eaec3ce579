"""A small GPT and loops in the shape of HaiScale's GPT-2 scripts: forked ranks load it by its file.

WORDS, WIDTH and so on are small; everything else is as in a script for accelerators.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

WORDS, WIDTH, CONTEXT, ROWS, BLOCKS = 64, 48, 12, 16, 4
LEARNING_RATE, MAX_NORM = 1e-2, 1.0


class Embedding(nn.Module):
    """Tokens and positions."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, CONTEXT, WIDTH))

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions[:, : tokens.shape[1]]


class Block(nn.Module):
    """torch's encoder layer with a causal mask in a buffer."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, 0.0, activation=functional.gelu, batch_first=True, norm_first=True
        )
        self.register_buffer("mask", ~torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril())

    def forward(self, x):
        length = x.shape[1]
        return self.encoder(x, self.mask[:length, :length])


class Head(nn.Module):
    """Norm and logits."""

    def __init__(self):
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.logits(self.norm(x))


class Loss(nn.Module):
    """Cross entropy of the next token, divided by the number of micro-batches."""

    def __init__(self, chunks=1):
        super().__init__()
        self.chunks = chunks

    def forward(self, logits, tokens):
        flat = logits[:, :-1].flatten(0, 1)
        return functional.cross_entropy(flat, tokens[:, 1:].flatten()) / self.chunks


class GPT(nn.Module):
    """0.1 M parameters."""

    def __init__(self, seed=7):
        super().__init__()
        torch.manual_seed(seed)
        self.core = nn.Sequential(Embedding(), *(Block() for _ in range(BLOCKS)), Head())

    def forward(self, tokens):
        return self.core(tokens)


def optimizer_of(model):
    """AdamW with weight decay for matrices alone, found by name as the scripts do."""
    decay, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = name.endswith("weight") and "norm" not in name and "tokens" not in name
        (decay if is_matrix else others).append(parameter)
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


def batch(step, rank=0, size=1, rows=ROWS):
    """A rank's tokens of a step; all ranks' tokens in a row are those of one process."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS // 2, (rows * size, CONTEXT), generator=generator)
    return tokens.chunk(size)[rank]


def clip(parameters):
    return torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)


def plain(state):
    """A state that can leave its process."""
    return {name: value.numpy() for name, value in state.items()}


def differences(state, expected):
    """Names whose values differ by more than rounding.

    The gradient of the keys' bias is zero but for rounding, which AdamW scales to a whole step.
    """
    return [
        name
        for name, value in state.items()
        if not np.allclose(value, expected[name], atol=1e-4) and "in_proj_bias" not in name
    ]


def reference(steps=4, size=1, chunks=1, clipped=None):
    """One process that computes the gradients of all ranks' batches one after the other.

    `clipped` are lists of layers whose gradients have a separate norm; default: the whole model.
    """
    torch.set_num_threads(1)  # as the ranks: more threads add in another order
    model, criterion = GPT(), Loss(chunks * size)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(steps):
        total = 0.0
        for part in batch(step, rows=ROWS * size).chunk(chunks * size):
            loss = criterion(model(part), part)
            loss.backward()
            total += loss.item()
        for layers in clipped or [range(len(model.core))]:
            clip([p for layer in layers for p in model.core[layer].parameters()])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    with torch.no_grad():
        tokens = batch(100)
        validation = Loss()(model.eval()(tokens), tokens).item()
    return losses, validation, plain(model.state_dict())
