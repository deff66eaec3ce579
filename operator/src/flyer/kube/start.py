"""The first lines of `flyer-operator`: what ends it before all that it needs is imported.

In a container it is process 1, for which the kernel drops a SIGTERM that nobody handles. On a busy
machine the imports take seconds, and a pod that was deleted meanwhile lived on until it was killed.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["main"]


def main() -> int:
    """As `flyer.kube.__main__.main`."""
    # Nothing is held yet that would have to be given back; later there is another handler.
    signal.signal(signal.SIGTERM, _end)
    from flyer.kube.__main__ import main as run

    return run()


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)  # an exception may be swallowed by whatever is imported now
