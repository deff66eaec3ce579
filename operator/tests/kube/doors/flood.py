"""`python flood.py SECONDS HTTP_PORT TLS_HTTP_PORT GATEWAY_PORT`: a client that means no good.

Runs in a process of its own: what it costs must not slow the test's API server down. Prints what it
did as JSON.
"""

import asyncio
import contextlib
import json
import ssl
import sys
from collections import Counter

BODY = b"[" + b"[]," * (8 * 1024 * 1024 // 3)
POSTS_PER_SECOND = 50
SILENT = 160


async def silent(port, done):
    """Keep 160 connections that say nothing; open new ones for those that were closed."""

    async def one(number):
        address = f"127.0.{number % 8 + 2}.{number % 20 + 1}"
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(address, 0)
            )
            done["opened"] += 1
            with contextlib.suppress(OSError):
                await reader.read()
            writer.transport.abort()
        await asyncio.sleep(0.05)

    async def again(number):
        while True:
            await one(number)

    await asyncio.gather(*(again(number) for number in range(SILENT)))


async def post(port, path, context, done):
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
    with contextlib.suppress(OSError, ssl.SSLError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            writer.write(head)
            for start in range(0, len(BODY), 256 * 1024):
                writer.write(BODY[start : start + 256 * 1024])
                await writer.drain()
            await reader.readline()
        finally:
            writer.transport.abort()
    done["posts"] += 1


async def posts(port, path, context, done):
    running = set()
    while True:
        if len(running) < 60:
            task = asyncio.create_task(post(port, path, context, done))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.sleep(1 / POSTS_PER_SECOND)


async def main():
    seconds, plain, webhook, gateway = (int(word) for word in sys.argv[1:])
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    done = Counter()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(
                silent(plain, done),
                silent(webhook, done),
                silent(gateway, done),
                posts(webhook, "/inject", context, done),
                posts(plain, "/metrics", None, done),
                posts(gateway, "/", context, done),
            )
    print(json.dumps(done))


asyncio.run(main())
