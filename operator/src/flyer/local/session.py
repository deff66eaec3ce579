"""Driver session: lock the state directory, kill orphans, serve clients, drive, clean up."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

from flyer.local.control import ControlServer
from flyer.local.driver import Driver
from flyer.local.operations import Operations
from flyer.local.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from flyer.local.cluster import LocalCluster

__all__ = ["drive"]


def drive(
    cluster: LocalCluster,
    root: Path,
    *,
    preload: Sequence[str] = (),
    keep: bool = False,
    check: Callable[[Driver], None] = lambda _driver: None,
    opened: Callable[[Driver], None] = lambda _driver: None,
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Drive the cluster of a state directory until every job has ended.

    `check` is called before anything runs (its errors end the session with nothing started),
    `opened` when the stored jobs have resumed (to submit the first ones), `ready` once clients can
    connect. Returns the number of the signal that ended it, or 0. Raises FlyerError when another
    driver holds the state directory. Call it from the main thread: it handles SIGINT, SIGTERM and
    SIGHUP.
    """
    store = Store.open(root)
    try:
        return asyncio.run(_session(cluster, store, preload, check, opened, ready, keep=keep))
    finally:
        store.close()


async def _session(
    cluster: LocalCluster,
    store: Store,
    preload: Sequence[str],
    check: Callable[[Driver], None],
    opened: Callable[[Driver], None],
    ready: Callable[[], None],
    *,
    keep: bool,
) -> int:
    driver = Driver(cluster, store, preload=preload, keep=keep)
    received = 0

    def on_signal(number: int) -> None:
        nonlocal received
        received = received or number
        driver.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    server = ControlServer(store.paths.control, Operations(driver))
    try:
        driver.take_over()
        check(driver)
        driver.open()
        opened(driver)
        await server.start()
        ready()
        await driver.run()
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await driver.close()
        await server.close()
    return received
