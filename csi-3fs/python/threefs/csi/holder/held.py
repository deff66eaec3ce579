"""What this holder has: its mounts by their place, and where a call is under way.

One call at a time for a place, and none at all while another holder takes over.
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

__all__ = ["MOUNT_SECONDS", "READY_SECONDS", "Held", "Table"]

READY_SECONDS = 15.0
"""How long `mount` waits for the daemon; shorter than the callers' own deadlines."""
MOUNT_SECONDS = 3.0
LOCK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Held:
    """A mount whose descriptor is here."""

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
    def is_written_behind(self) -> bool:
        """Whether the kernel may have data that is not in 3FS yet: nobody else has the files."""
        return bool(self.node) and not self.read_only


class Table:
    """All mounts of one holder; thread-safe."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Held, Daemon]] = {}
        self._busy: set[str] = set()
        self._changed = threading.Condition()
        self._leaving = False

    def get(self, target: str) -> tuple[Held, Daemon] | None:
        """What is held there."""
        with self._changed:
            return self._held.get(target)

    def put(self, held: Held, daemon: Daemon) -> None:
        """It is held from now on."""
        with self._changed:
            self._held[held.target] = (held, daemon)

    def drop(self, target: str) -> None:
        """It is not held any more."""
        with self._changed:
            self._held.pop(target, None)

    def drop_all(self) -> list[Held]:
        """Nothing is held any more; what was."""
        with self._changed:
            known, self._held = list(self._held.values()), {}
        return [held for held, _ in known]

    def all(self) -> list[tuple[Held, Daemon]]:
        """What is held now."""
        with self._changed:
            return list(self._held.values())

    def has_device(self, device: str) -> bool:
        """Whether a mount of this device is held, at whatever place."""
        return any(held.device == device for held, _ in self.all())

    @property
    def leaving(self) -> bool:
        """Whether the mounts were given to another holder, or are about to be."""
        return self._leaving

    def leave(self) -> None:
        """Refuse calls from now on, after those that are under way have ended."""
        with self._changed:
            self._leaving = True
            if not self._changed.wait_for(lambda: not self._busy, MOUNT_SECONDS + READY_SECONDS):
                self._leaving = False
                raise Refused("again", f"calls are under way for {', '.join(sorted(self._busy))}")

    def leave_at_once(self) -> None:
        """Refuse calls from now on."""
        with self._changed:
            self._leaving = True

    def stay(self) -> None:
        """Take calls again."""
        self._leaving = False

    @contextlib.contextmanager
    def only(self, target: str) -> Iterator[None]:
        """One call at a time for a place; none while another holder takes over."""
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._leaving or target not in self._busy, LOCK_SECONDS
            )
            if self._leaving:
                raise Refused("again", "another holder takes over; ask again")
            if not free:
                raise Refused("again", f"another call for `{target}` is under way")
            self._busy.add(target)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(target)
                self._changed.notify_all()
