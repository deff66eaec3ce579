"""Keyed conditions: waiters are woken only by changes of their key."""

from __future__ import annotations

import asyncio

import pytest
from flyer.kube.keyed_condition import KeyedCondition


class Condition:
    """A condition set by the test, which counts its evaluations."""

    def __init__(self) -> None:
        self.holds = False
        self.asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.holds


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_condition_is_evaluated_immediately_and_after_each_change_of_its_key() -> None:
    changes, condition = KeyedCondition(), Condition()
    waiting = asyncio.create_task(changes.until("a", condition))
    await settle()
    assert condition.asked == 1
    changes.notify("b")
    await settle()
    assert condition.asked == 1
    changes.notify("a")
    changes.notify("a")
    await settle()
    assert condition.asked == 2, "two changes of one turn are one"
    condition.holds = True
    changes.notify("a")
    assert await waiting is True
    assert condition.asked == 3
    assert changes._waiting == {}


async def test_a_condition_that_holds_returns_immediately() -> None:
    condition = Condition()
    condition.holds = True
    assert await KeyedCondition().until("a", condition, 0) is True


async def test_a_timeout_returns_the_conditions_value() -> None:
    changes, condition = KeyedCondition(), Condition()
    assert await changes.until("a", condition, 0.01) is False
    assert changes._waiting == {}


async def test_a_cancelled_waiter_does_not_affect_others() -> None:
    changes, first, second = KeyedCondition(), Condition(), Condition()
    waiting = [asyncio.create_task(changes.until("a", holds)) for holds in (first, second)]
    await settle()
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    second.holds = True
    changes.notify("a")
    assert await waiting[1] is True
    assert changes._waiting == {}
