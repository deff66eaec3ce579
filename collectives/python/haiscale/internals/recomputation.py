"""Activation checkpointing: passes that are computed again for their gradients.

`torch.utils.checkpoint` ends such a pass with an exception once it has what it needs, and has no
public name for the exception, nor for the question whether a pass runs inside backward.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import _StopRecomputationError

__all__ = ["ends_recomputation", "in_backward"]


def ends_recomputation(error: BaseException) -> bool:
    """Whether an exception ends a recomputation: no failure."""
    return isinstance(error, _StopRecomputationError)


def in_backward() -> bool:
    """Whether autograd's backward pass is running on this thread."""
    return torch._C._current_graph_task_id() != -1
