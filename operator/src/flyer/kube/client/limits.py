"""What calls to an API server may cost."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What calls may cost. Times in seconds."""

    concurrency_max: int = 32
    """Calls under way at once. The API server's own fairness queues what comes beyond its share."""
    connect_seconds: float = 5.0
    answer_seconds: float = 10.0
    """One try of one call."""
    call_seconds: float = 30.0
    """A call with its retries and pauses, but for the time in which it waits for its turn."""
    backoff_seconds: float = 0.05
    backoff_seconds_max: float = 2.0
    page_objects: int = 500
    stream_seconds: float = 60.0
    """A whole list in one answer."""
