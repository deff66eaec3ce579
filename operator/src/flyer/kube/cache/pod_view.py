"""The view of a pod of a FlyerJob."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flyer.api import GROUP, KIND_JOB
from flyer.kube.pods.names import pod_place
from flyer.kube.pods.pod_problems import PodProblem, pod_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flyer.engine import Outcome

__all__ = ["PodView", "controller_of", "shape_pods"]


def controller_of(metadata: Mapping[str, Any]) -> dict[str, str] | None:
    """The controller reference of an object, if it names a FlyerJob."""
    for owner_reference in metadata.get("ownerReferences") or ():
        group = str(owner_reference.get("apiVersion", "")).rpartition("/")[0]
        is_flyerjob = (
            owner_reference.get("controller") is True
            and owner_reference.get("kind") == KIND_JOB
            and group == GROUP
        )
        if is_flyerjob and owner_reference.get("name") and owner_reference.get("uid"):
            return {"name": str(owner_reference["name"]), "uid": str(owner_reference["uid"])}
    return None


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod whose controller is a FlyerJob. Its labels are not trusted: any user can write them."""

    namespace: str
    name: str
    uid: str
    owner: str  # uid of the FlyerJob
    job: str  # its key
    attempt: int  # 0: the operator did not create a pod of this name
    rank: int
    node: str  # empty: not bound
    phase: str
    ip: str
    deleting: bool
    outcome: Outcome | None  # in a terminal phase
    problem: PodProblem | None = None  # why the kubelet does not start it

    @property
    def ended(self) -> bool:
        """Whether all its processes have ended."""
        return self.outcome is not None


def shape_pods(
    outcome_of: Callable[[Mapping[str, Any] | None], Outcome],
) -> Callable[[dict[str, Any]], PodView | None]:
    """A function that returns the view of a pod's JSON; `outcome_of` reads a terminal phase.

    It returns None for a pod whose controller is not a FlyerJob, whatever its labels are.
    """

    def shape(value: dict[str, Any]) -> PodView | None:
        metadata, status = value["metadata"], value.get("status") or {}
        owner = controller_of(metadata)
        if owner is None:
            return None
        attempt, rank = pod_place(owner["name"], metadata["name"]) or (0, 0)
        phase = status.get("phase", "Pending")
        return PodView(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            owner=owner["uid"],
            job=f"{metadata['namespace']}/{owner['name']}",
            attempt=attempt,
            rank=rank,
            node=value["spec"].get("nodeName") or "",
            phase=phase,
            ip=status.get("podIP") or "",
            deleting="deletionTimestamp" in metadata,
            outcome=outcome_of(value) if phase in ("Succeeded", "Failed") else None,
            problem=pod_problem(value),
        )

    return shape
