"""The cluster's DNS: CoreDNS as a process of this host, behind the Service `kube-dns`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from programs import binaries
from testcluster import pki
from testcluster.processes import Process

if TYPE_CHECKING:
    from testcluster.state import State

__all__ = ["DNS", "objects", "start"]

DNS = "coredns"


def start(state: State, authority: pki.Authority) -> None:
    """Starts CoreDNS on the bridge's address."""
    identity = authority.issue("coredns", "coredns", ["system:masters"])
    kubeconfig = state.folder / "pki" / "coredns.kubeconfig"
    pki.write_kubeconfig(kubeconfig, state.server, authority.certificate, identity)
    corefile = state.folder / "Corefile"
    corefile.write_text(
        f""".:53 {{
    bind {state.gateway}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 1
    }}
}}
"""
    )
    Process(state, DNS, (str(binaries.find("coredns")), f"-conf={corefile}"), {}).start()


def objects(state: State) -> list[dict[str, Any]]:
    """The Service for pods and its endpoint."""
    ports = [{"name": "dns", "port": 53, "protocol": "UDP"}]
    ports.append({"name": "dns-tcp", "port": 53, "protocol": "TCP"})
    metadata = {"name": "kube-dns", "namespace": "kube-system"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata | {"labels": {"k8s-app": "kube-dns"}},
            "spec": {"clusterIP": str(state.dns_address), "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": metadata | {"labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4",
            "ports": ports,
            "endpoints": [{"addresses": [str(state.gateway)]}],
        },
    ]
