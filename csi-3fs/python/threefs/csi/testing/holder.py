"""A mount table in memory with the holder's answers."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from threefs.csi.errors import AlreadyExists, CsiError, FailedPrecondition
from threefs.csi.holder_client import MountedAt, Served, Undone

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MemoryHolder"]


class MemoryHolder:
    """Stands in for the holder; thread-safe.

    `fail` is raised by every call while it is set; without `clean` mounts are torn down, and
    `unwritten` says why what was written is lost.
    """

    def __init__(self) -> None:
        self.fail: CsiError | None = None
        self.clean = True
        self.unwritten = ""
        self.states: dict[str, str] = {}
        self.claimed_for: dict[str, str] = {}
        self._lock = threading.Lock()
        self._mounts: dict[str, MountedAt] = {}
        self._held: dict[str, str] = {}
        self._devices = 40

    def mount(
        self, volume: str, cluster: str, root: str, target: str, *, read_only: bool, node: str = ""
    ) -> None:
        """See `Holder`."""
        with self._enter():
            self.claimed_for[target] = node
            if (known := self._mounts.get(target)) is not None:
                if (known.volume, known.read_only) != (volume, read_only):
                    raise AlreadyExists(f"`{target}` is mounted already: `{known.volume}`")
                return
            self._devices += 1
            device = f"0:{self._devices}"
            self._mounts[target] = MountedAt(volume, target, device, read_only)
            self._held[device] = f"{cluster}:{root}"

    def bind(self, source: str, target: str, *, read_only: bool, flags: Sequence[str]) -> None:
        """See `Holder`."""
        with self._enter():
            there = self._mounts.get(source)
            if there is None:
                raise AlreadyExists(f"nothing of 3FS is mounted at `{source}`")
            wanted = MountedAt(there.volume, target, there.device, read_only or there.read_only)
            if self._mounts.setdefault(target, wanted) != wanted:
                raise AlreadyExists(f"`{target}` is mounted already ({', '.join(flags)})")

    def unmount(self, target: str) -> Undone:
        """See `Holder`."""
        with self._enter():
            there = self._mounts.get(target)
            if there is None:
                return Undone(None, clean=True)
            others = [one for one in self._mounts.values() if one.device == there.device]
            first = next(one.target for one in others)
            if first == target and len(others) > 1:
                raise FailedPrecondition(f"`{there.volume}` is still mounted elsewhere")
            del self._mounts[target]
            if len(others) == 1:
                self._held.pop(there.device, None)
            return Undone(there.volume, self.clean, self.unwritten)

    def state(self) -> tuple[list[MountedAt], list[Served]]:
        """See `Holder`."""
        with self._enter():
            table = list(self._mounts.values())
            held = []
            for device in self._held:
                first = next(one for one in table if one.device == device)
                state = self.states.get(first.volume, "serving")
                served = Served(first.volume, first.target, device, state, 1, 0, time.time(), "")
                held.append(served)
            return table, held

    def roots(self) -> list[str]:
        """CLUSTER:PATH of each mount, sorted."""
        with self._lock:
            return sorted(self._held.values())

    def die(self) -> None:
        """As when the holder was killed: the mounts are there, nobody holds them."""
        with self._lock:
            self._held.clear()

    def _enter(self) -> threading.Lock:
        if self.fail is not None:
            raise self.fail
        return self._lock
