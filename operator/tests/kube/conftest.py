"""A cluster in memory, and patience."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from flyer.kube.client import Access, Api, Limits
from flyer.kube.testing import ApiServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@pytest.fixture
async def api_server() -> AsyncIterator[ApiServer]:
    async with ApiServer(bookmark_seconds=0.1) as server:
        yield server


@pytest.fixture
async def connect(api_server: ApiServer) -> AsyncIterator[Callable[..., Api]]:
    """`connect(agent, **limits)`: a client of its own."""
    opened: list[Api] = []

    def make(agent: str = "test", **limits: float) -> Api:
        api = Api(Access(api_server.url), agent=agent, limits=Limits(**limits))
        opened.append(api)
        return api

    yield make
    for api in opened:
        await api.close()


@pytest.fixture
def until() -> Callable[..., object]:
    """Wait until something holds; a loaded machine may take a minute."""

    async def wait(holds: Callable[[], object], seconds: float = 60.0) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not holds():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"did not come to be within {seconds:g} s") from None

    return wait
