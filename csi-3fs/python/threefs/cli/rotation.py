"""Names and retention of periodic backups. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

__all__ = ["draft_of", "is_draft", "later", "name_of", "surplus"]

TIME = "%Y%m%dT%H%M%SZ"
TIME_PATTERN = r"[0-9]{8}T[0-9]{6}Z"


def name_of(kind: str, cluster: int, moment: datetime) -> str:
    """The file of a backup of a cluster; `moment` is in UTC."""
    return f"{_prefix(kind, cluster)}{moment:{TIME}}.dump"


def draft_of(kind: str, moment: datetime, random: str) -> str:
    """The file of a backup that is not verified yet."""
    return f"{kind}-{moment:{TIME}}-{random}.unverified"


def is_draft(kind: str, name: str) -> bool:
    """Whether a file is an unverified backup of this kind, complete or not."""
    pattern = rf"{kind}-{TIME_PATTERN}-[0-9a-f]+\.unverified(\.partial)?"
    return re.fullmatch(pattern, name) is not None


def surplus(kind: str, cluster: int, names: Iterable[str], newest: str, keep: int) -> list[str]:
    """The backups that are older than the newest `keep`, of which `newest` was written now.

    Backups of other clusters and kinds, and those with a later name, are neither counted nor
    returned.
    """
    backups = [name for name in _backups(kind, cluster, names) if name <= newest]
    return backups[: max(0, len(backups) - keep)]


def later(kind: str, cluster: int, names: Iterable[str], newest: str) -> list[str]:
    """The backups whose name is later than that of the one that was written now."""
    return [name for name in _backups(kind, cluster, names) if name > newest]


def _backups(kind: str, cluster: int, names: Iterable[str]) -> list[str]:
    pattern = re.compile(rf"{_prefix(kind, cluster)}{TIME_PATTERN}\.dump")
    return sorted(name for name in names if pattern.fullmatch(name))


def _prefix(kind: str, cluster: int) -> str:
    """The first 32 of the 128 random bits distinguish the clusters that share a folder."""
    return f"{kind}-{cluster >> 96:08x}-"
