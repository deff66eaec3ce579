"""Missing volumes: claims, Secrets and ConfigMaps that prevent a starting pod's volume mounts.

A kubelet does not report volumes in a pod's status. Claims are read directly. The operator may not
read Secrets and ConfigMaps: the kubelet's events name missing ones.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.apiserver.errors import ApiError, NotFoundError
from flyer.kube.apiserver.resources import CLAIMS, EVENTS
from flyer.kube.pods.pod_problems import PodProblem
from flyer.kube.services.pods.volume_claims import claims_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flyer.kube.apiserver import Api

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
) -> PodProblem | None:
    """The first missing object; `pod_uid` is of a pod with this spec that does not start."""
    try:
        return await _claim(api, namespace, spec) or await _object(api, namespace, spec, pod_uid)
    except ApiError:
        return None  # not permitted, or the server is unavailable


async def _claim(api: Api, namespace: str, spec: Mapping[str, Any]) -> PodProblem | None:
    for index, claim in claims_of(spec):
        place = f"{_place(index)}.persistentVolumeClaim.claimName"
        try:
            document = await api.get(CLAIMS, claim, namespace)
        except NotFoundError:
            why = f'{place}: claim "{claim}" not found in {namespace}: create it'
        else:
            phase = (document.get("status") or {}).get("phase")
            if phase == "Bound":
                continue
            why = f'{place}: claim "{claim}" is {phase}, not Bound'
        return PodProblem(_REASON, why, job_fault=True)
    return None


async def _object(
    api: Api, namespace: str, spec: Mapping[str, Any], pod_uid: str
) -> PodProblem | None:
    places = dict(_mounted_objects(spec))
    if not places:
        return None
    selector = f"involvedObject.uid={pod_uid},reason={_REASON}"
    # One page only, which bounds the cost.
    async for page in api.pages(EVENTS, namespace, fieldSelector=selector):
        for event in page.items:
            match = _MISSING.search(str(event.get("message") or ""))
            place = places.get(match["volume"]) if match else None
            if match and place:
                why = f"{place}: {match['what']} in {namespace}: create it"
                return PodProblem(_REASON, why, job_fault=True)
        break
    return None


def _mounted_objects(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Volumes of Secrets and ConfigMaps, by name, with the field that names the object."""
    for index, volume in enumerate(spec.get("volumes") or ()):
        for kind, field in _FIELDS.items():
            if volume.get(kind):
                yield str(volume.get("name")), f"{_place(index)}.{field}"
        sources = (volume.get("projected") or {}).get("sources") or ()
        if any(source.get(kind) for source in sources for kind in _FIELDS):
            yield str(volume.get("name")), f"{_place(index)}.projected.sources"


def _place(index: int) -> str:
    return f"spec.template.spec.volumes[{index}]"
