"""The state machine of a device's health: pure, with times as arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flyer_node.health.state_machine import (
    DeviceHealth,
    Fault,
    Observation,
    Severity,
    State,
    Timings,
    apply_fault,
    apply_probe,
    mark_unobservable,
    observe,
)
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable


TIMES = Timings(hold=10, hold_max=3600, probation=30, suspect=600)


RESET = Fault("Xid62", "text", Severity.UNHEALTHY, "GPU reset", needs_reset=True)


SOFT = Fault("Xid63", "text", Severity.SUSPECT, "reset at idle")


LOST = Observation(
    fault=Fault("GpuLost", "no answer", Severity.UNHEALTHY, "GPU reset or node reboot"),
    unresponsive=True,
)


def action_observation(action: str) -> Observation:
    fault = Fault("RecoveryAction", f"asks {action}", Severity.UNHEALTHY, action)
    return Observation(fault=fault, recovery_action=action)


def test_a_fault_and_its_whole_recovery() -> None:
    health = apply_fault(DeviceHealth(), RESET, 100, TIMES)
    assert (health.state, health.reason, health.since) == (State.UNHEALTHY, "Xid62", 100)
    health = observe(health, Observation(), 200, TIMES)
    assert health.state is State.UNHEALTHY, "no reset was observed"
    health = observe(health, LOST, 201, TIMES)
    health = observe(health, Observation(), 205, TIMES)
    assert health.state is State.UNHEALTHY, "the hold-down starts when the fault ends"
    health = observe(health, Observation(), 212, TIMES)
    assert health.state is State.RECOVERING
    assert not health.in_service
    assert observe(health, Observation(), 241, TIMES).state is State.RECOVERING
    health = observe(health, Observation(), 242, TIMES)
    assert health.state is State.RECOVERING, "no recovery probe has passed"
    health = apply_probe(health, "", 243, TIMES)
    assert (health.state, health.reason) == (State.HEALTHY, "")


def test_a_failed_probe_doubles_the_hold_down() -> None:
    health = replace(apply_fault(DeviceHealth(), RESET, 0, TIMES), reset_seen=True)
    health = observe(health, Observation(), 10, TIMES)
    health = apply_probe(health, "8 of 16 lanes", 40, TIMES)
    assert (health.state, health.reason) == (State.UNHEALTHY, "ProbeFailed")
    assert health.until == 40 + 2 * TIMES.hold
    assert "8 of 16 lanes" in health.message
    assert health.remedy == RESET.remedy
    health = observe(health, Observation(), 61, TIMES)
    assert health.state is State.RECOVERING
    assert apply_probe(health, "", 91, TIMES).state is State.HEALTHY


def test_a_probe_affects_only_devices_on_probation() -> None:
    for health in (
        DeviceHealth(),
        apply_fault(DeviceHealth(), SOFT, 0, TIMES),
        apply_fault(DeviceHealth(), RESET, 0, TIMES),
    ):
        assert apply_probe(health, "", 5, TIMES) == health
        assert apply_probe(health, "refused", 5, TIMES) == health


def test_a_missing_recovery_action_does_not_prove_a_reset() -> None:
    health = apply_fault(DeviceHealth(), RESET, 0, TIMES)
    for now in range(1, 10_000, 100):
        health = observe(health, Observation(), now, TIMES)
        assert health.state is State.UNHEALTHY
    assert observe(health, Observation(was_reset=True), 10_050, TIMES).state is State.RECOVERING


def test_no_device_recovers_during_a_requested_action() -> None:
    health = observe(DeviceHealth(), action_observation("GPU_RESET"), 0, TIMES)
    for now in range(1, 10_000, 100):
        health = observe(health, action_observation("GPU_RESET"), now, TIMES)
        assert health.state is State.UNHEALTHY
    health = observe(health, Observation(), 10_050, TIMES)
    assert health.state is State.RECOVERING


def test_a_fault_during_probation_doubles_the_hold_down() -> None:
    health = replace(apply_fault(DeviceHealth(), RESET, 0, TIMES), reset_seen=True)
    health = observe(health, Observation(), 10, TIMES)
    assert health.state is State.RECOVERING
    health = replace(apply_fault(health, RESET, 20, TIMES), reset_seen=True)
    assert health.until == 20 + 2 * TIMES.hold
    assert observe(health, Observation(), 39, TIMES).state is State.UNHEALTHY
    assert observe(health, Observation(), 40, TIMES).state is State.RECOVERING


def test_the_hold_down_is_bounded_and_old_recoveries_expire() -> None:
    health, now = DeviceHealth(), 0.0
    for _ in range(40):
        health = replace(apply_fault(health, RESET, now, TIMES), reset_seen=True)
        assert health.until - now <= TIMES.hold_max
        now = health.until
        health = observe(health, Observation(), now, TIMES)
        now += TIMES.probation
        health = apply_probe(observe(health, Observation(), now, TIMES), "", now, TIMES)
        assert health.state is State.HEALTHY
    health = apply_fault(health, RESET, now + 90_000, TIMES)
    assert health.until == now + 90_000 + TIMES.hold


def test_a_suspect_device_stays_in_service_and_recovers() -> None:
    health = apply_fault(DeviceHealth(), SOFT, 0, TIMES)
    assert health.state is State.SUSPECT
    assert health.in_service
    assert observe(health, Observation(), 599, TIMES).state is State.SUSPECT
    assert observe(health, Observation(), 600, TIMES).state is State.HEALTHY


def test_a_suspect_fault_never_replaces_a_worse_state() -> None:
    health = apply_fault(DeviceHealth(), RESET, 0, TIMES)
    assert apply_fault(health, SOFT, 1, TIMES) == health


def test_the_first_reason_is_kept_unless_a_later_fault_is_stricter() -> None:
    fault = observe(DeviceHealth(), LOST, 0, TIMES)
    strict = apply_fault(fault, replace(RESET, reason="Xid79"), 1, TIMES)
    assert strict.reason == "Xid79"
    assert apply_fault(strict, replace(RESET, reason="Xid62"), 2, TIMES).reason == "Xid79"


def test_an_unobservable_device_keeps_its_state() -> None:
    for before in (DeviceHealth(), apply_fault(DeviceHealth(), RESET, 0, TIMES)):
        hidden = mark_unobservable(before, "the driver hangs")
        assert hidden.state is State.UNKNOWN
        assert not hidden.in_service
        assert observe(hidden, Observation(), 5, TIMES).state is before.state


EVENTS: dict[str, Callable[[DeviceHealth, float], DeviceHealth]] = {
    "reset fault": lambda health, now: apply_fault(health, RESET, now, TIMES),
    "soft fault": lambda health, now: apply_fault(health, SOFT, now, TIMES),
    "ok": lambda health, now: observe(health, Observation(), now, TIMES),
    "was reset": lambda health, now: observe(health, Observation(was_reset=True), now, TIMES),
    "lost": lambda health, now: observe(health, LOST, now, TIMES),
    "action": lambda health, now: observe(health, action_observation("GPU_RESET"), now, TIMES),
    "probe": lambda health, now: apply_probe(health, "", now, TIMES),
    "bad probe": lambda health, now: apply_probe(health, "refused", now, TIMES),
    "unobservable": lambda health, now: mark_unobservable(health, "hangs"),
}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.floats(0.01, 200)), max_size=60))
def test_the_invariants_hold_and_every_device_can_recover(
    steps: list[tuple[str, float]],
) -> None:
    health, now = DeviceHealth(), 1.0
    for event, later in steps:
        now += later
        before = health
        health = EVENTS[event](health, now)
        if health.last_state in (State.UNHEALTHY, State.SUSPECT):
            assert health.reason
            assert health.remedy
        if before.last_state is State.UNHEALTHY and health.last_state is not State.UNHEALTHY:
            assert health.last_state is State.RECOVERING
            assert event in ("ok", "was reset")
            assert now >= before.until
            assert not health.recovery_action
            assert not before.needs_reset or health.reset_seen
        if before.last_state is State.RECOVERING and health.last_state is State.HEALTHY:
            assert now >= before.until
            assert event == "probe" or before.probe_passed
        if event in ("lost", "action", "reset fault"):
            assert not health.in_service
    # Recovery: a reset, answers, and enough time.
    for _ in range(8):
        now += TIMES.hold_max + TIMES.suspect
        health = observe(health, Observation(was_reset=True), now, TIMES)
        health = apply_probe(health, "", now + TIMES.probation, TIMES)
    assert health.state is State.HEALTHY
