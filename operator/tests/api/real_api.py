"""Objects of the CRDs on a real API server, and the users who change them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyer.api import crd, names
from flyer.kube.apiserver import Api, find_access
from flyer.kube.apiserver import resources as known
from flyer.kube.apiserver.errors import NotFoundError

from fakekube.apiserver import admission
from fakekube.apiserver.impersonation import Impersonation

from .memory_server import MemoryCluster

if TYPE_CHECKING:
    from testcluster.handle import Cluster

    from .rule_cases import Case

CRDS = Path(__file__).parents[3] / "crds"
RESOURCES = {
    kind.plural: kind
    for kind in (
        known.FLYERJOBS, known.FLYERQUOTAS, known.FLYERTOPOLOGIES, known.NODEHEALTHS,
        known.THREEFSCLUSTERS,
    )
}  # fmt: skip
KINDS = {kind.plural: kind.kind for kind in crd.KINDS}
OPERATOR = "system:serviceaccount:fireflyer-system:flyer-operator"
AGENT = "system:serviceaccount:fireflyer-system:flyer-node"


async def client_as(kinds: Cluster | MemoryCluster, user: str, *groups: str, node: str = "") -> Api:
    """A client of the same server that impersonates `user`."""
    if isinstance(kinds, MemoryCluster):
        access = kinds.access()
    else:
        access = await find_access(kinds.kubeconfig)

    headers = admission.acting(user, *(groups[:1] or ("system:masters",)), node=node)
    return Api(Impersonation(access, headers), agent="tests")


def object_of(plural: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if namespace_of(plural):
        metadata["namespace"] = namespace_of(plural)
    return {
        "apiVersion": names.API_VERSION, "kind": KINDS[plural], "metadata": metadata, **body,
    }  # fmt: skip


async def create_object(
    api: Api, plural: str, name: str, before: dict[str, Any], operator: Api | None = None
) -> None:
    resource, namespace = RESOURCES[plural], namespace_of(plural)
    spec = {key: value for key, value in before.items() if key != "status"}
    await api.create(resource, object_of(plural, name, spec), namespace)
    if "status" in before:
        patch = {"status": before["status"]}
        await (operator or api).merge(resource, name, patch, namespace, "status")


def namespace_of(plural: str) -> str:
    return "default" if RESOURCES[plural].namespaced else ""


async def delete_object(api: Api, plural: str, name: str) -> None:
    with contextlib.suppress(NotFoundError):
        await api.delete(RESOURCES[plural], name, namespace_of(plural))


async def send_invalid_edit(api: Api, operator: Api, case: Case, name: str) -> None:
    """Store the initial object of the case, then send the edit that should be refused."""
    await create_object(api, case.plural, name, case.before, operator)
    resource, namespace = RESOURCES[case.plural], namespace_of(case.plural)
    await api.merge(resource, name, case.edit, namespace, case.subresource)
