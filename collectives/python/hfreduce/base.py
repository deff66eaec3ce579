"""What a group is to torch: a `Backend`, or a whole `ProcessGroup` where torch is older.

Before torch let Python make backends, a group in Python was a process group of its own (as torch's
multi-threaded one, for tests): its methods are called in place of torch's, hooks and functional
collectives in C++ pass it by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

__all__ = ["IS_BACKEND", "Base"]


def _can_be_made() -> bool:
    try:
        Backend(0, 1)
    except TypeError:  # no constructor defined
        return False
    return True


IS_BACKEND = _can_be_made()

if TYPE_CHECKING:
    Base = Backend
else:
    Base = Backend if IS_BACKEND else dist.ProcessGroup
