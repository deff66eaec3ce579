"""Which connections keep a place, whatever the sources do."""

from __future__ import annotations

from collections import Counter

import pytest
from flyer.kube.doors.places import Place, Places, PlaceSettings, source_of
from hypothesis import given, settings
from hypothesis import strategies as st

SETTINGS = PlaceSettings(
    total_max=8, source_max=4, expected_source_max=2, rate_per_second=1000.0, burst=1000
)


def fill(places: Places, source: str, count: int) -> list[Place]:
    found = [places.admit(source, 0.0).place for _ in range(count)]
    return [one for one in found if one is not None]


def test_expected_sources_have_places_that_others_never_use() -> None:
    places = Places(SETTINGS)
    for i in range(100):
        places.admit(f"10.9.0.{i}", 0.0)
    assert places.total == SETTINGS.total_max
    answer = places.admit("10.0.0.1", 0.0, expected=True)
    assert answer.place is not None
    assert answer.evicted is None
    assert places.total == SETTINGS.total_max


def test_an_expected_source_evicts_its_own_oldest_connection() -> None:
    places = Places(SETTINGS)
    first = places.admit("a", 0.0, expected=True).place
    places.admit("a", 0.0, expected=True)
    answer = places.admit("a", 0.0, expected=True)
    assert answer.place is not None
    assert answer.evicted is first


def test_the_busiest_source_loses_its_oldest_silent_connection() -> None:
    places = Places(SETTINGS)
    busy = fill(places, "busy", 4)
    fill(places, "other", 3)
    fill(places, "third", 1)
    busy[0].busy = True  # the server works on it
    answer = places.admit("new", 0.0)
    assert answer.place is not None
    assert answer.evicted is busy[1]


def test_a_source_at_its_limit_replaces_its_own_and_takes_none_of_others() -> None:
    places = Places(SETTINGS)
    mine = fill(places, "mine", 4)
    others = fill(places, "other", 4)
    answer = places.admit("mine", 0.0)
    assert answer.evicted is mine[0]
    for one in mine[1:]:
        one.busy = True
    assert answer.place is not None
    answer.place.busy = True
    assert places.admit("mine", 0.0).place is None
    assert all(one in places._held["other"] for one in others)


def test_a_released_place_is_free_once() -> None:
    places = Places(SETTINGS)
    (one,) = fill(places, "a", 1)
    places.release(one)
    places.release(one)
    assert places.total == 0
    assert len(places) == 0


def test_a_source_that_hurries_is_refused_until_its_bucket_refills() -> None:
    places = Places(PlaceSettings(total_max=100, source_max=100, rate_per_second=1.0, burst=3))
    assert [places.admit("a", 0.0).place is not None for _ in range(5)] == [True] * 3 + [False] * 2
    assert places.admit("b", 0.0).place is not None
    assert places.admit("a", 1.0).place is not None
    assert places.admit("a", 1.0).place is None


def test_pods_of_one_tenant_open_few_connections_a_second_and_keep_no_others_out() -> None:
    """Each handshake costs the scheduler's loop a millisecond, and expected pods are tenants'."""
    settings = PlaceSettings()
    places, opened, seconds = Places(settings), 0, 60
    pods = [f"10.1.0.{i}" for i in range(50)]
    for tick in range(seconds * 20):
        now = tick / 20
        for one in pods:
            answer = places.admit(one, now, expected=True)
            if answer.place is not None:
                opened += 1
                places.release(answer.place)
    allowed = settings.expected_burst + settings.expected_per_second * seconds
    assert opened <= len(pods) * (allowed + 1)
    assert allowed / seconds <= 6
    # A pod of another tenant, and one whose address becomes known after it has tried.
    assert places.admit("10.2.0.1", seconds, expected=True).place is not None
    assert places.admit("10.2.0.2", seconds).place is not None
    assert places.admit("10.2.0.2", seconds, expected=True).place is not None


def test_sources_that_open_many_connections_get_no_calm_one_refused() -> None:
    """Few pods may open all that strangers may together; the API server is a stranger, too."""
    places, refused, opened = Places(PlaceSettings()), 0, 0
    for tick in range(60_000):
        now = tick / 1000
        answer = places.admit(f"10.1.0.{tick % 4}", now)
        if answer.place is not None:
            opened += 1
            places.release(answer.place)
        if tick % 1000 == 500:
            answer = places.admit("10.0.0.1", now)
            refused += answer.place is None
            if answer.place is not None:
                places.release(answer.place)
    assert opened < 60 * 200 + 1000 + 60 * 50 + 200, "what a handshake costs stays bounded"
    assert refused == 0


def test_the_number_of_remembered_sources_is_bounded() -> None:
    places = Places(PlaceSettings(sources_max=10))
    for i in range(1000):
        places.admit(f"10.0.{i // 250}.{i % 250}", 0.0)
    assert len(places._rates) == 10


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
    places = Places(SETTINGS)
    held: list[Place] = []
    for number, expected, victim, busy in steps:
        answer = places.admit(f"s{number}", 0.0, expected=expected)
        if answer.evicted is not None:
            assert not answer.evicted.busy
            assert answer.place is not None
            held.remove(answer.evicted)
        if answer.place is not None:
            held.append(answer.place)
        if held and victim < len(held):
            held[victim].busy = busy
            if not busy:
                places.release(held.pop(victim))
        shares = Counter((one.source, one.expected) for one in held)
        assert len(places) == len(held)
        assert places.total == sum(not one.expected for one in held) <= SETTINGS.total_max
        for (_, is_expected), share in shares.items():
            limit = SETTINGS.expected_source_max if is_expected else SETTINGS.source_max
            assert share <= limit
