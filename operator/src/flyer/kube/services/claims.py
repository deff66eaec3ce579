"""Volume claims that wait for a scheduler: on dedicated nodes none of their pods' would come.

A claim of a class with the binding mode WaitForFirstConsumer is bound once kube-scheduler has
chosen a node for its pod. Gangs on dedicated nodes are bound by the operator, so such a claim would
stay pending and its pod would wait at the kubelet until the start deadline.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.client.errors import ForbiddenError, NotFoundError
from flyer.kube.client.resources import CLAIMS, STORAGECLASSES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from flyer.kube.client import Api

__all__ = ["CLAIMS_MAX", "claims_of", "late_claims"]

CLAIMS_MAX: Final = 32
"""Of one pod: a template decides how many calls a look at it costs."""

_LATE: Final = "WaitForFirstConsumer"
_DEFAULT: Final = "storageclass.kubernetes.io/is-default-class"
_REMEDY: Final = (
    "gangs are bound by Fire-Flyer, so it would never be bound: use a storage class with "
    "volumeBindingMode Immediate, or bind the claim first"
)

log = logging.getLogger(__name__)


def claims_of(spec: Mapping[str, Any]) -> list[tuple[int, str]]:
    """The claims that a pod's volumes name, each once with its first volume's index.

    Each costs a call, so that those beyond `CLAIMS_MAX` are not looked at: a pod that waits for one
    of them ends with the start deadline.
    """
    places: dict[str, int] = {}
    for index, volume in enumerate(spec.get("volumes") or ()):
        if claim := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
            places.setdefault(claim, index)
    return [(index, claim) for claim, index in itertools.islice(places.items(), CLAIMS_MAX)]


async def late_claims(api: Api, spec: Mapping[str, Any], namespace: str) -> AsyncIterator[str]:
    """One refusal for each claim that is not bound and waits for a consumer."""
    classes = _Classes(api)
    try:
        for index, claim in claims_of(spec):
            try:
                found = await api.get(CLAIMS, claim, namespace)
            except NotFoundError:
                continue  # it may come; the kubelet says if it does not
            bound = (found.get("status") or {}).get("phase") == "Bound"
            if not bound and await classes.is_late(found.get("spec") or {}):
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
        log.info("claims are not looked at: %s", error)


class _Classes:
    """The storage classes, listed once where one is asked about."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._found: list[dict[str, Any]] | None = None

    async def is_late(self, claim: Mapping[str, Any]) -> bool:
        """Whether a claim with this specification is bound at its first use."""
        name = claim.get("storageClassName")
        if name == "":
            return False  # bound to a volume that exists
        if self._found is None:
            self._found = await self._api.list(STORAGECLASSES)
        for one in self._found:
            default = (one["metadata"].get("annotations") or {}).get(_DEFAULT) == "true"
            if one["metadata"]["name"] == name or (name is None and default):
                return bool(one.get("volumeBindingMode") == _LATE)
        return False
