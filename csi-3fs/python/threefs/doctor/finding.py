"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Severity"]


class Severity(StrEnum):
    """How urgent a finding is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check observed; a warning or a problem has a remedy."""

    name: str
    severity: Severity
    detail: str
    remedy: str = ""
