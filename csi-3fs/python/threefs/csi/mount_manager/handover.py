"""Transfer of mounts between mount managers, and recovery from the descriptor store.

Only descriptors are passed between processes. A manager that receives one serves its mount with a
new daemon, started with `--resume`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from . import mountinfo
from .protocol import Refused

if TYPE_CHECKING:
    from .daemon_factory import DaemonFactory
    from .fd_store import FdStoreClient
    from .mount_table import ManagedMount, MountTable
    from .unmount import Unmounter

__all__ = ["Handover"]


class Handover:
    """Hands over and adopts the mounts of one manager; thread-safe."""

    def __init__(
        self,
        table: MountTable,
        daemons: DaemonFactory,
        fd_store: FdStoreClient,
        unmounter: Unmounter,
    ) -> None:
        self._table = table
        self._daemons = daemons
        self._fd_store = fd_store
        self._unmounter = unmounter

    def prepare(self) -> list[ManagedMount]:
        """Refuse calls from now on and stop all daemons, so that another manager can take over."""
        self._table.drain()
        entries = self._table.all()
        _run_all([daemon.stop for _, daemon in entries])
        return [mount for mount, _ in entries]

    def commit(self) -> None:
        """Drop all mounts: the other manager has them."""
        for mount in self._table.clear():
            self._unmounter.cancel_writeback(mount.target)
            os.close(mount.descriptor)

    def rollback(self) -> None:
        """Serve the mounts again: the other manager did not take them."""
        # First: a call in between would see these mounts as orphaned.
        self.adopt([mount for mount, _ in self._table.all()])
        self._table.undrain()

    def adopt(self, mounts: list[ManagedMount]) -> None:
        """Serve mounts whose descriptors another manager passed."""
        for mount in mounts:
            daemon = self._daemons.create(mount)
            self._table.put(mount, daemon)
            daemon.start(resume=True)

    def reconcile(self) -> None:
        """Make the descriptor store match the mount table: it may have restarted or missed calls.

        Tickets stay readable for their daemons, too: a node service of an earlier version renews
        them for root.
        """
        for mount, _ in self._table.all():
            with contextlib.suppress(OSError):
                self._daemons.grant_access(mount)
        self._daemons.sweep_groups(lambda: [mount for mount, _ in self._table.all()])
        stored = self._fd_store.devices()
        if stored is None:
            return
        targets = [mount.target for mount, _ in self._table.all()]
        for target in {*targets, *stored}:
            # A call for it is in progress, or another manager has it: retried next time.
            with contextlib.suppress(Refused), self._table.lock(target):
                entry = self._table.get(target)
                if entry is None:
                    self._reconcile_stored(target, stored.get(target, ""))
                elif entry[0].device != stored.get(target):
                    self._fd_store.put(entry[0])

    def _reconcile_stored(self, target: str, device: str) -> None:
        """Delete a stored descriptor whose mount has ended; adopt one whose mount still exists.

        No other process has a descriptor of such a mount.
        """
        if not any((it.target, it.device) == (target, device) for it in mountinfo.read()):
            self._fd_store.delete(target)
            return
        for mount in self._fd_store.fetch():
            if (mount.target, mount.device) == (target, device):
                self.adopt([mount])
            else:
                os.close(mount.descriptor)

    def stop(self) -> None:
        """Stop all daemons: this process is about to end."""
        self._table.drain_at_once()
        _run_all([daemon.stop for _, daemon in self._table.all()])


def _run_all(calls: list[Any]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
