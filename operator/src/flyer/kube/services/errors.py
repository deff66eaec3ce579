"""What ends a term, or a part of it."""

from __future__ import annotations

__all__ = ["LeftAloneError", "StaleStateError", "TermOverError"]


class StaleStateError(Exception):
    """Somebody else wrote what we thought was ours alone: read everything again and go on."""


class LeftAloneError(StaleStateError):
    """One job's status is not taken: the job is left alone, and the others read again."""


class TermOverError(Exception):
    """The term is ending: nothing new is begun."""
