"""What the scheduler needs from its neighbours, so that each can be tested without the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flyer.kube.services.probes import answers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from flyer.api import FlyerJob
    from flyer.engine import Event, Outcome, Signal, Start
    from flyer.kube.gateway import Heard
    from flyer.kube.gateway.identities import PodIdentity
    from flyer.kube.pods import PlacedNode

__all__ = ["Gateway", "Probe", "Seams"]


class Gateway(Protocol):
    """The part of `flyer.kube.gateway.Gateway` that the scheduler uses; see there."""

    async def serve(self) -> None:
        """Listen and serve until cancelled."""
        ...

    def expect(self, job: FlyerJob, start: Start, pods: Sequence[PodIdentity]) -> None:
        """These pods are this attempt."""
        ...

    def locate(self, uid: str, ip: str) -> None:
        """Where a pod is."""
        ...

    def signal(self, signal: Signal) -> None:
        """Ask the job to save and release."""
        ...

    def kill(self, job: str, attempt: int) -> set[str]:
        """End the attempt's ranks from inside; uids of the pods that then end by themselves."""
        ...

    def absent(self, job: str) -> list[str]:
        """Names of pods that the start of the job's attempt still waits for."""
        ...

    def restate(self, job: str) -> None:
        """Report again what no status stores: the engine was rebuilt."""
        ...

    async def conclude(self, uid: str, status: Outcome) -> Outcome:
        """A pod has ended: tells PodExited."""
        ...

    def stored(self, events: Iterable[Event]) -> None:
        """What follows from these events is stored: what pods reported may be acknowledged."""
        ...

    def forget(self, job: str, attempt: int) -> None:
        """The attempt is over."""
        ...

    def heard(self) -> dict[str, Heard]:
        """What is heard of each node where something runs."""
        ...


class Probe(Protocol):
    """Whether the machine at this address and port answers; None: that is not known. Blocks."""

    def __call__(self, address: str, port: int, /) -> bool | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Seams:
    """How pods are made and read, and how a gateway is made for a leader's term."""

    build_pods: Callable[[FlyerJob, Start, Mapping[str, PlacedNode]], list[dict[str, Any]]]
    outcome_of: Callable[[Mapping[str, Any] | None], Outcome]
    make_gateway: Callable[[Callable[[Event], None]], Gateway]
    probe: Probe = answers
