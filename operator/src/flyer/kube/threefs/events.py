"""Messages of events: why a StatefulSet creates no pods, or a claim is not bound.

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

__all__ = ["newest_message"]

Object = dict[str, Any]

RECENT_SECONDS: Final = 1200.0
"""Maximum age of an event. The StatefulSet controller retries after at most 1000 s."""
MESSAGE_CHARS_MAX: Final = 400


async def newest_message(
    api: Api, namespace: str, uid: str, reason: str, event_type: str = "Warning"
) -> str:
    """Reason and message of the newest of these events of the object with this uid.

    Empty: there is none that is recent.
    """
    try:
        # One page only, which bounds the cost.
        selector = f"involvedObject.uid={uid},reason={reason},type={event_type}"
        async for page in api.pages(EVENTS, namespace, fieldSelector=selector):
            message = _newest(page.items, time.time())
            return f"{reason}: {message}"[:MESSAGE_CHARS_MAX] if message else ""
    except ApiError:
        pass  # not permitted, or the server is unavailable: the status is less detailed
    return ""


def _newest(events: Iterable[Object], now: float) -> str:
    timed = [(_time(event), str(event.get("message") or "")) for event in events]
    recent = [entry for entry in timed if now - entry[0] <= RECENT_SECONDS]
    return " ".join(max(recent)[1].split()) if recent else ""


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
