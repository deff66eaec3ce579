"""A mount table in memory with the mount manager's replies."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from threefs.csi.errors import AlreadyExists, CsiError, FailedPrecondition
from threefs.csi.mount_manager_client import MountPoint, MountStatus, UnmountResult

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MemoryMountManager"]


class MemoryMountManager:
    """In-memory mount manager; thread-safe.

    `fail` is raised by every call while it is set; without `clean` mounts are torn down, and
    `data_lost` is the reason why written data is lost.
    """

    def __init__(self) -> None:
        self.fail: CsiError | None = None
        self.clean = True
        self.data_lost = ""
        self.states: dict[str, str] = {}
        self.reads: dict[str, list[int]] = {}
        self.claimed_for: dict[str, str] = {}
        self._lock = threading.Lock()
        self._mounts: dict[str, MountPoint] = {}
        self._managed: dict[str, str] = {}
        self._devices = 40

    def mount(
        self, volume: str, cluster: str, root: str, target: str, *, read_only: bool, node: str = ""
    ) -> None:
        """See `MountManager`."""
        with self._begin_call():
            self.claimed_for[target] = node
            if (existing := self._mounts.get(target)) is not None:
                if (existing.volume, existing.read_only) != (volume, read_only):
                    raise AlreadyExists(f"`{target}` is already mounted: `{existing.volume}`")
                return
            self._devices += 1
            device = f"0:{self._devices}"
            self._mounts[target] = MountPoint(volume, target, device, read_only)
            self._managed[device] = f"{cluster}:{root}"

    def bind(self, source: str, target: str, *, read_only: bool, flags: Sequence[str]) -> None:
        """See `MountManager`."""
        with self._begin_call():
            existing = self._mounts.get(source)
            if existing is None:
                raise AlreadyExists(f"no 3FS volume is mounted at `{source}`")
            mount = MountPoint(
                existing.volume, target, existing.device, read_only or existing.read_only
            )
            if self._mounts.setdefault(target, mount) != mount:
                raise AlreadyExists(f"`{target}` is already mounted ({', '.join(flags)})")

    def unmount(self, target: str) -> UnmountResult:
        """See `MountManager`."""
        with self._begin_call():
            mount_point = self._mounts.get(target)
            if mount_point is None:
                return UnmountResult(None, clean=True)
            same_device = [
                mount for mount in self._mounts.values() if mount.device == mount_point.device
            ]
            first = next(other.target for other in same_device)
            if first == target and len(same_device) > 1:
                raise FailedPrecondition(f"`{mount_point.volume}` is still mounted elsewhere")
            del self._mounts[target]
            if len(same_device) == 1:
                self._managed.pop(mount_point.device, None)
            return UnmountResult(mount_point.volume, self.clean, self.data_lost)

    def read_bytes(self) -> dict[str, list[int]]:
        """See `MountManager`."""
        with self._begin_call():
            return dict(self.reads)

    def state(self) -> tuple[list[MountPoint], list[MountStatus]]:
        """See `MountManager`."""
        with self._begin_call():
            table = list(self._mounts.values())
            mounts = []
            for device in self._managed:
                first = next(mount for mount in table if mount.device == device)
                state = self.states.get(first.volume, "serving")
                served = MountStatus(
                    first.volume, first.target, device, state, 1, 0, time.time(), ""
                )
                mounts.append(served)
            return table, mounts

    def roots(self) -> list[str]:
        """CLUSTER:PATH of each mount, sorted."""
        with self._lock:
            return sorted(self._managed.values())

    def die(self) -> None:
        """Act as after the death of the manager: mounts exist, but none is managed."""
        with self._lock:
            self._managed.clear()

    def _begin_call(self) -> threading.Lock:
        if self.fail is not None:
            raise self.fail
        return self._lock
