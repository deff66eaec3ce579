"""etcd, the API server, the controller manager and the scheduler: their flags and readiness."""

from __future__ import annotations

import shutil
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING

from programs import binaries
from testcluster import pki
from testcluster.errors import ClusterError
from testcluster.processes import Process

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from testcluster.state import State

__all__ = [
    "API_SERVER",
    "CONTROLLER_MANAGER",
    "ETCD",
    "SCHEDULER",
    "Flags",
    "scheduler_process",
    "start",
    "wait_ready",
]

ETCD = "etcd"
API_SERVER = "kube-apiserver"
CONTROLLER_MANAGER = "kube-controller-manager"
SCHEDULER = "kube-scheduler"

READY_DEADLINE_S = 120.0  # a loaded machine; usually 4 s
ISSUER = "https://kubernetes.default.svc.cluster.local"

# etcd 3.4 reports no progress of watches, for which a watch-list would wait.
FEATURES = "WatchList=false"


@dataclass(frozen=True)
class Flags:
    """Additional flags of a cluster with a special purpose."""

    features: tuple[str, ...] = ()  # of the API server and the scheduler, such as "Name=true"
    api_server: tuple[str, ...] = ()
    controllers: tuple[str, ...] = ()


NO_FLAGS = Flags()


def start(state: State, *, controllers: bool, scheduler: bool, flags: Flags = NO_FLAGS) -> None:
    """Starts the control plane; returns when the API server is ready."""
    folder = state.folder / "pki"
    authority = pki.Authority(folder)
    private, public = pki.write_service_account_keys(folder)
    admin = authority.issue("admin", "fireflyer-e2e-admin", ["system:masters"])
    pki.write_kubeconfig(state.kubeconfig, state.server, authority.certificate, admin)

    _etcd(state).start()
    _api_server(state, authority, private, public, flags, controllers=controllers).start()
    wait_ready(state)
    if controllers:
        arguments = (
            f"--service-account-private-key-file={private}",
            f"--root-ca-file={authority.certificate}",
            "--use-service-account-credentials",
            # Kubelets that share two processors with all other processes can be silent for 20 s.
            "--node-monitor-period=2s",
            "--node-monitor-grace-period=40s",
            *flags.controllers,
        )
        _client(state, authority, CONTROLLER_MANAGER, arguments).start()
    if scheduler:
        _client(state, authority, SCHEDULER, ()).start()


def scheduler_process(state: State, flags: Flags, arguments: Sequence[str]) -> Process:
    """A scheduler for a control plane that was started without one."""
    gates = (f"--feature-gates={','.join(flags.features)}",) if flags.features else ()
    authority = pki.Authority(state.folder / "pki")
    return _client(state, authority, SCHEDULER, (*gates, *arguments))


def wait_ready(state: State, deadline_s: float = READY_DEADLINE_S) -> None:
    """Waits until the API server reports ready."""
    context = ssl.create_default_context(cafile=str(state.folder / "pki" / "ca.crt"))
    admin = state.folder / "pki" / "admin"
    context.load_cert_chain(f"{admin}.crt", f"{admin}.key")
    deadline = time.monotonic() + deadline_s
    while True:
        for name in (ETCD, API_SERVER):
            process = Process.load(state, name)
            if not process.pids():
                raise process.failure("ended while the cluster started")
        try:
            with urllib.request.urlopen(f"{state.server}/readyz", timeout=5, context=context):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise process.failure(f"not ready within {deadline_s:g} s") from None
            time.sleep(0.05)


def _etcd(state: State) -> Process:
    program = shutil.which("etcd")
    if program is None:
        raise ClusterError("etcd is missing; install Debian's etcd-server (scripts/bootstrap does)")
    client, peer = (f"http://127.0.0.1:{state.ports[name]}" for name in ("etcd", "etcd-peer"))
    arguments = (
        f"--data-dir={state.folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--logger=zap",
    )
    return Process(state, ETCD, (program, *arguments), {})


def _api_server(
    state: State,
    authority: pki.Authority,
    private: Path,
    public: Path,
    flags: Flags,
    *,
    controllers: bool,
) -> Process:
    services = state.service_network
    hosts = [
        "localhost",
        *(f"kubernetes{end}" for end in ("", ".default", ".default.svc")),
        "kubernetes.default.svc.cluster.local",
        "127.0.0.1",
        str(services[1]),
        str(state.gateway),
    ]
    serving = authority.issue("apiserver", "kube-apiserver", hosts=hosts)
    kubelet = authority.issue("apiserver-kubelet", "kube-apiserver", ["system:masters"])
    arguments = [
        f"--etcd-servers=http://127.0.0.1:{state.ports['etcd']}",
        f"--secure-port={state.ports['kube-apiserver']}",
        f"--tls-cert-file={serving.certificate}",
        f"--tls-private-key-file={serving.key}",
        f"--client-ca-file={authority.certificate}",
        f"--kubelet-client-certificate={kubelet.certificate}",
        f"--kubelet-client-key={kubelet.key}",
        f"--kubelet-certificate-authority={authority.certificate}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-issuer={ISSUER}",
        f"--service-account-signing-key-file={private}",
        f"--service-account-key-file={public}",
        f"--api-audiences={ISSUER}",
        f"--service-cluster-ip-range={services}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--feature-gates={','.join((FEATURES, *flags.features))}",
        f"--cert-dir={state.folder / 'pki'}",
        "--profiling=false",
        "--allow-privileged",
    ]
    if state.light:
        # Without nodes, no client uses the API server's Service.
        arguments += ["--bind-address=127.0.0.1", "--endpoint-reconciler-type=none"]
    else:
        # This machine has no Service addresses: webhooks are called at their endpoints.
        arguments += [f"--advertise-address={state.gateway}", "--enable-aggregator-routing"]
    if not controllers:
        # No controller creates the service accounts that this plugin requires of pods.
        arguments.append("--disable-admission-plugins=ServiceAccount")
    arguments += flags.api_server
    return Process(state, API_SERVER, (str(binaries.find(API_SERVER)), *arguments), {})


def _client(state: State, authority: pki.Authority, name: str, arguments: Sequence[str]) -> Process:
    """The controller manager or the scheduler: clients that lead without an election."""
    identity = authority.issue(name, f"system:{name}")
    kubeconfig = state.folder / "pki" / f"{name}.kubeconfig"
    pki.write_kubeconfig(kubeconfig, state.server, authority.certificate, identity)
    common = (
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--authorization-always-allow-paths=/healthz,/readyz,/livez,/metrics",
        "--bind-address=127.0.0.1",
        f"--secure-port={state.ports[name]}",
        f"--cert-dir={state.folder / 'pki' / name}",
        "--leader-elect=false",
    )
    return Process(state, name, (str(binaries.find(name)), *common, *arguments), {})
