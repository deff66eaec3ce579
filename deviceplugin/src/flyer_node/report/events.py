"""Kubernetes Events about the node's devices: what `kubectl describe node` shows.

Reasons are stable. A repeated change of a device within ten minutes increments the count of its
event, and a token bucket limits new events; NodeHealth and the metrics have every change.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import uuid4

import structlog

from flyer_node.health.state_machine import State
from flyer_node.report.client import ApiError, NodeHealthClient

if TYPE_CHECKING:
    from flyer_node.health.store import Change
    from flyer_node.metrics import Metrics

__all__ = ["REASONS", "EventRecorder", "TokenBucket"]

REASONS = {
    State.HEALTHY: "DeviceHealthy",
    State.SUSPECT: "DeviceSuspect",
    State.UNHEALTHY: "DeviceUnhealthy",
    State.RECOVERING: "DeviceRecovering",
    State.UNKNOWN: "DeviceUnknown",
}
"""The reason of an event by the new state of the device."""

BURST, SECONDS_EACH = 25, 10.0
"""A burst of one event per device of a node, then one event every `SECONDS_EACH`."""
WAITING_MAX = 100
AGAIN_SECONDS = 600.0
REMEMBERED_MAX = 256
MESSAGE_MAX = 1024  # characters, the API server's limit
TRIES_MAX = 3

log = structlog.get_logger()


class TokenBucket:
    """Token bucket: BURST events, refilled with one every SECONDS_EACH. Times are arguments."""

    def __init__(self, burst: int = BURST, seconds_each: float = SECONDS_EACH) -> None:
        self._burst, self._seconds = burst, seconds_each
        self._tokens = float(burst)
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Whether one may pass now."""
        new_tokens = max(0.0, now - self._at) / self._seconds
        self._tokens = min(float(self._burst), self._tokens + new_tokens)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass(slots=True)
class _PostedEvent:
    name: str
    count: int
    at: float


class EventRecorder:
    """Posts an event for each change, as long as there are not too many."""

    def __init__(
        self, client: NodeHealthClient, metrics: Metrics, bucket: TokenBucket | None = None
    ):
        self._client = client
        self._metrics = metrics
        self._bucket = bucket or TokenBucket()
        self._waiting: deque[Change] = deque()
        self._wake = asyncio.Event()
        self._posted: OrderedDict[tuple[str, str, str], _PostedEvent] = OrderedDict()

    def record(self, change: Change) -> None:
        """A device changed its state."""
        if len(self._waiting) >= WAITING_MAX:
            self._metrics.events.labels("dropped").inc()
            return
        self._waiting.append(change)
        self._wake.set()

    async def run(self) -> None:
        """Runs until cancelled. An event that cannot be posted is dropped after three tries."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                change = self._waiting.popleft()
                if not self._bucket.take(time.monotonic()):
                    self._metrics.events.labels("dropped").inc()
                    continue
                await self._post(change)

    async def _post(self, change: Change) -> None:
        for attempt in range(TRIES_MAX):
            try:
                await asyncio.to_thread(self._write, change, time.time())
            except ApiError as error:
                if (error.status and error.status < 500) or attempt == TRIES_MAX - 1:
                    self._metrics.events.labels("failed").inc()
                    log.warning("event not posted", error=str(error))
                    return
                await asyncio.sleep(2.0**attempt)
            else:
                self._metrics.events.labels("posted").inc()
                return

    def _write(self, change: Change, now: float) -> None:
        """One call: a new event, or another count of the one before."""
        reason = REASONS[change.after.state]
        text = message_of(change)
        key = (change.subject.kind, change.subject.id, reason)
        stamp = datetime.fromtimestamp(int(now), tz=UTC).isoformat().replace("+00:00", "Z")
        posted = self._posted.get(key)
        if posted is not None and now - posted.at < AGAIN_SECONDS:
            again = {"count": posted.count + 1, "lastTimestamp": stamp, "message": text}
            try:
                self._client.update_event(posted.name, again)
            except ApiError as error:
                if error.status != 404:  # 404: the event has expired
                    raise
            else:
                posted.count += 1
                posted.at = now
                return
        name = f"{self._client.node}.{uuid4().hex[:16]}"
        self._client.post_event(name, reason, text, stamp, warning=_is_bad(change))
        self._posted[key] = _PostedEvent(name, 1, now)
        self._posted.move_to_end(key)
        while len(self._posted) > REMEMBERED_MAX:
            self._posted.popitem(last=False)


def message_of(change: Change) -> str:
    """Message of a state transition: device, states, reason and remedy."""
    record, subject = change.after, change.subject
    words = f"{subject.kind} {subject.id}: {change.before.value} -> {record.state.value}"
    why = (
        record.unobservable_reason
        if not record.observable
        else ": ".join(filter(None, (record.reason, record.message)))
    )
    remedy = f"; needs {record.remedy}" if record.remedy and record.state is State.UNHEALTHY else ""
    return f"{words}{f' ({why})' if why else ''}{remedy}"[:MESSAGE_MAX]


def _is_bad(change: Change) -> bool:
    return change.after.state in (State.UNHEALTHY, State.UNKNOWN, State.SUSPECT)
