"""The leak check detects tasks and files that outlive a test."""

import asyncio
import socket

import pytest

from fakekube.leaks import nothing_left


async def test_a_leaked_task_is_named():
    leaving = nothing_left(closing_seconds=0.02)
    await leaving.__aenter__()
    task = asyncio.create_task(asyncio.sleep(60), name="forgotten")
    with pytest.raises(AssertionError, match=r"left behind.*name='forgotten'"):
        await leaving.__aexit__(None, None, None)
    task.cancel()


async def test_an_open_socket_is_named():
    with pytest.raises(AssertionError, match=r"left behind.*socket:"):
        async with nothing_left(closing_seconds=0.02):
            connection = socket.socket()
    connection.close()


async def test_the_check_waits_for_transports_that_are_closing():
    async with nothing_left():
        ends = asyncio.get_running_loop().create_task(asyncio.sleep(0.02))
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        writer.close()
        server.close()
    assert ends.done()


async def test_earlier_tasks_and_files_are_ignored():
    with socket.socket():
        task = asyncio.create_task(asyncio.sleep(60))
        async with nothing_left(closing_seconds=0.02):
            pass
        task.cancel()
