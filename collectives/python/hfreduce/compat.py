"""Compatibility with PyTorch releases: the base class of an HFReduce group.

Current releases let Python implement a `Backend`. Older ones only let it implement a whole
`ProcessGroup`, as their multi-threaded test group does: its methods replace torch's, and hooks and
functional collectives implemented in C++ bypass it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

__all__ = ["IS_BACKEND", "Base"]


def _accepts_python_backends() -> bool:
    try:
        Backend(0, 1)
    except TypeError:  # no constructor defined
        return False
    return True


IS_BACKEND = _accepts_python_backends()

if TYPE_CHECKING:
    Base = Backend
else:
    Base = Backend if IS_BACKEND else dist.ProcessGroup
