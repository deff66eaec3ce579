"""Lifetime registry: keeps buffers alive until the engine no longer accesses them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfreduce import _native

__all__ = ["hold", "is_held"]

_LOCK = threading.Lock()
_held: list[tuple[_native.Work, object]] = []


def hold(work: _native.Work, memory: object) -> None:
    """Keep `memory` alive until `work` can no longer access it, also after a timeout."""
    with _LOCK:
        _held[:] = [entry for entry in _held if not entry[0].drained()]
        _held.append((work, memory))


def is_held() -> bool:
    """Whether any operation still accesses memory."""
    with _LOCK:
        _held[:] = [entry for entry in _held if not entry[0].drained()]
        return bool(_held)
