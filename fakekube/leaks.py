"""Leak check: tasks and open files that outlive a test."""

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
"""A closed transport closes its socket some iterations of the loop later."""


@contextlib.asynccontextmanager
async def nothing_left(closing_seconds: float = CLOSING_SECONDS) -> AsyncIterator[None]:
    """Fails if a task or an open file outlives the body.

    A failing body is not checked: it may have been interrupted before its cleanup.
    """
    tasks, files = asyncio.all_tasks(), _files()
    yield
    try:
        async with asyncio.timeout(closing_seconds):
            while _leaks(tasks, files):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"left behind: {_leaks(tasks, files)}") from None


def _leaks(tasks: set[asyncio.Task[object]], files: dict[str, str]) -> list[str]:
    running = asyncio.all_tasks() - tasks - {asyncio.current_task()}
    opened = set(_files().items()) - set(files.items())
    return [repr(task) for task in running] + [f"{number}: {target}" for number, target in opened]


def _files() -> dict[str, str]:
    """Open file descriptors and their targets."""
    targets: dict[str, str] = {}
    for path in FILES.iterdir():
        if int(path.name) <= 2:
            continue  # pytest replaces these
        with contextlib.suppress(OSError):  # the descriptor that lists them
            targets[path.name] = str(path.readlink())
    return targets
