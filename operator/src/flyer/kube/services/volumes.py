"""Claims, Secrets and ConfigMaps that keep the volumes of a starting pod from being mounted.

A kubelet reports nothing of volumes in a pod's status. A claim is read itself. Secrets and
ConfigMaps the operator may not read: the kubelet's events name those that are missing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.client.errors import ApiError, NotFoundError
from flyer.kube.client.resources import CLAIMS, EVENTS
from flyer.kube.services.claims import claims_of
from flyer.kube.services.troubles import Trouble

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flyer.kube.client import Api

__all__ = ["missing_for_volumes"]

_REASON: Final = "FailedMount"
_MISSING: Final = re.compile(
    r'volume "(?P<volume>[^"]+)"'
    r'.*?(?P<what>(?:secret|configmap) "[^"]+" not found|non-existent (?:secret|config) key: \S+)',
    re.DOTALL,
)
# The field of a volume that names its object.
_FIELDS: Final = {"secret": "secret.secretName", "configMap": "configMap.name"}


async def missing_for_volumes(
    api: Api, namespace: str, spec: Mapping[str, Any], pod_uid: str
) -> Trouble | None:
    """The first one that is missing; `pod_uid` is of a pod with this spec that does not start."""
    try:
        return await _claim(api, namespace, spec) or await _object(api, namespace, spec, pod_uid)
    except ApiError:
        return None  # the right to look is missing, or the server does not answer now


async def _claim(api: Api, namespace: str, spec: Mapping[str, Any]) -> Trouble | None:
    for index, claim in claims_of(spec):
        place = f"{_place(index)}.persistentVolumeClaim.claimName"
        try:
            found = await api.get(CLAIMS, claim, namespace)
        except NotFoundError:
            why = f'{place}: there is no claim "{claim}" in {namespace}: create it'
        else:
            phase = (found.get("status") or {}).get("phase")
            if phase == "Bound":
                continue
            why = f'{place}: the claim "{claim}" is {phase}, not Bound'
        return Trouble(_REASON, why, job_fault=True)
    return None


async def _object(
    api: Api, namespace: str, spec: Mapping[str, Any], pod_uid: str
) -> Trouble | None:
    places = dict(_mounted_objects(spec))
    if not places:
        return None
    selector = f"involvedObject.uid={pod_uid},reason={_REASON}"
    # One page: other events of a namespace must not cost us more.
    async for page in api.pages(EVENTS, namespace, fieldSelector=selector):
        for event in page.items:
            found = _MISSING.search(str(event.get("message") or ""))
            place = places.get(found["volume"]) if found else None
            if found and place:
                why = f"{place}: {found['what']} in {namespace}: create it"
                return Trouble(_REASON, why, job_fault=True)
        break
    return None


def _mounted_objects(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Volumes of Secrets and ConfigMaps, by name, with the field that names the object."""
    for index, volume in enumerate(spec.get("volumes") or ()):
        for kind, field in _FIELDS.items():
            if volume.get(kind):
                yield str(volume.get("name")), f"{_place(index)}.{field}"
        sources = (volume.get("projected") or {}).get("sources") or ()
        if any(one.get(kind) for one in sources for kind in _FIELDS):
            yield str(volume.get("name")), f"{_place(index)}.projected.sources"


def _place(index: int) -> str:
    return f"spec.template.spec.volumes[{index}]"
