"""Command lines that run this package stand-alone, without the rest of `threefs`."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["mount_manager_command"]

PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from mount_manager.{module} import main; "
    "sys.exit(main(sys.argv[2:]))"
)


def mount_manager_command(arguments: list[str], module: str = "server") -> list[str]:
    """Return the command of the mount manager, or of its descriptor store (`fd_store`)."""
    # -I ignores Python's environment variables, -S the installed packages.
    folder = str(Path(__file__).parents[1])
    return [sys.executable, "-I", "-S", "-c", PROGRAM.format(module=module), folder, *arguments]
