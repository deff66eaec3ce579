"""Names and retention of periodic backups. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

__all__ = ["later", "name_of", "surplus"]


def name_of(kind: str, moment: datetime) -> str:
    """The file of a backup; `moment` is in UTC."""
    return f"{kind}-{moment:%Y%m%dT%H%M%SZ}.dump"


def surplus(kind: str, names: Iterable[str], newest: str, keep: int) -> list[str]:
    """The backups that are older than the newest `keep`, of which `newest` was written now.

    Those with a later name and other files are neither counted nor returned.
    """
    backups = [name for name in _backups(kind, names) if name <= newest]
    return backups[: max(0, len(backups) - keep)]


def later(kind: str, names: Iterable[str], newest: str) -> list[str]:
    """The backups whose name is later than that of the one that was written now."""
    return [name for name in _backups(kind, names) if name > newest]


def _backups(kind: str, names: Iterable[str]) -> list[str]:
    pattern = re.compile(rf"{kind}-[0-9]{{8}}T[0-9]{{6}}Z\.dump")
    return sorted(name for name in names if pattern.fullmatch(name))
