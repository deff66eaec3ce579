"""Cards: how transfers share them."""

import random
from math import inf

import pytest
from haiscale.model.actions import Kind
from haiscale.model.cards import Sharing, Transfer, card


def ends(sharing, arrivals):
    """Time at which each transfer ends; arrivals: (time, name, seconds, kind, level, owner)."""
    result, one = {}, card(sharing)
    arrivals = sorted(arrivals, reverse=True)
    while arrivals or one.next_end() < inf:
        if arrivals and arrivals[-1][0] <= one.next_end():
            time, name, seconds, kind, level = arrivals.pop()
            one.add(time, Transfer(0, seconds, (kind, level), lambda name=name: name))
        else:
            time = one.next_end()
            result[one.take(time).ends()] = pytest.approx(time)
    return result


PIPELINE, GRADIENTS = Kind.PIPELINE, Kind.GRADIENTS
TWO = [(0.0, "a", 2.0, PIPELINE, 0), (1.0, "b", 2.0, PIPELINE, 0)]


@pytest.mark.parametrize(
    ("sharing", "expected"),
    [
        (Sharing.TURNS, {"a": 2.0, "b": 4.0}),
        (Sharing.FAIR, {"a": 3.0, "b": 4.0}),
        (Sharing.SEPARATE, {"a": 2.0, "b": 3.0}),
    ],
)
def test_two_transfers(sharing, expected):
    assert ends(sharing, TWO) == expected


def test_urgent_kinds_and_levels_interrupt_and_the_rest_resumes():
    transfers = [
        (0.0, "late layer", 4.0, GRADIENTS, 9),
        (1.0, "early layer", 1.0, GRADIENTS, 0),
        (1.5, "activations", 1.0, PIPELINE, 0),
        (1.5, "more of the late layer", 1.0, GRADIENTS, 9),
    ]
    assert ends(Sharing.TURNS, transfers) == {
        "activations": 2.5,
        "early layer": 3.0,
        "late layer": 6.0,
        "more of the late layer": 7.0,
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_shared_card_is_never_idle_while_transfers_wait(seed):
    draw = random.Random(seed)
    arrivals = [
        (draw.uniform(0, 10), n, draw.uniform(0, 2), draw.choice(list(Kind)), draw.randrange(3))
        for n in range(30)
    ]
    last, busy_until = 0.0, 0.0
    for time, _, seconds, *_ in sorted(arrivals):
        busy_until = max(time, busy_until) + seconds
    for sharing in (Sharing.FAIR, Sharing.TURNS):
        last = max(time.expected for time in ends(sharing, arrivals).values())
        assert last == pytest.approx(busy_until)


@pytest.mark.parametrize("sharing", list(Sharing))
def test_transfers_of_a_lost_rank_are_removed(sharing):
    one = card(sharing)
    for owner, seconds in ((0, 5.0), (1, 1.0), (0, 5.0)):
        one.add(0.0, Transfer(owner, seconds, (0, 0), lambda: None))
    one.drop(0.0, 0)
    assert one.next_end() == pytest.approx(1.0)
    assert one.take(1.0).owner == 1
    assert one.next_end() == inf
