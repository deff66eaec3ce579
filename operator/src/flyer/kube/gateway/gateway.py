"""The gateway: every running gang's sidecars on one side, the engine on the other.

Owns the start barrier, the start order, signals and what comes back. A sidecar is known by its
token's review alone; what it says about its own job, attempt or rank is never read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flyer.api import FlyerJob
    from flyer.engine import Event, Outcome, Signal, Start
    from flyer.kube.gateway.certificates import Certificates
    from flyer.kube.gateway.identities import Identities, PodIdentity
    from flyer.kube.gateway.settings import GatewaySettings

__all__ = ["Gateway"]


class Gateway:
    """Serves until cancelled. All methods are called in the event loop that serves."""

    def __init__(
        self,
        *,
        tell: Callable[[Event], None],
        identities: Identities,
        settings: GatewaySettings,
    ) -> None:
        self._tell = tell
        self._identities = identities
        self._settings = settings

    def use(self, certificates: Certificates) -> None:
        """Serve with these from the next connection on; before `serve` at the latest."""
        raise NotImplementedError

    async def serve(self) -> None:
        """Listen and serve; returns only by being cancelled."""
        raise NotImplementedError

    def expect(self, job: FlyerJob, start: Start, pods: Sequence[PodIdentity]) -> None:
        """These pods, in rank order, are this attempt: let their sidecars in.

        Called when the pods were created, and again by a new leader for every gang that is alive.
        The same attempt again is no news; a later one replaces it. GangStarted follows, once; what
        the gang says becomes events.
        """
        raise NotImplementedError

    def locate(self, uid: str, ip: str) -> None:
        """The pods cache saw where a pod is. Repeating it is harmless; unknown pods are ignored.

        The start order waits for the address of every pod of the gang.
        """
        raise NotImplementedError

    def signal(self, signal: Signal) -> None:
        """Ask the job to save and release: in milliseconds where its sidecars are connected."""
        raise NotImplementedError

    async def conclude(self, uid: str, status: Outcome) -> Outcome:
        """A pod has ended (phase Succeeded or Failed, or gone): tell PodExited, exactly once.

        `status` is what the pod's status says (`outcome_of`), which counts only when the sidecar
        said nothing. Returns what counted. Tell NodeEmptied after this has returned; it takes at
        most `account_seconds` + `peer_lost_seconds`.
        """
        raise NotImplementedError

    def forget(self, job: str, attempt: int) -> None:
        """The attempt is over: its sidecars are sent away, and no event of it is told any more."""
        raise NotImplementedError
