"""Mounts that change their holder: given to the next one, taken from the last, kept by the keeper.

Only descriptors go from process to process; whoever has one serves its mount with a daemon of its
own, started with `--resume`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from . import mountinfo
from .protocol import Refused

if TYPE_CHECKING:
    from .daemons import Daemons
    from .held import Held, Table
    from .keeper import KeeperClient
    from .undoing import Undoing

__all__ = ["Handover"]


class Handover:
    """Gives and takes all mounts of one holder; thread-safe."""

    def __init__(
        self, table: Table, daemons: Daemons, keeper: KeeperClient, undoing: Undoing
    ) -> None:
        self._table = table
        self._daemons = daemons
        self._keeper = keeper
        self._undoing = undoing

    def give_up(self) -> list[Held]:
        """Stop all daemons and refuse calls from now on: another holder takes the mounts."""
        self._table.leave()
        known = self._table.all()
        _together([daemon.stop for _, daemon in known])
        return [held for held, _ in known]

    def gone(self) -> None:
        """The other holder has them: this one keeps nothing."""
        for held in self._table.drop_all():
            self._undoing.stop_writing(held.target)
            os.close(held.descriptor)

    def take_back(self) -> None:
        """The other holder did not take them after all."""
        # First: a call in between would take these mounts for those of a holder that has died.
        self.adopt([held for held, _ in self._table.all()])
        self._table.stay()

    def adopt(self, given: list[Held]) -> None:
        """Serve mounts whose descriptors came from another holder."""
        for held in given:
            daemon = self._daemons.of(held)
            self._table.put(held, daemon)
            daemon.start(resume=True)

    def remind(self) -> None:
        """Make what is kept what is held: the keeper may have begun anew, or missed calls.

        Tickets, too, stay readable: a node service of the version before renews them for root.
        """
        for held, _ in self._table.all():
            with contextlib.suppress(OSError):
                self._daemons.open_to_daemon(held)
        self._daemons.sweep_groups(lambda: [held for held, _ in self._table.all()])
        kept = self._keeper.known()
        if kept is None:
            return
        targets = [held.target for held, _ in self._table.all()]
        for target in {*targets, *kept}:
            # A call for it is under way, or another holder has it: the next time, or never.
            with contextlib.suppress(Refused), self._table.only(target):
                known = self._table.get(target)
                if known is None:
                    self._left_behind(target, kept.get(target, ""))
                elif known[0].device != kept.get(target):
                    self._keeper.keep(known[0])

    def _left_behind(self, target: str, device: str) -> None:
        """Drop what was undone; take what is still there and was not had from the keeper before.

        Of that nobody else has a descriptor.
        """
        if not any((it.target, it.device) == (target, device) for it in mountinfo.read()):
            self._keeper.drop(target)
            return
        for held in self._keeper.kept():
            if (held.target, held.device) == (target, device):
                self.adopt([held])
            else:
                os.close(held.descriptor)

    def stop(self) -> None:
        """End all daemons: this process is about to end."""
        self._table.leave_at_once()
        _together([daemon.stop for _, daemon in self._table.all()])


def _together(calls: list[Any]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
