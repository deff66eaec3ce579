"""Registered memory: buffers that the ranks of one machine read and write in place.

An array from here is reduced without a copy on its way in or out; the bits are the same as in any
other memory, and ranks with and without registered arrays mix::

    gradients = hfreduce.empty((1024, 1024), "float32", communicator)
    hfreduce.allreduce(gradients, communicator)

The memory is zeroed and lives as long as an array that views it, also after its communicator. A
forked child shares it with its parent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

    from hfreduce import _native

__all__ = ["empty"]


def empty(
    shape: int | Sequence[int], dtype: DTypeLike, communicator: _native.Communicator
) -> NDArray[Any]:
    """An array of zeros in registered memory; `hfreduce.torch.empty` makes tensors.

    Raises `ValueError` when registered memory is exhausted.
    """
    # numpy is only imported by callers of this function; nothing else here needs it.
    import numpy as np

    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"dtype {kind}: objects cannot be shared: use a numeric dtype")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"invalid shape {sizes}: sizes must be 0 or larger")
    numel = math.prod(sizes)
    memory = communicator.allocate(max(numel * kind.itemsize, 1))
    flat: NDArray[Any] = (
        np.frombuffer(memoryview(memory), kind, numel) if numel else np.empty(0, kind)
    )
    return flat.reshape(sizes)
