"""Entry point of `flyer-operator`: handles SIGTERM before the remaining modules are imported.

In a container the operator is process 1, for which the kernel ignores an unhandled SIGTERM. On a
busy node the imports take seconds, and a pod deleted during that time would run until SIGKILL.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["main"]


def main() -> int:
    """Run `flyer.kube.__main__.main`."""
    # No resources are held yet; `main` installs another handler.
    signal.signal(signal.SIGTERM, _end)
    from flyer.kube.__main__ import main as run

    return run()


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)  # an exception could be swallowed by the module being imported
