"""The number of API calls to check a pod's claims is bounded for every template."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from flyer.kube.services.pods.missing_volumes import missing_for_volumes
from flyer.kube.services.pods.volume_claims import CLAIMS_MAX, claims_of, late_claims

if TYPE_CHECKING:
    from flyer.kube.apiserver import Api

    from fakekube import ApiServer

WAIT_FOR_CONSUMER = {"metadata": {"name": "local"}, "volumeBindingMode": "WaitForFirstConsumer"}


def volume(claim: str) -> dict[str, Any]:
    return {"name": claim, "persistentVolumeClaim": {"claimName": claim}}


def ephemeral(name: str) -> dict[str, Any]:
    template = {"spec": {"storageClassName": "local"}}
    return {"name": name, "ephemeral": {"volumeClaimTemplate": template}}


@pytest.fixture
def api(api_server: ApiServer, connect: Any) -> Api:
    api_server.store.create("storageclasses", WAIT_FOR_CONSUMER)
    client: Api = connect()
    return client


def calls(api_server: ApiServer) -> Counter[tuple[str, str]]:
    return Counter((call.verb, call.resource) for call in api_server.faults.calls)


async def test_many_claims_and_volumes_cost_few_calls(api_server: ApiServer, api: Api) -> None:
    """One call per claim, and one for all classes."""
    for number in range(3 * CLAIMS_MAX):
        claim = {
            "metadata": {"name": f"c{number}"}, "spec": {"storageClassName": "local"},
            "status": {"phase": "Pending"},
        }  # fmt: skip
        api_server.store.create("persistentvolumeclaims", claim, "default")
    volumes = [volume(f"c{number}") for number in range(3 * CLAIMS_MAX)]
    spec = {"volumes": [*volumes, *volumes, *(ephemeral(f"e{number}") for number in range(50))]}
    late = [late_claim async for late_claim in late_claims(api, spec, "default")]
    assert len(late) == CLAIMS_MAX + 50
    assert late[1].startswith("spec.template.spec.volumes[1].persistentVolumeClaim.claimName: ")
    place = f"spec.template.spec.volumes[{6 * CLAIMS_MAX}].ephemeral.volumeClaimTemplate.spec."
    assert late[CLAIMS_MAX].startswith(place)
    assert calls(api_server) == {
        ("get", "persistentvolumeclaims"): CLAIMS_MAX,
        ("list", "storageclasses"): 1,
    }


async def test_a_pod_that_does_not_start_costs_no_more_calls(
    api_server: ApiServer, api: Api
) -> None:
    bound_claim = {"spec": {}, "status": {"phase": "Bound"}}
    for number in range(2 * CLAIMS_MAX):
        claim = {"metadata": {"name": f"c{number}"}, **bound_claim}
        api_server.store.create("persistentvolumeclaims", claim, "default")
    spec = {"volumes": [volume(f"c{number}") for number in range(2 * CLAIMS_MAX)]}
    assert await missing_for_volumes(api, "default", spec, "uid") is None
    assert calls(api_server)["get", "persistentvolumeclaims"] == CLAIMS_MAX


def test_a_claim_that_two_volumes_name_is_one() -> None:
    spec = {"volumes": [{"name": "x"}, volume("a"), volume("b"), volume("a")]}
    assert claims_of(spec) == [(1, "a"), (2, "b")]
    assert claims_of({"volumes": None}) == []
