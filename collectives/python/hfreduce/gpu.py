"""GPU memory: its device, and the operations on it.

No GPU library is needed to import this: the CUDA driver is loaded with the first GPU array.
Each GPU is opened once in a process and closed at its exit.
"""

from __future__ import annotations

import atexit
import os
import threading
from functools import cache

from hfreduce import _native

__all__ = ["opened", "owner_of", "view"]

_LOCK = threading.Lock()
_OPEN: dict[tuple[int, int], _native.Gpu] = {}
"""By process and number: a forked child opens its own."""


def opened(ordinal: int) -> _native.Gpu:
    """The GPU with this number; raises `_native.GpuError` where there is none."""
    key = (os.getpid(), ordinal)
    with _LOCK:
        gpu = _OPEN.get(key)
        if gpu is None:
            settings = _settings(key[0])
            gpu = _native.Gpu(
                ordinal,
                library=settings.cuda_library,
                pinned_bytes=settings.pinned_bytes,
                gdrcopy=settings.gdrcopy,
            )
            _OPEN[key] = gpu
        return gpu


def view(communicator: _native.Communicator, ordinal: int, stream: int) -> _native.OnGpu:
    """The communicator's operations on memory that this stream of a GPU makes ready.

    A rank whose GPU cannot be used breaks the group: the other ranks already wait for it.
    """
    try:
        return communicator.on(opened(ordinal), stream)
    except _native.GpuError as error:
        communicator.abort(str(error))
        raise


def owner_of(pointer: int) -> int | None:
    """The number of the GPU that owns this address; None for the host's memory."""
    return _native.Gpu.owner_of(pointer, library=_settings(os.getpid()).cuda_library)


@cache
def _settings(_process: int) -> _native.Settings:
    """Those of a process at its first array: reading them for every one costs more than a call."""
    return _native.Settings.read(os.environ)


@atexit.register
def _close_all() -> None:
    own = [gpu for (process, _), gpu in _OPEN.items() if process == os.getpid()]
    _OPEN.clear()
    for gpu in own:
        gpu.close()
