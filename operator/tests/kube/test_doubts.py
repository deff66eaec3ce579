"""When Kubernetes' word that a node is lost counts for what runs there."""

import pytest
from flyer.kube.services.doubts import Doubts


def lost_at(doubts, heard, *, begin=100.0, end=500.0):
    """When each node was given up, looking twice a second; `heard(now)` is what is heard."""
    found, now = {}, begin
    while now < end:
        now += 0.5
        found |= dict.fromkeys(doubts.judge(heard(now), now), now - begin)
    return found


def talking(*names, silent=(), since=100.0):
    return lambda now: dict.fromkeys(names, now) | dict.fromkeys(silent, since)


def test_where_nothing_runs_a_node_is_lost_at_once():
    assert not Doubts().of("a", None, 100.0)


def test_who_talks_is_doubted_for_five_minutes():
    doubts = Doubts()
    assert doubts.of("a", 99.0, 100.0)
    assert lost_at(doubts, talking("a", "b")) == {"a": 300.0}


@pytest.mark.parametrize("before", [0.0, 4.0])
def test_one_that_is_silent_is_lost_ten_seconds_after_its_last_word(before):
    doubts = Doubts()
    doubts.of("a", 100.0 - before, 100.0)
    heard = talking("b", "c", silent=["a"], since=100.0 - before)
    assert lost_at(doubts, heard) == {"a": 10.0 - before}


def test_one_that_has_been_silent_for_long_is_lost_with_the_next_look():
    doubts = Doubts()
    doubts.of("a", 60.0, 100.0)
    assert lost_at(doubts, talking("b", silent=["a"], since=60.0)) == {"a": 0.5}


def test_the_end_of_what_ran_there_is_no_loss_until_it_has_been_judged():
    doubts = Doubts()
    doubts.of("a", 100.0, 100.0)
    assert lost_at(doubts, talking("b")) == {"a": 10.0}


def test_of_many_each_has_time_to_find_us_again():
    doubts, names = Doubts(), [f"n{index}" for index in range(8)]
    for name in names:
        doubts.of(name, 60.0, 100.0)
    found = lost_at(doubts, talking(*names[2:], silent=names[:2], since=60.0))
    assert found == {name: 60.0 if name in names[:2] else 300.0 for name in names}


def test_where_we_hear_nobody_one_that_is_doubted_has_time_too():
    doubts = Doubts()
    assert doubts.of("a", 100.0, 100.0)
    assert lost_at(doubts, talking(silent=["a", "b"])) == {"a": 60.0}


def test_a_new_leader_asks_first_where_something_runs():
    doubts = Doubts()
    assert doubts.of("empty", None, 0.0)
    assert doubts.of("full", None, 0.0)
    assert doubts.judge({"full": 0.0}, 0.5) == []
    assert doubts.judge({"full": 0.0}, 1.0) == ["empty"]
    assert "full" in doubts
    assert not doubts.of("empty", None, 1.0)


def test_who_is_ready_again_is_not_lost():
    doubts = Doubts()
    doubts.of("a", 99.0, 100.0)
    doubts.drop("a")
    assert not lost_at(doubts, talking())
