"""Clients that attack every port, from eight addresses, until the process is killed.

    python -m bench.hostile.flood '{"silent": {"9000": 160}, "posts": [[9443, "/inject", true]]}'

Prints its counters as JSON once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import sys
import time
from collections import Counter
from typing import Any, Final

SOURCES: Final = 8
BODY: Final = b"[" + b"[]," * (8 * 1024 * 1024 // 3) + b"[]]"
POSTS_PER_SECOND: Final = 50
POSTS_MAX: Final = 60
CHUNK_BYTES: Final = 256 << 10
REOPEN_SECONDS: Final = 0.05

Done = Counter[str]


async def silent(port: int, number: int, counts: Done) -> None:
    """Keep one connection that sends nothing; open a new one where it is closed."""
    while True:
        address = f"127.0.0.{number % SOURCES + 2}"
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(address, 0)
            )
            counts["connections"] += 1
            with contextlib.suppress(OSError):
                await reader.read()
            writer.transport.abort()
        await asyncio.sleep(REOPEN_SECONDS)


async def post(port: int, path: str, tls: ssl.SSLContext | None, number: int, counts: Done) -> None:
    """One body of 8 MiB of JSON arrays."""
    address = f"127.0.0.{number % SOURCES + 2}"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=tls, local_addr=(address, 0)
        )
        try:
            writer.write(head)
            for start in range(0, len(BODY), CHUNK_BYTES):
                if writer.is_closing():
                    break
                writer.write(BODY[start : start + CHUNK_BYTES])
                await writer.drain()
                counts["posted KiB"] += CHUNK_BYTES >> 10
            await reader.readline()
        finally:
            writer.transport.abort()
    counts["posts"] += 1


async def posts(port: int, path: str, tls: ssl.SSLContext | None, counts: Done) -> None:
    """Send 50 posts a second, limited by the number of concurrent requests."""
    running: set[asyncio.Task[None]] = set()
    number = 0
    while True:
        if len(running) < POSTS_MAX:
            number += 1
            task = asyncio.create_task(post(port, path, tls, number, counts))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.sleep(1 / POSTS_PER_SECOND)


async def report(counts: Done) -> None:
    """The counters, once a second."""
    started = time.monotonic()
    while True:
        await asyncio.sleep(1)
        seconds = round(time.monotonic() - started, 1)
        print(json.dumps({**counts, "seconds": seconds}), flush=True)


async def main(plan: dict[str, Any]) -> None:
    """All attacks concurrently."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    counts: Done = Counter()
    await asyncio.gather(
        report(counts),
        *(
            silent(int(port), number, counts)
            for port, count in plan["silent"].items()
            for number in range(count)
        ),
        *(posts(port, path, context if tls else None, counts) for port, path, tls in plan["posts"]),
    )


if __name__ == "__main__":
    # asyncio logs a warning for every refused post.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(json.loads(sys.argv[1])))
