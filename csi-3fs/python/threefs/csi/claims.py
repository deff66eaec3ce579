"""Which node may use a volume that only one node may use: claims in 3FS, taken and given back.

The FUSE daemon renews its node's claim and serves nothing without a renewal that is younger than
`threefs.daemon.CLAIM_SECONDS`; nor does any service begin what it asked for once that has ended. A
node that wants the claim of another, dead one must have watched it stand still for `WATCH_SECONDS`
by its own clock: longer, so that the former node certainly changes nothing any more. No two clocks
are compared. (A clock that stands still while this machine is suspended only makes it wait longer.)
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from threefs.csi.errors import FailedPrecondition
from threefs.daemon import CLAIM_SECONDS
from threefs.errors import NotFound, ThreeFSError

if TYPE_CHECKING:
    from collections.abc import Callable

    from threefs.csi.volume_id import VolumeId

__all__ = ["WATCH_SECONDS", "Claimed", "Claims"]

WATCH_SECONDS = CLAIM_SECONDS + 10.0


class Claimed(Protocol):
    """What claims need of 3FS."""

    def claim(
        self, path: str, holder: str, stood_still: tuple[str, int] | None = None
    ) -> tuple[str, int]:
        """Take or renew the claim on a directory; gives it as it is then."""

    def claim_of(self, path: str) -> tuple[str, int] | None:
        """The claim on a directory."""

    def unclaim(self, path: str, holder: str) -> None:
        """Give a claim back."""


class Claims:
    """The claims of one node; thread-safe."""

    def __init__(self, node_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._node_id = node_id
        self._clock = clock
        self._seen: dict[str, tuple[tuple[str, int], float]] = {}
        self._left: dict[str, float] = {}
        self._lock = threading.Lock()

    def take(self, volume: VolumeId, files: Claimed) -> None:
        """Claim a volume for this node, or refuse and say whose it is."""
        name = str(volume)
        stood_still = self._stood_still(name, self._clock())
        found = files.claim(volume.path, self._node_id, stood_still)
        # When it was certainly seen: before the answer it may have been renewed.
        now = self._clock()
        with self._lock:
            if found[0] == self._node_id:
                self._seen.pop(name, None)
                return
            before, since = self._seen.get(name, (found, now))
            since = since if before == found else now
            self._seen[name] = (found, since)
        left = max(0.0, WATCH_SECONDS - (now - since))
        raise FailedPrecondition(
            f"volume `{name}` is for one node at a time and node `{found[0]}` uses it; end its "
            f"pods there. If that node is gone, its claim is free after {left:.0f} s more"
        )

    def leave(self, volume: str) -> None:
        """Let this node's claim end by itself, because what was asked for under it may not have."""
        with self._lock:
            self._left[volume] = self._clock()

    def give_back(self, volume: VolumeId, files: Claimed) -> bool:
        """End this node's claim. If 3FS does not answer, it ends by itself.

        False if it is left alone, because something may still be under way.
        """
        with self._lock:
            self._seen.pop(str(volume), None)
            left = self._left.get(str(volume))
            if left is not None and self._clock() - left < CLAIM_SECONDS:
                return False
            self._left.pop(str(volume), None)
        with suppress(ThreeFSError, OSError):
            files.unclaim(volume.path, self._node_id)
        return True

    def holder(self, volume: VolumeId, files: Claimed) -> str:
        """The node that has the volume's claim; empty if nobody has."""
        with suppress(NotFound):
            claim = files.claim_of(volume.path)
            return claim[0] if claim is not None else ""
        return ""

    def _stood_still(self, name: str, now: float) -> tuple[str, int] | None:
        with self._lock:
            seen = self._seen.get(name)
        return seen[0] if seen is not None and now - seen[1] >= WATCH_SECONDS else None
