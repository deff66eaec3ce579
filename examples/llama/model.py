"""A byte-level Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention; Meta's names."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

BYTES = 256
"""Size of the vocabulary."""


@dataclass(frozen=True)
class Size:
    """Sizes of a model; `key_heads` are shared by `heads / key_heads` heads each."""

    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads


SIZES = {
    "tiny": Size(width=32, layers=4, heads=4, key_heads=2, hidden=64),  # 45,000 parameters
    "small": Size(width=256, layers=8, heads=8, key_heads=4, hidden=704),  # 6 million
}


class Attention(nn.Module):
    """Causal self-attention. Heads are counted from the width: with tp a rank has some of them."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.head_width
        keys = size.key_heads * size.head_width
        self.wq = nn.Linear(size.width, size.width, bias=False)
        self.wk = nn.Linear(size.width, keys, bias=False)
        self.wv = nn.Linear(size.width, keys, bias=False)
        self.wo = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            w(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        attended = functional.scaled_dot_product_attention(
            rotated(query), rotated(key), value, is_causal=True, enable_gqa=True
        )
        return self.wo(attended.transpose(1, 2).reshape(batch, length, -1))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al., 2021): pairs of elements turn by position x frequency."""
    length, width = x.shape[-2:]
    frequencies = 10_000 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.arange(length, device=x.device).unsqueeze(1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, size: Size, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width, eps=1e-5)
        self.attention = Attention(size)
        self.ffn_norm = nn.RMSNorm(size.width, eps=1e-5)
        self.feed_forward = feed_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Predicts the next byte. Input (batch, length) of ints below 256, output logits.

    `feed_forward` makes the part of each block after its attention; examples/moe gives its own.
    """

    def __init__(self, size: Size, feed_forward: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        make = feed_forward or (lambda: FeedForward(size.width, size.hidden))
        self.size = size
        self.tok_embeddings = nn.Embedding(BYTES, size.width)
        self.layers = nn.ModuleList(Block(size, make()) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        self.output = nn.Linear(size.width, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def in_order(self) -> dict[str, nn.Module]:
        """The layers in the order of their calls, with their full names: for a pipeline."""
        blocks = {f"layers.{k}": block for k, block in enumerate(self.layers)}
        first, last = {"tok_embeddings": self.tok_embeddings}, {"norm": self.norm}
        return {**first, **blocks, **last, "output": self.output}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = tokens
        for layer in self.in_order().values():
            x = layer(x)
        return x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next bytes."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
