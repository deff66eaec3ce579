"""Dependencies of the scheduler as protocols, so that tests can replace each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from flyer.api import FlyerJob
    from flyer.engine import Event, Outcome, Signal, Start
    from flyer.kube.gateway import Heartbeat
    from flyer.kube.gateway.identities import PodIdentity
    from flyer.kube.pods import PodSettings

__all__ = ["Dependencies", "Gateway", "Probe"]


class Gateway(Protocol):
    """The part of `flyer.kube.gateway.Gateway` that the scheduler uses; see there."""

    async def serve(self) -> None:
        """Listen and serve until cancelled."""
        ...

    def expect(self, job: FlyerJob, start: Start, pods: Sequence[PodIdentity]) -> None:
        """Accept the sidecars of these pods, which are this attempt."""
        ...

    def locate(self, uid: str, ip: str) -> None:
        """Report a pod's address."""
        ...

    def signal(self, signal: Signal) -> None:
        """Ask the job to checkpoint and release its nodes."""
        ...

    def kill(self, job: str, attempt: int, uid: str) -> set[str]:
        """Kill the attempt's ranks through their launchers. Returns uids of pods that then end."""
        ...

    def absent(self, job: str) -> list[str]:
        """Names of the pods that the start of the job's attempt is waiting for."""
        ...

    def republish_streams(self, job: str) -> None:
        """Report again facts that no status stores, after a rebuild of the engine's state."""
        ...

    async def conclude(self, uid: str, status: Outcome) -> Outcome:
        """Report PodExited for a pod that has ended."""
        ...

    def stored(self, events: Iterable[Event]) -> None:
        """The effects of these events are stored: the pods' reports may be acknowledged."""
        ...

    def forget(self, job: str, attempt: int, uid: str) -> None:
        """The attempts up to this one are over."""
        ...

    def heartbeats(self) -> dict[str, Heartbeat]:
        """The latest heartbeat of each node on which pods run."""
        ...


class Probe(Protocol):
    """Whether the node at this address and port answers; None: unknown. Blocks."""

    def __call__(self, address: str, port: int, /) -> bool | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Factories and functions that a leader term is given."""

    pod_settings: Callable[[], PodSettings]
    outcome_of: Callable[[Mapping[str, Any] | None], Outcome]
    make_gateway: Callable[[Callable[[Event], None]], Gateway]
    probe: Probe
