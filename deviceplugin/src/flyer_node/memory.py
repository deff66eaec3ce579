"""Keeps the agent small: an agent runs on every node, beside jobs that want the memory."""

from __future__ import annotations

import ctypes
import gc

__all__ = ["few_arenas", "give_back"]

_M_ARENA_MAX = -8  # malloc.h
ARENAS_MAX = 2
"""glibc makes up to eight a core, one for each thread that asks: memory that nobody else gets."""


def few_arenas() -> None:
    """Lets threads share their heaps. Call it before there are any."""
    call = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if call is not None:
        call(_M_ARENA_MAX, ARENAS_MAX)


def give_back() -> None:
    """Returns what imports have left over to the kernel: code that was compiled, texts, tables."""
    gc.collect()
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if call is not None:
        call(0)
