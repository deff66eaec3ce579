"""Connection limits: which connections keep their slots under load."""

from __future__ import annotations

from collections import Counter

import pytest
from flyer.kube.servers.connection_limits import (
    ConnectionLimits,
    ConnectionLimitSettings,
    ConnectionSlot,
    source_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

SETTINGS = ConnectionLimitSettings(
    total_max=8, source_max=4, expected_source_max=2, rate_per_second=1000.0, burst=1000
)


def fill(limits: ConnectionLimits, source: str, count: int) -> list[ConnectionSlot]:
    slots = [limits.admit(source, 0.0).slot for _ in range(count)]
    return [match for match in slots if match is not None]


def test_expected_sources_have_reserved_connections() -> None:
    limits = ConnectionLimits(SETTINGS)
    for i in range(100):
        limits.admit(f"10.9.0.{i}", 0.0)
    assert limits.total == SETTINGS.total_max
    answer = limits.admit("10.0.0.1", 0.0, expected=True)
    assert answer.slot is not None
    assert answer.evicted is None
    assert limits.total == SETTINGS.total_max


def test_an_expected_source_evicts_its_own_oldest_connection() -> None:
    limits = ConnectionLimits(SETTINGS)
    first = limits.admit("a", 0.0, expected=True).slot
    limits.admit("a", 0.0, expected=True)
    answer = limits.admit("a", 0.0, expected=True)
    assert answer.slot is not None
    assert answer.evicted is first


def test_the_busiest_source_loses_its_oldest_silent_connection() -> None:
    limits = ConnectionLimits(SETTINGS)
    busy = fill(limits, "busy", 4)
    fill(limits, "other", 3)
    fill(limits, "third", 1)
    busy[0].busy = True  # the server processes it
    answer = limits.admit("new", 0.0)
    assert answer.slot is not None
    assert answer.evicted is busy[1]


def test_a_source_at_its_limit_replaces_its_own_and_takes_none_of_others() -> None:
    limits = ConnectionLimits(SETTINGS)
    own_slots = fill(limits, "mine", 4)
    other_slots = fill(limits, "other", 4)
    answer = limits.admit("mine", 0.0)
    assert answer.evicted is own_slots[0]
    for item in own_slots[1:]:
        item.busy = True
    assert answer.slot is not None
    answer.slot.busy = True
    assert limits.admit("mine", 0.0).slot is None
    assert all(other in limits._held["other"] for other in other_slots)


def test_a_connection_is_released_once() -> None:
    limits = ConnectionLimits(SETTINGS)
    (slot,) = fill(limits, "a", 1)
    limits.release(slot)
    limits.release(slot)
    assert limits.total == 0
    assert len(limits) == 0


def test_a_fast_source_is_refused_until_its_bucket_refills() -> None:
    limits = ConnectionLimits(
        ConnectionLimitSettings(total_max=100, source_max=100, rate_per_second=1.0, burst=3)
    )
    assert [limits.admit("a", 0.0).slot is not None for _ in range(5)] == [True] * 3 + [False] * 2
    assert limits.admit("b", 0.0).slot is not None
    assert limits.admit("a", 1.0).slot is not None
    assert limits.admit("a", 1.0).slot is None


def test_connections_per_second_of_one_tenant_are_limited_and_exclude_no_other() -> None:
    """Each handshake costs the scheduler's loop a millisecond, and expected pods are tenants'."""
    settings = ConnectionLimitSettings()
    limits, opened, seconds = ConnectionLimits(settings), 0, 60
    pods = [f"10.1.0.{i}" for i in range(50)]
    for tick in range(seconds * 20):
        now = tick / 20
        for pod in pods:
            answer = limits.admit(pod, now, expected=True)
            if answer.slot is not None:
                opened += 1
                limits.release(answer.slot)
    allowed = settings.expected_burst + settings.expected_per_second * seconds
    assert opened <= len(pods) * (allowed + 1)
    assert allowed / seconds <= 6
    # A pod of another tenant, and one whose address becomes known after its first attempt.
    assert limits.admit("10.2.0.1", seconds, expected=True).slot is not None
    assert limits.admit("10.2.0.2", seconds).slot is not None
    assert limits.admit("10.2.0.2", seconds, expected=True).slot is not None


def test_sources_with_many_connections_do_not_exclude_others() -> None:
    """A few pods may use all slots of unexpected sources; the API server is also unexpected."""
    limits, refused, opened = ConnectionLimits(ConnectionLimitSettings()), 0, 0
    for tick in range(60_000):
        now = tick / 1000
        answer = limits.admit(f"10.1.0.{tick % 4}", now)
        if answer.slot is not None:
            opened += 1
            limits.release(answer.slot)
        if tick % 1000 == 500:
            answer = limits.admit("10.0.0.1", now)
            refused += answer.slot is None
            if answer.slot is not None:
                limits.release(answer.slot)
    assert opened < 60 * 200 + 1000 + 60 * 50 + 200, "what a handshake costs stays bounded"
    assert refused == 0


def test_the_number_of_remembered_sources_is_bounded() -> None:
    limits = ConnectionLimits(ConnectionLimitSettings(sources_max=10))
    for i in range(1000):
        limits.admit(f"10.0.{i // 250}.{i % 250}", 0.0)
    assert len(limits._rates) == 10


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("odd", "odd"),
    ],
)
def test_a_host_is_one_source(address: str, source: str) -> None:
    assert source_of(address) == source


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.booleans(), st.integers(0, 20), st.booleans()),
        max_size=80,
    )
)
def test_limits_hold_in_any_order(steps: list[tuple[int, bool, int, bool]]) -> None:
    limits = ConnectionLimits(SETTINGS)
    admitted: list[ConnectionSlot] = []
    for number, expected, victim, busy in steps:
        answer = limits.admit(f"s{number}", 0.0, expected=expected)
        if answer.evicted is not None:
            assert not answer.evicted.busy
            assert answer.slot is not None
            admitted.remove(answer.evicted)
        if answer.slot is not None:
            admitted.append(answer.slot)
        if admitted and victim < len(admitted):
            admitted[victim].busy = busy
            if not busy:
                limits.release(admitted.pop(victim))
        shares = Counter((item.source, item.expected) for item in admitted)
        assert len(limits) == len(admitted)
        assert limits.total == sum(not entry.expected for entry in admitted) <= SETTINGS.total_max
        for (_, is_expected), share in shares.items():
            limit = SETTINGS.expected_source_max if is_expected else SETTINGS.source_max
            assert share <= limit
