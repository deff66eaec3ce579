"""Reductions of arrays of all libraries, in place.

One, or many as one operation::

    hfreduce.allreduce(gradients, communicator)
    hfreduce.allreduce(gradients, communicator, op="max", timeout_seconds=5.0)
    hfreduce.allreduce_many([weights, biases], communicator)  # one operation
    pending = hfreduce.start_allreduce([weights, biases], communicator)  # and on with the work
    pending.wait()

Arrays that never change, as JAX's, have the result elsewhere::

    hfreduce.allreduce(gradients, communicator, out=result)

What memory an array has, and which arrays are refused: `hfreduce.arrays`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfreduce import _native
from hfreduce.arrays import Memory, copy, gpu_memory, memory
from hfreduce.keeping import hold

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
    """A reduction under way: its arrays are the engine's until it is done, also if this is lost."""

    def __init__(self, work: _native.Work) -> None:
        self._work = work

    def done(self) -> bool:
        """Whether it has ended, well or not; `wait` says which."""
        return self._work.done()

    def wait(self) -> None:
        """Until the result is there; raises `CollectiveError` if a peer fails or time is over."""
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
    """Everybody's combination to everybody, in place or to `out`; returns when it is there.

    `out` is memory of the CPU for as many elements of the same type; `array` may then be read-only.
    An array in the memory of a GPU (one with `__cuda_array_interface__`) is read once what `stream`
    has queued is done; without one, the array says where it is made ready.

    Raises `TypeError` for a type that cannot be reduced, `ValueError` for memory that cannot be
    used as it is, `CollectiveError` if a peer fails.
    """
    code = _code(op)
    if hasattr(array, "__cuda_array_interface__"):
        if out is not None:
            name = type(array).__name__
            raise ValueError(f"out: {name} is in a GPU's memory; give a copy in the CPU's")
        _on_gpu(array, communicator, code, timeout_seconds, stream)
        return
    found = memory(array if out is None else out)
    if out is not None:
        copy(array, found)
    pointer, numel, dtype, _ = found
    work = communicator.allreduce(pointer, numel, dtype, code, timeout_seconds, True, found)
    try:
        work.wait()
    finally:
        if not work.done():  # Ctrl-C
            hold(work, found)


def allreduce_many(
    arrays: Sequence[object],
    communicator: _native.Communicator,
    *,
    op: str = "sum",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> None:
    """`allreduce` of many arrays of one type as one operation, each in place.

    Every rank gives arrays of the same sizes in the same order. Raises what `allreduce` does.
    """
    start_allreduce(arrays, communicator, op=op, timeout_seconds=timeout_seconds).wait()


def start_allreduce(
    arrays: Sequence[object],
    communicator: _native.Communicator,
    *,
    op: str = "sum",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Pending:
    """`allreduce_many` that does not wait: the arrays are not to be touched before it is done."""
    code = _code(op)
    found = [_in_memory(array) for array in arrays]
    dtypes = {each.dtype for each in found}
    if len(dtypes) != 1:
        raise ValueError(
            f"arrays: must be of one type and at least one, not of {len(dtypes)} types"
        )
    buffers = [(each.pointer, each.numel) for each in found]
    work = communicator.allreduce_many(buffers, dtypes.pop(), code, timeout_seconds, False, found)
    hold(work, found)
    return Pending(work)


def _code(op: str) -> int:
    code = OPERATIONS.get(op)
    if code is None:
        raise ValueError(f"op `{op}`: must be one of {', '.join(OPERATIONS)}")
    return code


def _in_memory(array: object) -> Memory:
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
