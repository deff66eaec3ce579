"""A small Llama: RMSNorm, rotary positions, SwiGLU, no biases."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Llama"]


class Block(nn.Module):
    """One layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.RMSNorm(width)
        hidden = 8 * width // 3 // 16 * 16
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Input and output (batch, length, width)."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = _turned(query, turns), _turned(key, turns)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_and_up(self.feed_norm(x)).chunk(2, -1)
        result: torch.Tensor = x + self.down(functional.silu(gate) * up)
        return result


class Llama(nn.Module):
    """Predicts the next of 256 bytes; logits (batch, length, 256)."""

    def __init__(self, context: int, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(context), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Input (batch, length) of bytes."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.turns)
        result: torch.Tensor = self.head(self.norm(x))
        return result


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    cosine, sine = turns[:, : x.shape[-2]]
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
