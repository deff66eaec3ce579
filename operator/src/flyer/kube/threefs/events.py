"""Reason for which a StatefulSet creates no pods: its newest FailedCreate event.

Admission policies and quotas refuse a pod before it exists, so no pod has the reason.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from flyer.api.timestamps import parse_timestamp
from flyer.kube.apiserver.errors import ApiError
from flyer.kube.apiserver.resources import EVENTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flyer.kube.apiserver import Api

__all__ = ["failed_creation"]

Object = dict[str, Any]

REASON: Final = "FailedCreate"
RECENT_SECONDS: Final = 1200.0
"""Maximum age of the event. The StatefulSet controller retries after at most 1000 s."""
MESSAGE_CHARS_MAX: Final = 400


async def failed_creation(api: Api, namespace: str, uid: str) -> str:
    """Why the StatefulSet with this uid creates no pod; empty: no recent event names a reason."""
    selector = f"involvedObject.uid={uid},reason={REASON},type=Warning"
    try:
        # One page only, which bounds the cost.
        async for page in api.pages(EVENTS, namespace, fieldSelector=selector):
            return _newest(page.items, time.time())
    except ApiError:
        pass  # not permitted, or the server is unavailable: the number of pods is reported alone
    return ""


def _newest(events: Iterable[Object], now: float) -> str:
    timed = [(_time(event), str(event.get("message") or "")) for event in events]
    recent = [entry for entry in timed if now - entry[0] <= RECENT_SECONDS]
    if not recent:
        return ""
    message = " ".join(max(recent)[1].split())
    return f"{REASON}: {message}"[:MESSAGE_CHARS_MAX]


def _time(event: Object) -> float:
    """The last occurrence, in either form of events."""
    series = event.get("series") or {}
    times = [series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime")]
    return max(map(_parsed, times))


def _parsed(value: object) -> float:
    try:
        return parse_timestamp(value)
    except ValueError:
        return 0.0
