"""Volume claims that wait for a scheduler: on dedicated nodes none of their pods' would come.

A claim of a class with the binding mode WaitForFirstConsumer is bound once kube-scheduler has
chosen a node for its pod. Gangs on dedicated nodes are bound by the operator, so such a claim would
stay pending and its pod would wait at the kubelet until the start deadline.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.client.errors import ForbiddenError, NotFoundError
from flyer.kube.client.resources import CLAIMS, STORAGECLASSES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from flyer.kube.client import Api

__all__ = ["late_claims"]

_LATE: Final = "WaitForFirstConsumer"
_DEFAULT: Final = "storageclass.kubernetes.io/is-default-class"
_REMEDY: Final = (
    "gangs are bound by Fire-Flyer, so it would never be bound: use a storage class with "
    "volumeBindingMode Immediate, or bind the claim first"
)

log = logging.getLogger(__name__)


async def late_claims(api: Api, spec: Mapping[str, Any], namespace: str) -> AsyncIterator[str]:
    """One refusal for each volume whose claim is not bound and waits for a consumer."""
    try:
        for index, volume in enumerate(spec.get("volumes") or ()):
            place = f"spec.template.spec.volumes[{index}]"
            if claim := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
                try:
                    found = await api.get(CLAIMS, claim, namespace)
                except NotFoundError:
                    continue  # it may come; the kubelet says if it does not
                bound = (found.get("status") or {}).get("phase") == "Bound"
                if not bound and await _is_late(api, found.get("spec") or {}):
                    yield (
                        f'{place}.persistentVolumeClaim.claimName: "{claim}" is not bound, and its '
                        f"class binds at first use ({_LATE}): {_REMEDY}"
                    )
            elif template := (volume.get("ephemeral") or {}).get("volumeClaimTemplate"):
                late = await _is_late(api, template.get("spec") or {})
                if late:
                    yield (
                        f"{place}.ephemeral.volumeClaimTemplate.spec.storageClassName: binds at "
                        f"first use ({_LATE}): {_REMEDY}"
                    )
    except ForbiddenError as error:
        log.info("claims are not looked at: %s", error)


async def _is_late(api: Api, claim: Mapping[str, Any]) -> bool:
    name = claim.get("storageClassName")
    if name == "":
        return False  # bound to a volume that exists
    for one in await api.list(STORAGECLASSES):
        default = (one["metadata"].get("annotations") or {}).get(_DEFAULT) == "true"
        if one["metadata"]["name"] == name or (name is None and default):
            return bool(one.get("volumeBindingMode") == _LATE)
    return False
