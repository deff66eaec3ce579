"""Allreduce of arrays of any library, in place.

One array, or several arrays as one operation::

    hfreduce.allreduce(gradients, communicator)
    hfreduce.allreduce(gradients, communicator, op="max", timeout_seconds=5.0)
    hfreduce.allreduce_many([weights, biases], communicator)  # one operation
    pending = hfreduce.start_allreduce([weights, biases], communicator)  # does not block
    pending.wait()

The result for immutable arrays, such as JAX's, is written to `out`::

    hfreduce.allreduce(gradients, communicator, out=result)

`hfreduce.arrays` describes which arrays are accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfreduce import _native
from hfreduce.arrays import HostMemory, copy, gpu_memory, memory
from hfreduce.lifetime import hold

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["OPERATIONS", "Pending", "allreduce", "allreduce_many", "start_allreduce"]

TIMEOUT_SECONDS = 60.0

OPERATIONS: dict[str, int] = {
    "sum": _native.SUM,
    "avg": _native.AVG,
    "product": _native.PRODUCT,
    "min": _native.MIN,
    "max": _native.MAX,
    "band": _native.BAND,
    "bor": _native.BOR,
    "bxor": _native.BXOR,
}


class Pending:
    """A pending allreduce. Its arrays must not be accessed before it is done."""

    def __init__(self, work: _native.Work) -> None:
        self._work = work

    def done(self) -> bool:
        """Whether the operation has finished or failed; `wait` raises the error."""
        return self._work.done()

    def wait(self) -> None:
        """Block until the result is available.

        Raises `CollectiveError` if a peer fails or the timeout expires.
        """
        self._work.wait()


def allreduce(
    array: object,
    communicator: _native.Communicator,
    *,
    op: str = "sum",
    out: object = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    stream: int | None = None,
) -> None:
    """Reduce an array over all ranks, in place or to `out`, and block until the result is there.

    `out` is a CPU array of the same type and length; `array` may then be read-only. An array in GPU
    memory (one with `__cuda_array_interface__`) is read after the work queued on `stream`; without
    `stream`, after the work on the stream that the array names.

    Raises `TypeError` for a type that cannot be reduced, `ValueError` for an unsupported memory
    layout, `CollectiveError` if a peer fails or the timeout expires.
    """
    code = _code(op)
    if hasattr(array, "__cuda_array_interface__"):
        if out is not None:
            name = type(array).__name__
            raise ValueError(f"out: {name} is in GPU memory: pass a copy in CPU memory")
        _on_gpu(array, communicator, code, timeout_seconds, stream)
        return
    buffer = memory(array if out is None else out)
    if out is not None:
        copy(array, buffer)
    pointer, numel, dtype, _ = buffer
    work = communicator.allreduce(pointer, numel, dtype, code, timeout_seconds, True, buffer)
    try:
        work.wait()
    finally:
        if not work.done():  # Ctrl-C
            hold(work, buffer)


def allreduce_many(
    arrays: Sequence[object],
    communicator: _native.Communicator,
    *,
    op: str = "sum",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> None:
    """Allreduce several arrays of one type as one operation, each in place.

    Every rank passes arrays of the same sizes in the same order. Raises what `allreduce` raises.
    """
    start_allreduce(arrays, communicator, op=op, timeout_seconds=timeout_seconds).wait()


def start_allreduce(
    arrays: Sequence[object],
    communicator: _native.Communicator,
    *,
    op: str = "sum",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Pending:
    """Start `allreduce_many` without blocking.

    The arrays must not be accessed before the operation is done.
    """
    code = _code(op)
    memories = [_in_memory(array) for array in arrays]
    dtypes = {each.dtype for each in memories}
    if len(dtypes) != 1:
        raise ValueError(
            f"arrays: expected at least one array, all of one type; got {len(dtypes)} types"
        )
    buffers = [(each.pointer, each.numel) for each in memories]
    work = communicator.allreduce_many(
        buffers, dtypes.pop(), code, timeout_seconds, False, memories
    )
    hold(work, memories)
    return Pending(work)


def _code(op: str) -> int:
    code = OPERATIONS.get(op)
    if code is None:
        raise ValueError(f"invalid op `{op}`: expected one of {', '.join(OPERATIONS)}")
    return code


def _in_memory(array: object) -> HostMemory:
    if hasattr(array, "__cuda_array_interface__"):
        raise ValueError(
            f"{type(array).__name__}: arrays of a GPU are not fused; give them to `allreduce`"
        )
    return memory(array)


def _on_gpu(
    array: object,
    communicator: _native.Communicator,
    code: int,
    timeout_seconds: float,
    stream: int | None,
) -> None:
    from hfreduce import gpu

    ordinal, ready, pointer, numel, dtype = gpu_memory(array, stream)
    operations = gpu.view(communicator, ordinal, ready)
    work = operations.allreduce(pointer, numel, dtype, code, timeout_seconds, True, array)
    hold(work, array)
    work.wait()
