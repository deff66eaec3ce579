"""Claims of a ThreeFSCluster's pods that are not bound, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.apiserver.errors import ApiError
from flyer.kube.apiserver.resources import STORAGECLASSES
from flyer.kube.threefs.events import newest_message
from flyer.kube.threefs.observed import PendingClaim

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flyer.kube.apiserver import Api
    from flyer.kube.threefs.observed import Pod

__all__ = ["missing_classes", "pending_claims", "unbound", "with_reasons"]

Object = dict[str, Any]

DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"
EXAMINED_MAX: Final = 5
"""Maximum number of claims of a cluster whose events are read in one step."""


def pending_claims(
    claims: Iterable[Object],
    sets: Mapping[str, Object | None],
    pods: Mapping[str, Sequence[Pod]],
) -> list[PendingClaim]:
    """The unbound claims of pods. Others may have the labels of the cluster."""
    names = {
        f"{template['metadata']['name']}-{pod.name}"
        for kind, value in sets.items()
        if value is not None
        for template in value["spec"].get("volumeClaimTemplates") or ()
        for pod in pods[kind]
    }
    pending = [
        PendingClaim(
            name=claim["metadata"]["name"],
            uid=claim["metadata"]["uid"],
            storage_class=claim["spec"].get("storageClassName"),
        )
        for claim in claims
        if claim["metadata"]["name"] in names
        and "deletionTimestamp" not in claim["metadata"]
        and (claim.get("status") or {}).get("phase") == "Pending"
        # Bound to a volume that an administrator has chosen: no class is needed.
        and not claim["spec"].get("volumeName")
    ]
    return sorted(pending, key=lambda claim: claim.name)


def missing_classes(claims: Iterable[PendingClaim], *, created: bool) -> str:
    """Which StorageClasses do not exist, and the remedy; empty: all exist.

    `created`: the cluster has served, so that its claims may hold data.
    """
    waiting: dict[str | None, list[str]] = {}
    for claim in claims:
        if claim.class_missing:
            waiting.setdefault(claim.storage_class, []).append(claim.name)
    return "; ".join(_remedy(name, of, created=created) for name, of in waiting.items())


def _remedy(storage_class: str | None, claims: Sequence[str], *, created: bool) -> str:
    more = f" and {len(claims) - 1} more" if len(claims) > 1 else ""
    problem, remedy = f"StorageClass {storage_class} does not exist", "create it"
    if storage_class is None:
        problem, remedy = "no StorageClass is the default one", "mark one as default"
    text = f"{problem}: claim {claims[0]}{more} cannot be bound; {remedy}"
    if created:
        return text
    return (
        f"{text}, or delete the ThreeFSCluster and its claims, and create it with another "
        "StorageClass"
    )


def unbound(claims: Iterable[PendingClaim]) -> list[str]:
    """A sentence for each claim that is not bound for a reason that an event reports."""
    return [f"claim {claim.name} is not bound: {claim.why}" for claim in claims if claim.why]


async def with_reasons(
    api: Api, namespace: str, claims: Sequence[PendingClaim]
) -> tuple[PendingClaim, ...]:
    """The claims, with the reasons that the API server has. It is not asked if there are none."""
    if not claims:
        return ()
    classes = await _classes(api)
    described = []
    for number, claim in enumerate(claims):
        missing = classes is not None and not _exists(claim.storage_class, classes)
        why = ""
        if not missing and number < EXAMINED_MAX:
            why = await _why(api, namespace, claim.uid)
        described.append(replace(claim, class_missing=missing, why=why))
    return tuple(described)


async def _why(api: Api, namespace: str, uid: str) -> str:
    for reason, event_type in (("ProvisioningFailed", "Warning"), ("FailedBinding", "Normal")):
        if message := await newest_message(api, namespace, uid, reason, event_type):
            return message
    return ""


async def _classes(api: Api) -> list[Object] | None:
    """All StorageClasses; None: unknown."""
    try:
        return await api.list(STORAGECLASSES)
    except ApiError:
        return None  # not permitted, or the server is unavailable


def _exists(name: str | None, classes: Iterable[Object]) -> bool:
    if name == "":
        return True  # bound to a volume without a class
    if name is not None:
        return any(value["metadata"]["name"] == name for value in classes)
    return any(
        (value["metadata"].get("annotations") or {}).get(DEFAULT_CLASS) == "true"
        for value in classes
    )
