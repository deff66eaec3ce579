"""When a NotReady node counts as lost."""

import pytest
from flyer.kube.services.nodes.not_ready_grace import NotReadyGrace


def lost_at(grace, heartbeats_at, *, start=100.0, end=500.0):
    """Time at which each node is lost, with two checks per second; `heard(now)`: messages."""
    lost_after, now = {}, start
    while now < end:
        now += 0.5
        lost_after |= dict.fromkeys(grace.expired(heartbeats_at(now), now), now - start)
    return lost_after


def talking(*names, silent=(), since=100.0):
    return lambda now: dict.fromkeys(names, now) | dict.fromkeys(silent, since)


def test_a_node_without_pods_is_lost_immediately():
    assert not NotReadyGrace().grant("a", None, 100.0)


def test_a_sending_node_has_a_grace_period_of_five_minutes():
    grace = NotReadyGrace()
    assert grace.grant("a", 99.0, 100.0)
    assert lost_at(grace, talking("a", "b")) == {"a": 300.0}


@pytest.mark.parametrize("before", [0.0, 4.0])
def test_a_silent_node_is_lost_ten_seconds_after_its_last_message(before):
    grace = NotReadyGrace()
    grace.grant("a", 100.0 - before, 100.0)
    heartbeats_at = talking("b", "c", silent=["a"], since=100.0 - before)
    assert lost_at(grace, heartbeats_at) == {"a": 10.0 - before}


def test_a_node_silent_for_long_is_lost_at_the_next_check():
    grace = NotReadyGrace()
    grace.grant("a", 60.0, 100.0)
    assert lost_at(grace, talking("b", silent=["a"], since=60.0)) == {"a": 0.5}


def test_a_node_without_known_pods_keeps_its_grace():
    grace = NotReadyGrace()
    grace.grant("a", 100.0, 100.0)
    assert lost_at(grace, talking("b")) == {"a": 10.0}


def test_each_of_many_nodes_has_time_to_reconnect():
    grace, names = NotReadyGrace(), [f"n{index}" for index in range(8)]
    for name in names:
        grace.grant(name, 60.0, 100.0)
    lost_after = lost_at(grace, talking(*names[2:], silent=names[:2], since=60.0))
    assert lost_after == {name: 60.0 if name in names[:2] else 300.0 for name in names}


def test_without_any_messages_a_not_ready_node_keeps_its_grace():
    grace = NotReadyGrace()
    assert grace.grant("a", 100.0, 100.0)
    assert lost_at(grace, talking(silent=["a", "b"])) == {"a": 60.0}


def test_a_new_leader_waits_for_the_list_of_running_pods():
    grace = NotReadyGrace()
    assert grace.grant("empty", None, 0.0)
    assert grace.grant("full", None, 0.0)
    assert grace.expired({"full": 0.0}, 0.5) == []
    assert grace.expired({"full": 0.0}, 1.0) == ["empty"]
    assert "full" in grace
    assert not grace.grant("empty", None, 1.0)


def test_a_node_that_is_ready_again_is_not_lost():
    grace = NotReadyGrace()
    grace.grant("a", 99.0, 100.0)
    grace.cancel("a")
    assert not lost_at(grace, talking())
