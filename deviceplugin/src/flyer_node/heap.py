"""Heap settings that keep the agent's resident memory small."""

from __future__ import annotations

import ctypes
import gc

__all__ = ["limit_arenas", "trim_heap"]

_M_ARENA_MAX = -8  # malloc.h
ARENAS_MAX = 2
"""glibc creates up to eight per core, whose free memory is not returned to the kernel."""


def limit_arenas() -> None:
    """Limits the number of malloc arenas; call it before threads start."""
    call = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if call is not None:
        call(_M_ARENA_MAX, ARENAS_MAX)


def trim_heap() -> None:
    """Returns free heap memory, mostly left over from imports, to the kernel."""
    gc.collect()
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if call is not None:
        call(0)
