"""Commands of an image build: each runs to its end, or fails with its last lines of output."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["ImageError", "run"]

LINES = 25  # of output in an error


class ImageError(Exception):
    """An image could not be built; the message has the failed step and the remedy."""


def run(
    command: Sequence[str],
    failure: str,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
) -> str:
    """The standard output of a command; an error starts with `failure`."""
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        raise ImageError(f"{failure}: it took more than {timeout_seconds:g} s") from None
    if result.returncode != 0:
        last = "\n".join((result.stdout + result.stderr).splitlines()[-LINES:])
        raise ImageError(f"{failure}:\n{last}")
    return result.stdout
