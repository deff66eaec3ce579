"""Table of the managed mounts by target path, with one lock for each target.

One call at a time runs for a target, and none while another manager takes over.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .protocol import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .daemon import Daemon

__all__ = ["MOUNT_SECONDS", "READY_SECONDS", "ManagedMount", "MountTable"]

READY_SECONDS = 15.0
"""Time for which `mount` waits for the daemon; shorter than the callers' deadlines."""
MOUNT_SECONDS = 3.0
LOCK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ManagedMount:
    """A mount whose descriptor this manager has."""

    volume: str
    cluster: str
    root: str
    target: str
    read_only: bool
    device: str
    descriptor: int
    node: str = ""
    """The node that claims the volume, if only one node may use it at a time."""

    @property
    def is_write_back(self) -> bool:
        """Whether the kernel caches writes, so that dirty data may not be in 3FS yet."""
        return bool(self.node) and not self.read_only


class MountTable:
    """All mounts of one manager; thread-safe."""

    def __init__(self) -> None:
        self._mounts: dict[str, tuple[ManagedMount, Daemon]] = {}
        self._busy: set[str] = set()
        self._changed = threading.Condition()
        self._draining = False

    def get(self, target: str) -> tuple[ManagedMount, Daemon] | None:
        """Return the mount at a target and its daemon."""
        with self._changed:
            return self._mounts.get(target)

    def put(self, mount: ManagedMount, daemon: Daemon) -> None:
        """Add a mount, or replace the one at its target."""
        with self._changed:
            self._mounts[mount.target] = (mount, daemon)

    def delete(self, target: str) -> None:
        """Remove the mount at a target."""
        with self._changed:
            self._mounts.pop(target, None)

    def clear(self) -> list[ManagedMount]:
        """Remove all mounts, and return them."""
        with self._changed:
            entries, self._mounts = list(self._mounts.values()), {}
        return [mount for mount, _ in entries]

    def all(self) -> list[tuple[ManagedMount, Daemon]]:
        """Return all mounts with their daemons."""
        with self._changed:
            return list(self._mounts.values())

    def has_device(self, device: str) -> bool:
        """Whether a mount of this device is managed, at any target."""
        return any(mount.device == device for mount, _ in self.all())

    @property
    def draining(self) -> bool:
        """Whether the mounts were handed over to another manager, or are about to be."""
        return self._draining

    def drain(self) -> None:
        """Refuse calls from now on; returns when calls in progress have ended."""
        with self._changed:
            self._draining = True
            if not self._changed.wait_for(lambda: not self._busy, MOUNT_SECONDS + READY_SECONDS):
                self._draining = False
                busy = ", ".join(sorted(self._busy))
                raise Refused("again", f"calls are in progress for {busy}")

    def drain_at_once(self) -> None:
        """Refuse calls from now on, without waiting."""
        with self._changed:
            self._draining = True

    def undrain(self) -> None:
        """Accept calls again."""
        self._draining = False

    @contextlib.contextmanager
    def lock(self, target: str) -> Iterator[None]:
        """Hold a target for one call; refused while another manager takes over."""
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._draining or target not in self._busy, LOCK_SECONDS
            )
            if self._draining:
                raise Refused("again", "another mount manager takes over; retry")
            if not free:
                raise Refused("again", f"another call for `{target}` is in progress")
            self._busy.add(target)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(target)
                self._changed.notify_all()
