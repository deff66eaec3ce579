"""Errors that end a term or force a rebuild of its state."""

from __future__ import annotations

__all__ = ["QuarantinedError", "StaleStateError", "TermOverError"]


class StaleStateError(Exception):
    """Another writer changed what only the leader writes: rebuild the state and continue."""


class QuarantinedError(StaleStateError):
    """The API server rejects one job's status: the job is quarantined and the state rebuilt."""


class TermOverError(Exception):
    """The term is ending: no new work is started."""
