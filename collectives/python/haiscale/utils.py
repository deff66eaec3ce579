"""`on_demand_checkpoint`: activations that are computed again in backward instead of kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["on_demand_checkpoint"]

Result = TypeVar("Result")


def on_demand_checkpoint(function: Callable[..., Result], *args: object) -> Result:
    """``function(*args)`` without its activations, which backward computes again.

    Values and gradients have the same bits, also with dropout. Inside `torch.no_grad` it is a plain
    call.

    Args:
        function: A module, or a function of tensors.
        args: Its arguments.
    """
    return checkpoint(function, *args, use_reentrant=False)
