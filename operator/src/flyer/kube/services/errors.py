"""Errors that force a rebuild of a term's state."""

from __future__ import annotations

__all__ = ["QuarantinedError", "StaleStateError"]


class StaleStateError(Exception):
    """Another writer changed what only the leader writes: rebuild the state and continue."""


class QuarantinedError(StaleStateError):
    """The API server rejects one job's status: the job is quarantined and the state rebuilt."""
