"""Volume claims with late binding, which pods on dedicated nodes cannot use.

A claim of a class with the binding mode WaitForFirstConsumer is bound once kube-scheduler has
chosen a node for its pod. Gangs on dedicated nodes are bound by the operator, so such a claim would
stay pending and its pod would wait at the kubelet until the start deadline.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.apiserver.errors import ForbiddenError, NotFoundError
from flyer.kube.apiserver.resources import CLAIMS, STORAGECLASSES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from flyer.kube.apiserver import Api

__all__ = ["CLAIMS_MAX", "claims_of", "late_claims"]

CLAIMS_MAX: Final = 32
"""Claims checked per pod, which bounds the calls that a template can cause."""

_LATE: Final = "WaitForFirstConsumer"
_DEFAULT: Final = "storageclass.kubernetes.io/is-default-class"
_REMEDY: Final = (
    "Fire-Flyer binds gangs itself, so the claim would never be bound: use a storage class with "
    "volumeBindingMode Immediate, or bind the claim first"
)

log = logging.getLogger(__name__)


def claims_of(spec: Mapping[str, Any]) -> list[tuple[int, str]]:
    """The claims of a pod's volumes, each once with its first volume's index.

    Each costs a call, so claims beyond `CLAIMS_MAX` are not checked: a pod that waits for one of
    them fails at the start deadline.
    """
    places: dict[str, int] = {}
    for index, volume in enumerate(spec.get("volumes") or ()):
        if claim := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
            places.setdefault(claim, index)
    return [(index, claim) for claim, index in itertools.islice(places.items(), CLAIMS_MAX)]


async def late_claims(api: Api, spec: Mapping[str, Any], namespace: str) -> AsyncIterator[str]:
    """One refusal for each unbound claim that waits for its first consumer."""
    classes = _Classes(api)
    try:
        for index, claim in claims_of(spec):
            try:
                document = await api.get(CLAIMS, claim, namespace)
            except NotFoundError:
                continue  # it may be created later; the start monitor reports a missing one
            is_bound = (document.get("status") or {}).get("phase") == "Bound"
            if not is_bound and await classes.is_late(document.get("spec") or {}):
                yield (
                    f"spec.template.spec.volumes[{index}].persistentVolumeClaim.claimName: "
                    f'"{claim}" is not bound, and its class binds at first use ({_LATE}): {_REMEDY}'
                )
        for index, volume in enumerate(spec.get("volumes") or ()):
            template = (volume.get("ephemeral") or {}).get("volumeClaimTemplate")
            if template and await classes.is_late(template.get("spec") or {}):
                yield (
                    f"spec.template.spec.volumes[{index}].ephemeral.volumeClaimTemplate.spec."
                    f"storageClassName: binds at first use ({_LATE}): {_REMEDY}"
                )
    except ForbiddenError as error:
        log.info("cannot check volume claims: %s", error)


class _Classes:
    """The storage classes, listed once on the first query."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._found: list[dict[str, Any]] | None = None

    async def is_late(self, claim: Mapping[str, Any]) -> bool:
        """Whether a claim with this specification is bound at first use."""
        name = claim.get("storageClassName")
        if name == "":
            return False  # bound to an existing volume
        if self._found is None:
            self._found = await self._api.list(STORAGECLASSES)
        for value in self._found:
            default = (value["metadata"].get("annotations") or {}).get(_DEFAULT) == "true"
            if value["metadata"]["name"] == name or (name is None and default):
                return bool(value.get("volumeBindingMode") == _LATE)
        return False
