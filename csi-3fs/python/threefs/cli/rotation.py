"""Names and retention of periodic backups. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

__all__ = ["name_of", "surplus"]


def name_of(kind: str, moment: datetime) -> str:
    """The file of a backup; `moment` is in UTC."""
    return f"{kind}-{moment:%Y%m%dT%H%M%SZ}.dump"


def surplus(kind: str, names: Iterable[str], keep: int) -> list[str]:
    """The backups of this kind that are older than the newest `keep`; other files are ignored."""
    pattern = re.compile(rf"{kind}-[0-9]{{8}}T[0-9]{{6}}Z\.dump")
    backups = sorted(name for name in names if pattern.fullmatch(name))
    return backups[: max(0, len(backups) - keep)]
