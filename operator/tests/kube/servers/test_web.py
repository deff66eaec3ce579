"""The bounded HTTP server: timeouts, sizes, limits, fairness."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from flyer.kube.servers.connection_limits import ConnectionLimitSettings
from flyer.kube.servers.fair_semaphore import FairSemaphore
from flyer.kube.servers.web import WebServer, WebSettings, read_body, slot_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

LIMITS = WebSettings(
    limits=ConnectionLimitSettings(total_max=8, source_max=6, rate_per_second=1000.0, burst=1000),
    head_seconds=60.0,
    answer_seconds=60.0,
)
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Door:
    def __init__(self, limits: WebSettings) -> None:
        self.refusals = 0
        self.server = WebServer(self._handle, limits, refused=self._refused)
        self.server.open("127.0.0.1", 0)
        self.running = asyncio.create_task(self.server.run())

    def _refused(self) -> None:
        self.refusals += 1

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await read_body(request, 1000)
        return web.Response(text=f"{len(body)} bytes from {slot_of(request).source}")

    async def connect(self, address: str = "127.0.0.1") -> Connection:
        return await asyncio.open_connection("127.0.0.1", self.server.port, local_addr=(address, 0))

    async def ask(self, address: str = "127.0.0.1", body: bytes = b"hello") -> bytes:
        """The whole response; empty if the connection was refused."""
        head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        reader, writer = await self.connect(address)
        try:
            writer.write(head % len(body) + body)
            async with asyncio.timeout(60):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()


@pytest.fixture
async def make_server() -> AsyncIterator[Callable[..., Door]]:
    doors: list[Door] = []

    def make(**changes: float) -> Door:
        doors.append(Door(replace(LIMITS, **changes)))
        return doors[-1]

    yield make
    for server in doors:
        server.running.cancel()
        await asyncio.gather(server.running, return_exceptions=True)


async def ended(connection: Connection) -> bytes:
    """The data received before the server closed the connection."""
    reader, _ = connection
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


async def test_a_request_is_answered(make_server: Callable[..., Door]) -> None:
    answer = await make_server().ask()
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"5 bytes from 127.0.0.1")


@pytest.mark.parametrize("data", [b"", b"POST / HT", b"POST / HTTP/1.1\r\nHost: x\r\n"])
async def test_a_missing_request_head_ends_the_connection(
    data: bytes, make_server: Callable[..., Door]
) -> None:
    connection = await make_server(head_seconds=0.2).connect()
    connection[1].write(data)
    assert b"200" not in await ended(connection)


async def test_a_slow_request_head_ends_the_connection(make_server: Callable[..., Door]) -> None:
    connection = await make_server(head_seconds=0.3).connect()

    async def drip() -> None:
        with contextlib.suppress(OSError):
            connection[1].write(b"POST / HTTP/1.1\r\n")
            while True:
                connection[1].write(b"X: y\r\n")
                await connection[1].drain()
                await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    assert b"200" not in await ended(connection)
    dripping.cancel()


async def test_a_missing_body_is_408(make_server: Callable[..., Door]) -> None:
    connection = await make_server(answer_seconds=0.2).connect()
    connection[1].write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc")
    assert (await ended(connection)).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "data",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001,
    ],
)
async def test_a_large_body_is_413_before_it_is_read(
    data: bytes, make_server: Callable[..., Door]
) -> None:
    connection = await make_server().connect()
    connection[1].write(data)
    assert (await ended(connection)).startswith(b"HTTP/1.1 413")


async def test_silent_connections_of_one_source_do_not_exclude_another(
    make_server: Callable[..., Door],
) -> None:
    server = make_server()
    silent = [await server.connect("127.0.0.9") for _ in range(40)]
    assert (await server.ask("127.0.0.2")).startswith(b"HTTP/1.1 200")
    assert server.refusals >= 34
    for _, writer in silent:
        writer.transport.abort()


async def test_silent_connections_of_many_sources_are_evicted(
    make_server: Callable[..., Door],
) -> None:
    server = make_server()
    silent = [await server.connect(f"127.0.1.{i % 20 + 1}") for i in range(160)]
    assert (await server.ask("127.0.0.2")).startswith(b"HTTP/1.1 200")
    for _, writer in silent:
        writer.transport.abort()


async def test_sources_take_turns() -> None:
    """One request of B waits for one of A, not for all."""
    semaphore, order = FairSemaphore(), []
    gate = asyncio.Event()

    async def work(source: str, first: bool = False) -> None:
        async with semaphore.acquire(source):
            if first:
                await gate.wait()
            order.append(source)

    tasks = [asyncio.create_task(work("a", first=True))]
    tasks += [asyncio.create_task(work("a")) for _ in range(5)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(work("b")))
    await asyncio.sleep(0)
    tasks[2].cancel()  # a cancelled waiter takes no turn
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "a", "b", "a", "a", "a"]


async def test_cheap_requests_are_executed_first() -> None:
    semaphore, order = FairSemaphore(), []

    async def work(source: str, cost: int) -> None:
        async with semaphore.acquire(source, cost):
            order.append((source, cost))

    async with semaphore.acquire("a"):
        requests = [("a", 8), ("b", 8), ("a", 1), ("c", 2), ("b", 1), ("a", 1)]
        tasks = [asyncio.create_task(work(*request)) for request in requests]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == [("a", 1), ("b", 1), ("c", 2), ("a", 1), ("a", 8), ("b", 8)]


async def test_cheap_tasks_of_one_source_do_not_keep_an_expensive_one_waiting() -> None:
    semaphore, order = FairSemaphore(), []

    async def work(source: str, cost: int) -> None:
        async with semaphore.acquire(source, cost):
            order.append(source)
            if source == "flood" and len(order) < 1000:
                tasks.append(asyncio.create_task(work("flood", 1)))  # it keeps sending requests

    tasks = []
    async with semaphore.acquire("flood"):
        tasks += [asyncio.create_task(work("flood", 1)) for _ in range(10)]
        tasks.append(asyncio.create_task(work("other", 4)))
        await asyncio.sleep(0)
    while not all(task.done() for task in tasks):
        await asyncio.gather(*tasks)
    assert order.index("other") <= 4


async def test_a_slot_granted_to_a_cancelled_task_is_given_to_the_next() -> None:
    semaphore = FairSemaphore()
    finished = asyncio.Event()

    async def second() -> None:
        async with semaphore.acquire("b"):
            finished.set()

    async with semaphore.acquire("a"):
        cancelled = asyncio.create_task(semaphore.acquire("a").__aenter__())
        waiting = asyncio.create_task(second())
        await asyncio.sleep(0)
    cancelled.cancel()  # its future is set, it has not run yet
    async with asyncio.timeout(60):
        await finished.wait()
    await asyncio.gather(waiting, cancelled, return_exceptions=True)
