"""Memory that the engine may still touch lives until it does not, whoever dropped it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfreduce import _native

__all__ = ["hold", "is_held"]

_LOCK = threading.Lock()
_HELD: list[tuple[_native.Work, object]] = []


def hold(work: _native.Work, memory: object) -> None:
    """Keeps `memory` until nothing of `work` can touch it, however that ended for its caller."""
    with _LOCK:
        _HELD[:] = [each for each in _HELD if not each[0].drained()]
        _HELD.append((work, memory))


def is_held() -> bool:
    """Whether any operation keeps memory."""
    with _LOCK:
        _HELD[:] = [each for each in _HELD if not each[0].drained()]
        return bool(_HELD)
