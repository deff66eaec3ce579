"""`on_demand_checkpoint`: activations that are recomputed in backward instead of kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch import nn

from haiscale.internals.recomputation import recomputed

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["on_demand_checkpoint"]

Result = TypeVar("Result")


def on_demand_checkpoint(
    function: Callable[..., Result], *args: object, **kwargs: object
) -> Result:
    """``function(*args, **kwargs)`` without its activations, which backward recomputes.

    Values and gradients have the same bits, also with dropout and autocast. Inside `torch.no_grad`
    it is a plain call. Batch normalization of a module counts a batch once in its running
    statistics; called by another function it counts each batch twice, once in each pass, so pass
    the module or its method where it matters.

    Args:
        function: A module, a method of a module, or a function of tensors.
        args: Its arguments.
        kwargs: Its keyword arguments; none is taken as an option of torch's `checkpoint`.
    """
    owner = getattr(function, "__self__", function)
    module = owner if isinstance(owner, nn.Module) else None
    # As an argument, since torch looks for devices, whose random state it keeps, in `args` alone.
    result: Result = recomputed(_call, module, function, kwargs, *args)
    return result


def _call(function: Callable[..., Result], kwargs: dict[str, object], *args: object) -> Result:
    return function(*args, **kwargs)
