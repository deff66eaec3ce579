"""Activation checkpointing: passes that are recomputed for their gradients.

`torch.utils.checkpoint` ends such a pass with an exception once it has what it needs, and has no
public name for the exception, nor for the question whether a pass runs inside backward. It calls
modules twice, and those of batch normalization would count each batch twice: `without_statistics`
gives them copies of their running statistics in the second pass.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

__all__ = ["ends_recomputation", "in_backward", "recomputed", "without_statistics"]


def recomputed(function: Callable[..., Any], module: nn.Module | None, *args: Any) -> Any:
    """``function(*args)`` without its activations, which backward recomputes.

    Args:
        function: Is called in both passes.
        module: Contains the batch normalization that `function` calls, if any.
        args: Arguments of the function.
    """
    norms = [
        each
        for each in (module.modules() if module is not None else ())
        if isinstance(each, _NormBase) and each.training and each.track_running_stats
    ]
    if not norms:
        return checkpoint(function, *args, use_reentrant=False)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), without_statistics(norms)

    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


@contextmanager
def without_statistics(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Batch normalization inside leaves its running statistics as they are.

    The output of a pass in training does not depend on them. The buffers are replaced, not copied
    back: a copy in place would change tensors that autograd has saved.
    """
    kept = [(each._buffers, dict(each._buffers)) for each in norms]
    for buffers, before in kept:
        buffers.update((n, None if b is None else b.clone()) for n, b in before.items())
    try:
        yield
    finally:
        for buffers, before in kept:
            buffers.update(before)


def ends_recomputation(error: BaseException) -> bool:
    """Whether an exception ends a recomputation: no failure."""
    return isinstance(error, _StopRecomputationError)


def in_backward() -> bool:
    """Whether autograd's backward pass is running on this thread."""
    return torch._C._current_graph_task_id() != -1
