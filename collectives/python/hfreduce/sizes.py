"""Sizes for people."""

from __future__ import annotations

from typing import Final

__all__ = ["size_text"]

STEP: Final = 1024


def size_text(size_bytes: float) -> str:
    """`832 B`, `64 KiB`, `1.5 GiB`."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size_bytes < STEP:
            break
        size_bytes, unit = size_bytes / STEP, larger
    return f"{size_bytes:.4g} {unit}"
