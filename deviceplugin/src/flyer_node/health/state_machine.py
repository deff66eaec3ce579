"""State machine of a device's health. Pure: times are arguments.

    Healthy -> Suspect -> Unhealthy(reason, evidence, since) -> Recovering(probation) -> Healthy

An unobservable device is Unknown; its last state is kept.

Invariants:
- Unhealthy always has a reason and a remedy, and ends automatically once the remedy was observed.
- A device does not recover while the driver requests a recovery action or during its hold-down.
- A fault that needs a reset recovers only after one was observed: an unresponsive device answers
  again, a requested recovery action is withdrawn, or volatile counters were reset. The absence of a
  requested action proves nothing: the driver may not have noticed the fault yet.
- A fault during probation makes the device Unhealthy again; each return in 24 h doubles the
  hold-down.
- Probation ends when a probe passes; a failed probe is a fault.
- Suspect devices stay in service.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

__all__ = [
    "DeviceHealth",
    "Fault",
    "Observation",
    "Severity",
    "State",
    "Timings",
    "apply_fault",
    "apply_probe",
    "mark_unobservable",
    "observe",
    "start_probation",
]

RETURNS_WINDOW_SECONDS = 86_400.0
HISTORY_MAX = 32


class State(enum.StrEnum):
    """Health state of a device."""

    HEALTHY = "Healthy"
    SUSPECT = "Suspect"
    UNHEALTHY = "Unhealthy"
    RECOVERING = "Recovering"
    UNKNOWN = "Unknown"


class Severity(enum.IntEnum):
    """Effect of a fault; ordered."""

    SUSPECT = 1
    UNHEALTHY = 2


@dataclass(frozen=True, slots=True)
class Timings:
    """State durations of a kind of device, in seconds."""

    hold: float
    hold_max: float
    probation: float
    suspect: float


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the device."""

    reason: str
    """CamelCase: Xid79, LinkFlapping."""
    message: str
    severity: Severity
    remedy: str
    evidence: str = ""
    needs_reset: bool = False
    hold: float = 0.0
    """Hold-down of this fault, if longer than the device's own."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Result of an observation."""

    fault: Fault | None = None
    """The present fault, if any."""
    unresponsive: bool = False
    """The device does not answer. A later answer proves a reset."""
    recovery_action: str = ""
    """The action that the driver requests before the device can be used again, if any."""
    was_reset: bool = False
    """Counters that only a reset clears were cleared since the last observation."""


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """Health record of a device."""

    last_state: State = State.HEALTHY
    """The last observed state."""
    observable: bool = True
    unobservable_reason: str = ""
    reason: str = ""
    message: str = ""
    evidence: str = ""
    remedy: str = ""
    since: float = 0.0
    until: float = 0.0
    """End of the hold-down, the probation or the Suspect state."""
    needs_reset: bool = False
    reset_seen: bool = False
    unresponsive: bool = False
    recovery_action: str = ""
    probe_passed: bool = False
    """Only during probation."""
    failures: tuple[float, ...] = ()
    """Times of the last day at which the device became Unhealthy."""

    @property
    def state(self) -> State:
        """The reported state."""
        return self.last_state if self.observable else State.UNKNOWN

    @property
    def in_service(self) -> bool:
        """Whether the device may be allocated to new containers."""
        return self.observable and self.last_state in (State.HEALTHY, State.SUSPECT)


def apply_fault(health: DeviceHealth, fault: Fault, now: float, timings: Timings) -> DeviceHealth:
    """Returns the health after a fault."""
    if fault.severity is Severity.SUSPECT:
        if health.last_state not in (State.HEALTHY, State.SUSPECT):
            return health
        return replace(
            health,
            last_state=State.SUSPECT,
            reason=fault.reason,
            message=fault.message,
            evidence=fault.evidence,
            remedy=fault.remedy,
            since=now if health.last_state is not State.SUSPECT else health.since,
            until=now + timings.suspect,
        )
    recent = tuple(
        failed_at for failed_at in health.failures if failed_at > now - RETURNS_WINDOW_SECONDS
    )
    already = health.last_state is State.UNHEALTHY
    failures = recent if already else (*recent, now)[-HISTORY_MAX:]
    base = max(timings.hold, fault.hold)
    hold = min(base * 2.0 ** (len(failures) - 1), max(timings.hold_max, base))
    # A further fault of an Unhealthy device adds its requirements; the first reason is kept unless
    # the new fault is stricter.
    keep = already and not (fault.needs_reset and not health.needs_reset)
    return replace(
        health,
        last_state=State.UNHEALTHY,
        reason=health.reason if keep else fault.reason,
        message=health.message if keep else fault.message,
        evidence=health.evidence if keep else fault.evidence,
        remedy=health.remedy if keep else fault.remedy,
        since=health.since if already else now,
        until=max(health.until if already else 0.0, now + hold),
        needs_reset=fault.needs_reset or (already and health.needs_reset),
        reset_seen=already and health.reset_seen and not fault.needs_reset,
        probe_passed=False,
        failures=failures,
    )


def observe(
    health: DeviceHealth, observation: Observation, now: float, timings: Timings
) -> DeviceHealth:
    """Returns the health after an observation; also applies elapsed timers."""
    answers_again = health.unresponsive and not observation.unresponsive
    action_withdrawn = (
        bool(health.recovery_action)
        and not observation.recovery_action
        and not observation.unresponsive
    )
    health = replace(
        health,
        observable=True,
        unobservable_reason="",
        unresponsive=observation.unresponsive,
        recovery_action=observation.recovery_action
        if not observation.unresponsive
        else health.recovery_action,
        reset_seen=health.reset_seen or answers_again or action_withdrawn or observation.was_reset,
    )
    if observation.fault is not None:
        if (
            health.last_state is State.UNHEALTHY
            and observation.fault.severity is Severity.UNHEALTHY
        ):
            return replace(health, until=max(health.until, now + timings.hold))
        return apply_fault(health, observation.fault, now, timings)
    return _advance(health, now, timings)


def start_probation(health: DeviceHealth, now: float, timings: Timings) -> DeviceHealth:
    """Returns the health after the first sample of a probation, which starts its timer."""
    return replace(health, until=max(health.until, now + timings.probation), probe_passed=False)


def apply_probe(health: DeviceHealth, failure: str, now: float, timings: Timings) -> DeviceHealth:
    """Returns the health after the probe that ends a probation; an empty `failure` means passed."""
    if health.last_state is not State.RECOVERING:
        return health
    if not failure:
        return _advance(replace(health, probe_passed=True), now, timings)
    remedy = health.remedy or "validation"
    text = f"the recovery probe failed: {failure}"
    fault = Fault("ProbeFailed", text, Severity.UNHEALTHY, remedy, evidence=failure)
    return apply_fault(health, fault, now, timings)


def mark_unobservable(health: DeviceHealth, reason: str) -> DeviceHealth:
    """Returns the health of a device that cannot be observed."""
    return replace(health, observable=False, unobservable_reason=reason)


def _advance(health: DeviceHealth, now: float, timings: Timings) -> DeviceHealth:
    if now < health.until:
        return health
    if health.last_state is State.UNHEALTHY:
        if health.recovery_action or (health.needs_reset and not health.reset_seen):
            return health
        return replace(
            health,
            last_state=State.RECOVERING,
            since=now,
            until=now + timings.probation,
            probe_passed=False,
        )
    if health.last_state is State.RECOVERING and not health.probe_passed:
        return health
    if health.last_state in (State.RECOVERING, State.SUSPECT):
        return DeviceHealth(last_state=State.HEALTHY, since=now, failures=health.failures)
    return health
