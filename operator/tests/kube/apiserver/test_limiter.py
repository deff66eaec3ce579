"""The limiter keeps order and width when waiting calls are cancelled or fail."""

import asyncio

from flyer.kube.apiserver import Limiter


async def ride(turns, log, name, leave):
    async with turns:
        log.append(name)
        await leave.wait()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_concurrency_is_reduced_during_priority_calls():
    limiter, log, leave = Limiter(3, 1), [], asyncio.Event()
    with limiter.reduced():
        tasks = [asyncio.create_task(ride(limiter, log, n, leave)) for n in range(5)]
        await settle()
        assert log == [0]
    await settle()
    assert log == [0, 1, 2]
    leave.set()
    await asyncio.gather(*tasks)
    assert log == [0, 1, 2, 3, 4]


async def test_earlier_calls_finish_when_the_limiter_is_reduced():
    limiter, log, leave = Limiter(2, 1), [], asyncio.Event()
    tasks = [asyncio.create_task(ride(limiter, log, n, leave)) for n in range(3)]
    await settle()
    with limiter.reduced():
        assert log == [0, 1]
        leave.set()
        await asyncio.gather(*tasks)
    assert log == [0, 1, 2]


async def test_priority_calls_precede_all_waiting_ones():
    limiter, log, leave = Limiter(1, 1), [], asyncio.Event()
    tasks = [asyncio.create_task(ride(limiter, log, n, leave)) for n in range(3)]
    tasks += [asyncio.create_task(ride(limiter.priority, log, n, leave)) for n in "ab"]
    await settle()
    assert log == [0]  # no running call is cancelled for it
    leave.set()
    await asyncio.gather(*tasks)
    assert log == [0, "a", "b", 1, 2]


async def test_the_slot_of_a_cancelled_waiter_is_given_to_the_next():
    limiter, log, leave = Limiter(1, 1), [], asyncio.Event()
    tasks = [asyncio.create_task(ride(limiter, log, n, leave)) for n in range(4)]
    await settle()
    tasks[1].cancel()  # while it waits
    leave.set()
    await tasks[0]  # the third gets the turn and is cancelled at that moment
    tasks[2].cancel()
    async with asyncio.timeout(60):
        await tasks[3]
    assert log[0] == 0
    assert log[-1] == 3
