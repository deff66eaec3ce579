"""Memory of GPUs: which one it is on, and the operations on it.

No GPU library is needed to import this: the CUDA driver is loaded when the first array of a GPU
comes. Each GPU is opened once in a process and closed at its exit.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from hfreduce import _native
from hfreduce.settings import Settings

__all__ = ["described", "held", "hold", "opened", "view"]

_TYPES: dict[str, int] = {
    "f2": _native.FLOAT16,
    "f4": _native.FLOAT32,
    "f8": _native.FLOAT64,
    "i1": _native.INT8,
    "i2": _native.INT16,
    "i4": _native.INT32,
    "i8": _native.INT64,
    "u1": _native.UINT8,
    "u2": _native.UINT16,
    "u4": _native.UINT32,
    "u8": _native.UINT64,
}

_LOCK = threading.Lock()
_OPEN: dict[tuple[int, int], _native.Gpu] = {}
"""By process and number: a forked child opens its own."""

_HELD: list[tuple[_native.Work, object]] = []
"""Arrays that the copies of an operation may still touch, however it ended for its caller."""


def opened(ordinal: int) -> _native.Gpu:
    """The GPU with this number; raises `_native.GpuError` where there is none."""
    key = (os.getpid(), ordinal)
    with _LOCK:
        gpu = _OPEN.get(key)
        if gpu is None:
            settings = Settings.read(os.environ)
            gpu = _native.Gpu(
                ordinal, library=settings.cuda_library, pinned_bytes=settings.pinned_bytes
            )
            _OPEN[key] = gpu
        return gpu


def view(communicator: _native.Communicator, ordinal: int, stream: int) -> _native.OnGpu:
    """The communicator's operations on memory that this stream of a GPU makes ready.

    A rank whose GPU cannot be used breaks the group: the others wait for it already.
    """
    try:
        return communicator.on(opened(ordinal), stream)
    except _native.GpuError as error:
        communicator.abort(str(error))
        raise


def described(array: Any, name: str, stream: int | None) -> tuple[int, int, int, int, int]:
    """(GPU, stream, pointer, elements, type) of an array with `__cuda_array_interface__`.

    `stream` is where the caller has made it ready; None: where the array says.
    """
    told: dict[str, Any] = array.__cuda_array_interface__
    pointer, read_only = told["data"]
    if read_only:
        raise ValueError(f"{name}: read-only memory cannot take the result; give a copy")
    typestr, shape = told["typestr"], tuple(told["shape"])
    dtype = _TYPES.get(typestr[1:])
    if dtype is None or typestr[0] not in "<|":
        raise TypeError(f"{name}: cannot reduce elements of type {typestr}")
    numel, step = 1, int(typestr[2:])
    for extent in shape:
        numel *= extent
    if told.get("strides") is not None and numel:
        for extent, stride in zip(reversed(shape), reversed(told["strides"]), strict=True):
            if extent != 1 and stride != step:
                raise ValueError(f"{name}: not contiguous (strides {told['strides']}); give a copy")
            step *= extent
    if stream is None:
        # None: ready already. The legacy default stream then costs nothing and is always there.
        stream = told.get("stream") or 0
    library = Settings.read(os.environ).cuda_library
    owner = _native.Gpu.owner_of(pointer, library=library) if numel else 0
    if owner is None:
        raise ValueError(f"{name}: {pointer:#x} is not the memory of a GPU")
    return owner, stream, pointer if numel else 0, numel, dtype


def hold(work: _native.Work, array: object) -> None:
    """Keeps `array` until no copy of `work` can touch it."""
    with _LOCK:
        _HELD[:] = [each for each in _HELD if not each[0].drained()]
        _HELD.append((work, array))


def held() -> int:
    """How many operations keep arrays."""
    with _LOCK:
        _HELD[:] = [each for each in _HELD if not each[0].drained()]
        return len(_HELD)


@atexit.register
def _close_all() -> None:
    own = [gpu for (process, _), gpu in _OPEN.items() if process == os.getpid()]
    _OPEN.clear()
    for gpu in own:
        gpu.close()
