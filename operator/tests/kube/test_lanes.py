"""A lane keeps order and width, whatever becomes of those who wait."""

import asyncio

from flyer.kube.client import Lane


async def ride(turns, log, name, leave):
    async with turns:
        log.append(name)
        await leave.wait()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_fewer_at_once_while_something_is_urgent():
    lane, log, leave = Lane(3, 1), [], asyncio.Event()
    with lane.narrowed():
        tasks = [asyncio.create_task(ride(lane, log, n, leave)) for n in range(5)]
        await settle()
        assert log == [0]
    await settle()
    assert log == [0, 1, 2]
    leave.set()
    await asyncio.gather(*tasks)
    assert log == [0, 1, 2, 3, 4]


async def test_who_came_before_it_was_urgent_finishes():
    lane, log, leave = Lane(2, 1), [], asyncio.Event()
    tasks = [asyncio.create_task(ride(lane, log, n, leave)) for n in range(3)]
    await settle()
    with lane.narrowed():
        assert log == [0, 1]
        leave.set()
        await asyncio.gather(*tasks)
    assert log == [0, 1, 2]


async def test_what_is_ahead_comes_before_all_that_wait():
    lane, log, leave = Lane(1, 1), [], asyncio.Event()
    tasks = [asyncio.create_task(ride(lane, log, n, leave)) for n in range(3)]
    tasks += [asyncio.create_task(ride(lane.ahead, log, n, leave)) for n in "ab"]
    await settle()
    assert log == [0]  # nobody is sent away for it
    leave.set()
    await asyncio.gather(*tasks)
    assert log == [0, "a", "b", 1, 2]


async def test_a_turn_is_not_lost_with_whoever_is_cancelled():
    lane, log, leave = Lane(1, 1), [], asyncio.Event()
    tasks = [asyncio.create_task(ride(lane, log, n, leave)) for n in range(4)]
    await settle()
    tasks[1].cancel()  # while it waits
    leave.set()
    await tasks[0]  # the turn goes to the third: cancelled at the moment at which it comes
    tasks[2].cancel()
    async with asyncio.timeout(60):
        await tasks[3]
    assert log[0] == 0
    assert log[-1] == 3
