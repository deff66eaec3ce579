"""The state machine of one device: pure, times are arguments.

    Healthy -> Suspect -> Unhealthy(reason, evidence, since) -> Recovering(probation) -> Healthy

and Unknown while it cannot be seen, which hides the state behind it and forgets nothing.

Rules that hold after every step:
- Unhealthy always has a reason and a remedy, and ends by itself once the remedy was seen.
- Nothing recovers while the driver asks for a recovery action, or before its hold-down is over.
- Where the fault needs a reset, it recovers only after one was seen: the device was gone and
  answers again, the driver asked for an action and asks no longer, or its volatile counters began
  anew. That the driver asks for nothing proves nothing: it may not have noticed yet.
- A fault during probation sends it back, and each return in 24 h doubles the hold-down.
- Probation ends with a probe that passed; one that failed is a fault.
- Suspect devices stay in service.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

__all__ = [
    "Fault", "Health", "Look", "Severity", "State", "Times",
    "begin_probation", "look", "probed", "take", "unseen",
]  # fmt: skip

RETURNS_WINDOW_SECONDS = 86_400.0
HISTORY_MAX = 32


class State(enum.StrEnum):
    """How a device is."""

    HEALTHY = "Healthy"
    SUSPECT = "Suspect"
    UNHEALTHY = "Unhealthy"
    RECOVERING = "Recovering"
    UNKNOWN = "Unknown"


class Severity(enum.IntEnum):
    """What a fault does; ordered."""

    SUSPECT = 1
    UNHEALTHY = 2


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that a kind of device spends in its states."""

    hold: float
    hold_max: float
    probation: float
    suspect: float


@dataclass(frozen=True, slots=True)
class Fault:
    """Something happened to the device."""

    reason: str
    """One word: Xid79, LinkFlapping."""
    message: str
    severity: Severity
    remedy: str
    evidence: str = ""
    needs_reset: bool = False
    hold: float = 0.0
    """Hold-down of this fault, if longer than the device's own."""


@dataclass(frozen=True, slots=True)
class Look:
    """What an observation found."""

    fault: Fault | None = None
    """It is not in order now, for this reason."""
    gone: bool = False
    """It does not answer. That it answers again later is proof of a reset."""
    action: str = ""
    """What the driver wants done before it can be used again; empty for nothing."""
    was_reset: bool = False
    """Counters that only a reset clears were cleared since the last observation."""


@dataclass(frozen=True, slots=True)
class Health:
    """All that is remembered of a device."""

    known: State = State.HEALTHY
    """The state, as far as it could be seen."""
    seen: bool = True
    blind_reason: str = ""
    reason: str = ""
    message: str = ""
    evidence: str = ""
    remedy: str = ""
    since: float = 0.0
    until: float = 0.0
    """End of the hold-down, of the probation, or of the suspicion."""
    needs_reset: bool = False
    reset_seen: bool = False
    gone: bool = False
    action: str = ""
    proved: bool = False
    """On probation: a probe has passed."""
    returns: tuple[float, ...] = ()
    """When it became Unhealthy, for the last day."""

    @property
    def state(self) -> State:
        """How it is."""
        return self.known if self.seen else State.UNKNOWN

    @property
    def in_service(self) -> bool:
        """Whether new containers may get it."""
        return self.seen and self.known in (State.HEALTHY, State.SUSPECT)


def take(health: Health, fault: Fault, now: float, times: Times) -> Health:
    """The device after a fault."""
    if fault.severity is Severity.SUSPECT:
        if health.known not in (State.HEALTHY, State.SUSPECT):
            return health
        return replace(
            health,
            known=State.SUSPECT,
            reason=fault.reason,
            message=fault.message,
            evidence=fault.evidence,
            remedy=fault.remedy,
            since=now if health.known is not State.SUSPECT else health.since,
            until=now + times.suspect,
        )
    recent = tuple(one for one in health.returns if one > now - RETURNS_WINDOW_SECONDS)
    already = health.known is State.UNHEALTHY
    returns = recent if already else (*recent, now)[-HISTORY_MAX:]
    base = max(times.hold, fault.hold)
    hold = min(base * 2.0 ** (len(returns) - 1), max(times.hold_max, base))
    # A second fault of a device that is out already adds what it needs; the first cause stays,
    # unless the new one is stricter.
    keep = already and not (fault.needs_reset and not health.needs_reset)
    return replace(
        health,
        known=State.UNHEALTHY,
        reason=health.reason if keep else fault.reason,
        message=health.message if keep else fault.message,
        evidence=health.evidence if keep else fault.evidence,
        remedy=health.remedy if keep else fault.remedy,
        since=health.since if already else now,
        until=max(health.until if already else 0.0, now + hold),
        needs_reset=fault.needs_reset or (already and health.needs_reset),
        reset_seen=already and health.reset_seen and not fault.needs_reset,
        proved=False,
        returns=returns,
    )


def look(health: Health, found: Look, now: float, times: Times) -> Health:
    """The device after an observation; also moves time forward."""
    came_back = health.gone and not found.gone
    settled = bool(health.action) and not found.action and not found.gone
    health = replace(
        health,
        seen=True,
        blind_reason="",
        gone=found.gone,
        action=found.action if not found.gone else health.action,
        reset_seen=health.reset_seen or came_back or settled or found.was_reset,
    )
    if found.fault is not None:
        if health.known is State.UNHEALTHY and found.fault.severity is Severity.UNHEALTHY:
            return replace(health, until=max(health.until, now + times.hold))
        return take(health, found.fault, now, times)
    return _onward(health, now, times)


def begin_probation(health: Health, now: float, times: Times) -> Health:
    """The device when the first sample of its probation was taken, from which it counts."""
    return replace(health, until=max(health.until, now + times.probation), proved=False)


def probed(health: Health, failure: str, now: float, times: Times) -> Health:
    """The device after the probe at the end of its probation; no `failure`: it passed."""
    if health.known is not State.RECOVERING:
        return health
    if not failure:
        return _onward(replace(health, proved=True), now, times)
    remedy = health.remedy or "validation"
    text = f"the probe before its return failed: {failure}"
    fault = Fault("ProbeFailed", text, Severity.UNHEALTHY, remedy, evidence=failure)
    return take(health, fault, now, times)


def unseen(health: Health, reason: str) -> Health:
    """The device when it cannot be observed."""
    return replace(health, seen=False, blind_reason=reason)


def _onward(health: Health, now: float, times: Times) -> Health:
    if now < health.until:
        return health
    if health.known is State.UNHEALTHY:
        if health.action or (health.needs_reset and not health.reset_seen):
            return health
        return replace(
            health,
            known=State.RECOVERING,
            since=now,
            until=now + times.probation,
            proved=False,
        )
    if health.known is State.RECOVERING and not health.proved:
        return health
    if health.known in (State.RECOVERING, State.SUSPECT):
        return Health(known=State.HEALTHY, since=now, returns=health.returns)
    return health
