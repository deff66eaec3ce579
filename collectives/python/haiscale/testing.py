"""Timed layers: modules that take a given time and no processor, as on an accelerator.

For tests and benchmarks of overlap on machines without accelerators: eight ranks on two cores
compute for as long as eight accelerators would, and the cores are free for communication::

    model = timed_model(layers=8, width=256, parameters=1 << 20, forward_seconds=0.01)

Outputs and gradients are real: they depend on the input and on every parameter, and are the same
bits in every run. Arithmetic is a few operations per parameter and element, inside the given time
unless that is shorter.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TimedLayer", "timed_model"]


class TimedLayer(nn.Module):
    """``y = x * (1 + weighted mean of the weight's rows)``, in a given time.

    The backward pass has two parts, as zero-bubble schedules split it: the gradient of the input,
    then that of the weight. Each part sleeps for the rest of its time. Without a gradient of the
    input, as in the first layer of a model, its part is left out.

    Args:
        width: Size of the last dimension of input and output.
        parameters: Number of parameters, a multiple of `width`.
        forward_seconds: Time of the forward pass.
        input_backward_seconds: Time of the input's gradient. Default: that of the forward pass.
        weight_backward_seconds: Time of the weight's gradient. Default: that of the forward pass.
        seed: Of the weight's first values, which are the same on every rank.
    """

    def __init__(
        self,
        width: int,
        parameters: int,
        forward_seconds: float,
        *,
        input_backward_seconds: float | None = None,
        weight_backward_seconds: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if width < 1 or parameters < width or parameters % width:
            raise ValueError(
                f"invalid parameters {parameters}: expected a multiple of the width {width} above 0"
            )
        self.forward_seconds = forward_seconds
        self.input_backward_seconds = _or(input_backward_seconds, forward_seconds)
        self.weight_backward_seconds = _or(weight_backward_seconds, forward_seconds)
        for name in ("forward_seconds", "input_backward_seconds", "weight_backward_seconds"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise ValueError(f"invalid {name} {value}: expected seconds, at least 0")
        generator = torch.Generator().manual_seed(seed)
        rows = parameters // width
        self.weight = nn.Parameter(torch.rand(rows, width, generator=generator) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """The output, of the input's shape."""
        # The order of these two is that of their backward passes, reversed.
        scale = _Weight.apply(self.weight, self.weight_backward_seconds)
        x = _Input.apply(x, self.input_backward_seconds)
        started = time.monotonic()
        result: Tensor = x * (1 + scale)
        _sleep_until(started + self.forward_seconds)
        return result

    def extra_repr(self) -> str:
        """Width, parameters and times, for people."""
        rows, width = self.weight.shape
        times = (self.forward_seconds, self.input_backward_seconds, self.weight_backward_seconds)
        return f"{width}, {rows * width}, seconds={times}"


def timed_model(
    layers: int,
    width: int,
    parameters: int,
    forward_seconds: float,
    **backward_seconds: float,
) -> nn.Sequential:
    """Equal `TimedLayer`s in a row, each with its own first values; arguments are of one layer."""
    return nn.Sequential(
        *(
            TimedLayer(width, parameters, forward_seconds, seed=seed, **backward_seconds)
            for seed in range(layers)
        )
    )


class _Input(torch.autograd.Function):
    """Nothing in the forward pass; takes its time in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _sleep_until(time.monotonic() + ctx.seconds)
        return gradient, None


class _Weight(torch.autograd.Function):
    """The mean of the weight's rows, row i multiplied by 1 / (i + 1); its gradient takes time."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.shape = seconds, weight.shape
        return _factors(weight.shape[0], weight) @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        started = time.monotonic()
        result = torch.outer(_factors(ctx.shape[0], gradient), gradient)
        _sleep_until(started + ctx.seconds)
        return result, None


def _factors(rows: int, like: Tensor) -> Tensor:
    """Different for each row, so that a gradient in the wrong place changes the result."""
    return 1 / (rows * torch.arange(1, rows + 1, dtype=like.dtype, device=like.device))


def _sleep_until(moment: float) -> None:
    remaining = moment - time.monotonic()
    if remaining > 0:
        time.sleep(remaining)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
