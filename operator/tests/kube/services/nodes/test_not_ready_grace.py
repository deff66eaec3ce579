"""When Kubernetes' word that a node is lost counts for what runs there."""

import pytest
from flyer.kube.services.nodes.not_ready_grace import NotReadyGrace


def lost_at(grace, heard, *, begin=100.0, end=500.0):
    """When each node was given up, looking twice a second; `heard(now)` is what is heard."""
    lost, now = {}, begin
    while now < end:
        now += 0.5
        lost |= dict.fromkeys(grace.expired(heard(now), now), now - begin)
    return lost


def talking(*names, silent=(), since=100.0):
    return lambda now: dict.fromkeys(names, now) | dict.fromkeys(silent, since)


def test_where_nothing_runs_a_node_is_lost_at_once():
    assert not NotReadyGrace().grant("a", None, 100.0)


def test_who_talks_is_doubted_for_five_minutes():
    grace = NotReadyGrace()
    assert grace.grant("a", 99.0, 100.0)
    assert lost_at(grace, talking("a", "b")) == {"a": 300.0}


@pytest.mark.parametrize("before", [0.0, 4.0])
def test_one_that_is_silent_is_lost_ten_seconds_after_its_last_word(before):
    grace = NotReadyGrace()
    grace.grant("a", 100.0 - before, 100.0)
    heard = talking("b", "c", silent=["a"], since=100.0 - before)
    assert lost_at(grace, heard) == {"a": 10.0 - before}


def test_one_that_has_been_silent_for_long_is_lost_with_the_next_look():
    grace = NotReadyGrace()
    grace.grant("a", 60.0, 100.0)
    assert lost_at(grace, talking("b", silent=["a"], since=60.0)) == {"a": 0.5}


def test_the_end_of_what_ran_there_is_no_loss_until_it_has_been_judged():
    grace = NotReadyGrace()
    grace.grant("a", 100.0, 100.0)
    assert lost_at(grace, talking("b")) == {"a": 10.0}


def test_of_many_each_has_time_to_find_us_again():
    grace, names = NotReadyGrace(), [f"n{index}" for index in range(8)]
    for name in names:
        grace.grant(name, 60.0, 100.0)
    lost = lost_at(grace, talking(*names[2:], silent=names[:2], since=60.0))
    assert lost == {name: 60.0 if name in names[:2] else 300.0 for name in names}


def test_where_we_hear_nobody_one_that_is_doubted_has_time_too():
    grace = NotReadyGrace()
    assert grace.grant("a", 100.0, 100.0)
    assert lost_at(grace, talking(silent=["a", "b"])) == {"a": 60.0}


def test_a_new_leader_asks_first_where_something_runs():
    grace = NotReadyGrace()
    assert grace.grant("empty", None, 0.0)
    assert grace.grant("full", None, 0.0)
    assert grace.expired({"full": 0.0}, 0.5) == []
    assert grace.expired({"full": 0.0}, 1.0) == ["empty"]
    assert "full" in grace
    assert not grace.grant("empty", None, 1.0)


def test_who_is_ready_again_is_not_lost():
    grace = NotReadyGrace()
    grace.grant("a", 99.0, 100.0)
    grace.cancel("a")
    assert not lost_at(grace, talking())
