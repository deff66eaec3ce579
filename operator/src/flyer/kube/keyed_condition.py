"""Condition variables by key, for one event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KeyedCondition"]


class KeyedCondition:
    """Waits for predicates by key.

    A predicate is evaluated at once and after each notification of its key.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def notify(self, key: str) -> None:
        """Evaluate the predicates that wait for this key."""
        for future in self._waiting.pop(key, ()):
            if not future.done():
                future.set_result(None)

    async def until(
        self, key: str, condition: Callable[[], bool], seconds: float | None = None
    ) -> bool:
        """Wait until the condition holds, for at most `seconds`. Returns whether it holds."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    await self._change(key)
        except TimeoutError:
            return condition()
        return True

    async def _change(self, key: str) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(future)
        try:
            await future
        finally:
            if (waiting := self._waiting.get(key)) is not None:
                waiting.discard(future)
                if not waiting:
                    del self._waiting[key]
