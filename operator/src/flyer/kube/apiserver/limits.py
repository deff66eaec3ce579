"""Limits of calls to an API server."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of calls. Times in seconds."""

    concurrency_max: int = 32
    """Concurrent calls. The API server's fairness queues calls beyond its share."""
    connect_seconds: float = 5.0
    answer_seconds: float = 10.0
    """One try of one call."""
    call_seconds: float = 30.0
    """A call with its retries and pauses, excluding the time in the queue."""
    backoff_seconds: float = 0.05
    backoff_seconds_max: float = 2.0
    page_objects: int = 500
    stream_seconds: float = 60.0
    """A whole list in one response."""
