"""Claims in 3FS: the node that may use a volume restricted to one node at a time.

The FUSE daemon renews its node's claim, and serves requests only while its last renewal is younger
than `threefs.daemon.CLAIM_SECONDS`; no service starts its requests after that either. A node that
takes over the claim of a dead node must have observed it unchanged for `WATCH_SECONDS` by its own
clock, which is longer, so that the former node cannot change anything any more. Clocks of different
nodes are never compared. (A clock that stops while this node is suspended only extends the wait.)
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

    from threefs.csi.volumes.volume_id import VolumeId

__all__ = ["WATCH_SECONDS", "ClaimStore", "NodeClaims"]

WATCH_SECONDS = CLAIM_SECONDS + 10.0


class ClaimStore(Protocol):
    """The operations of 3FS that claims use."""

    def claim(
        self, path: str, holder: str, stood_still: tuple[str, int] | None = None
    ) -> tuple[str, int]:
        """Acquire or renew the claim on a directory; return the resulting claim."""

    def claim_of(self, path: str) -> tuple[str, int] | None:
        """Return the claim on a directory."""

    def unclaim(self, path: str, holder: str) -> None:
        """Release a claim."""


class NodeClaims:
    """The claims of one node; thread-safe."""

    def __init__(
        self,
        node_id: str,
        clock: Callable[[], float] = time.monotonic,
        watch_seconds: float = WATCH_SECONDS,
    ) -> None:
        self.node_id = node_id
        self._clock = clock
        self._watch_seconds = watch_seconds
        self._observed: dict[str, tuple[tuple[str, int], float]] = {}
        self._expiring: dict[str, float] = {}
        self._lock = threading.Lock()

    def acquire(self, volume: VolumeId, files: ClaimStore) -> None:
        """Claim a volume for this node; an error names the node that has it."""
        name = str(volume)
        stood_still = self._stood_still(name, self._clock())
        claim = files.claim(volume.path, self.node_id, stood_still)
        # Observed now at the latest: it may have been renewed before the reply.
        now = self._clock()
        with self._lock:
            if claim[0] == self.node_id:
                self._observed.pop(name, None)
                return
            before, since = self._observed.get(name, (claim, now))
            since = since if before == claim else now
            self._observed[name] = (claim, since)
        remaining = max(0.0, self._watch_seconds - (now - since))
        raise FailedPrecondition(
            f"volume `{name}` is restricted to one node at a time and node `{claim[0]}` uses it; "
            f"delete its pods there. If that node is dead, its claim expires in {remaining:.0f} s"
        )

    def let_expire(self, volume: str) -> None:
        """Leave the claim to expire, because requests made under it may still be in progress."""
        with self._lock:
            self._expiring[volume] = self._clock()

    def release(self, volume: VolumeId, files: ClaimStore) -> bool:
        """Release this node's claim. If 3FS does not answer, it expires.

        Return False if it is left to expire, because requests may still be in progress.
        """
        with self._lock:
            self._observed.pop(str(volume), None)
            since = self._expiring.get(str(volume))
            if since is not None and self._clock() - since < CLAIM_SECONDS:
                return False
            self._expiring.pop(str(volume), None)
        with suppress(ThreeFSError, OSError):
            files.unclaim(volume.path, self.node_id)
        return True

    def holder(self, volume: VolumeId, files: ClaimStore) -> str:
        """Return the node that has the volume's claim; empty if none has."""
        with suppress(NotFound):
            claim = files.claim_of(volume.path)
            return claim[0] if claim is not None else ""
        return ""

    def _stood_still(self, name: str, now: float) -> tuple[str, int] | None:
        with self._lock:
            observed = self._observed.get(name)
        return (
            observed[0]
            if observed is not None and now - observed[1] >= self._watch_seconds
            else None
        )
