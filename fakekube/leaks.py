"""What a test's world must give back: tasks of its event loop, and files of its process."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["nothing_left"]

FILES = Path("/proc/self/fd")
CLOSING_SECONDS = 20.0
"""A transport that is closed gives its socket back some turns of the loop later."""


@contextlib.asynccontextmanager
async def nothing_left(closing_seconds: float = CLOSING_SECONDS) -> AsyncIterator[None]:
    """Fails if a task or an open file outlives the body.

    A body that fails is not asked: it may have been cut off before it could clean up.
    """
    tasks, files = asyncio.all_tasks(), _files()
    yield
    try:
        async with asyncio.timeout(closing_seconds):
            while _left(tasks, files):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"left behind: {_left(tasks, files)}") from None


def _left(tasks: set[asyncio.Task[object]], files: dict[str, str]) -> list[str]:
    running = asyncio.all_tasks() - tasks - {asyncio.current_task()}
    opened = set(_files().items()) - set(files.items())
    return [repr(task) for task in running] + [f"{number}: {what}" for number, what in opened]


def _files() -> dict[str, str]:
    """Numbers, and what is open under them."""
    found: dict[str, str] = {}
    for path in FILES.iterdir():
        if int(path.name) <= 2:
            continue  # pytest puts other files there
        with contextlib.suppress(OSError):  # the one that lists them
            found[path.name] = str(path.readlink())
    return found
