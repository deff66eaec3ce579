"""One node: its namespaces, containerd, kubelet and kube-proxy.

A node is the process tree under one `unshare`: when its first process dies, the kernel ends all
the others, containers included, and takes the mounts and interfaces with them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from programs import binaries
from testcluster import network, pki
from testcluster.errors import ClusterError
from testcluster.processes import Process, enter

if TYPE_CHECKING:
    from ipaddress import IPv4Address

    from testcluster.nodes import NodeSpec
    from testcluster.state import State

__all__ = ["CONTAINERD_SOCKET", "Node", "cgroup", "load_image", "run"]

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
INIT = Path(__file__).with_name("node-init.sh")
CNI_PROGRAMS = Path("/usr/lib/cni")
NAMESPACES = ("--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount-proc")
START_DEADLINE_S = 60.0


def cgroup(state: State) -> str:
    """The control group above all pods of the cluster, in every hierarchy."""
    return f"/fireflyer-e2e-{state.id}"


def run(state: State, node: str, *argv: str, deadline_s: float = 300) -> str:
    """Runs a command in a node's namespaces and returns its output."""
    result = subprocess.run(
        [*enter(state, node), *argv],
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    if result.returncode != 0:
        raise ClusterError(f"{node}: {' '.join(argv)}: {result.stderr.strip()}")
    return result.stdout


def load_image(state: State, node: str, archive: Path) -> None:
    """Makes an image archive known to the node's containerd."""
    run(state, node, "ctr", "--namespace=k8s.io", "images", "import", str(archive))


@dataclass(frozen=True)
class Node:
    """A node of a whole cluster."""

    state: State
    spec: NodeSpec
    index: int
    pause_image: str

    @property
    def root(self) -> Path:
        """Its files on this machine."""
        return self.state.folder / "nodes" / self.spec.name

    @property
    def address(self) -> IPv4Address:
        """Its address on the cluster's bridge."""
        return network.node_address(self.state, self.index)

    def process(self, program: str) -> Process:
        """Its `init`, `containerd`, `kubelet` or `kube-proxy`, once started."""
        return Process.load(self.state, f"{self.spec.name}-{program}")

    def start_machine(self) -> None:
        """Makes the namespaces and starts containerd in them."""
        self.root.mkdir(parents=True)
        init = Process(
            self.state,
            f"{self.spec.name}-init",
            ("dash", str(INIT)),
            {"NODE": self.spec.name, "ROOT": str(self.root)},
            unshare=NAMESPACES,
        )
        init.start()
        self._wait(init, "set up its namespaces", (self.root / "ready").exists)
        network.connect(self.state, self.index, min(init.pids()))
        self._write_containerd()
        program = _installed("containerd", "containerd")
        containerd = self._process(
            "containerd", (program, f"--config={self.root / 'containerd.toml'}"), {}
        )
        containerd.start()
        self._wait(containerd, "answered", self._containerd_answers)

    def start_kubelet(self, authority: pki.Authority) -> None:
        """Starts the kubelet and kube-proxy; the node registers itself."""
        kubeconfig = self._write_kubelet(authority)
        labels = ",".join(f"{key}={value}" for key, value in self.spec.labels.items())
        arguments = (
            f"--config={self.root / 'kubelet.json'}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.spec.name}",
            f"--node-ip={self.address}",
            f"--node-labels={labels}",
            "--cert-dir=/var/lib/kubelet/pki",
            "--housekeeping-interval=30s",  # statistics of containers; 10 s costs a core in ten
        )
        self._process("kubelet", (str(binaries.find("kubelet")), *arguments), {}).start()
        kubeconfig = self._write_proxy(authority)
        proxy = (str(binaries.find("kube-proxy")), f"--config={self.root / 'proxy.json'}")
        self._process("kube-proxy", proxy, {}).start()

    def power_off(self) -> None:
        """Simulates a power cut: all processes, mounts and addresses disappear together.

        The address is removed first: a kernel that closes the connections of killed processes, or
        refuses new ones, looks alive to its peers.
        """
        network.disconnect(self.state, self.index)
        self.process("init").kill()

    def power_on(self) -> None:
        """Starts the node again with its previous disk and without its previous processes."""
        (self.root / "ready").unlink()
        init = self.process("init")
        init.start()
        self._wait(init, "set up its namespaces", (self.root / "ready").exists)
        network.connect(self.state, self.index, min(init.pids()))
        containerd = self.process("containerd")
        containerd.start()
        self._wait(containerd, "answered", self._containerd_answers)
        for program in ("kubelet", "kube-proxy"):
            self.process(program).start()

    def _process(self, name: str, argv: tuple[str, ...], environment: dict[str, str]) -> Process:
        return Process(
            self.state, f"{self.spec.name}-{name}", argv, environment, node=self.spec.name
        )

    def _wait(self, process: Process, expected: str, probe: Any) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while not probe():
            if time.monotonic() > deadline:
                raise process.failure(f"has not {expected} within {START_DEADLINE_S:g} s")
            time.sleep(0.02)

    def _containerd_answers(self) -> bool:
        try:
            run(self.state, self.spec.name, "ctr", "version", deadline_s=10)
        except (ClusterError, subprocess.TimeoutExpired):
            return False
        return True

    def _write_containerd(self) -> None:
        bridge = {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isGateway": True,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": "/run/cni",
                        "ranges": [[{"subnet": str(network.pod_range(self.state, self.index))}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }
        (self.root / "cni").mkdir()
        (self.root / "cni" / "10-pods.conflist").write_text(json.dumps(bridge, indent=1))
        if not CNI_PROGRAMS.exists():
            raise ClusterError(f"{CNI_PROGRAMS} is missing; install containernetworking-plugins")
        _installed("runc", "runc")
        cri = '[plugins."io.containerd.grpc.v1.cri"'
        (self.root / "containerd.toml").write_text(
            f"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
    "io.containerd.snapshotter.v1.aufs", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
address = "{CONTAINERD_SOCKET}"
{cri}]
# Without CAP_SYS_RESOURCE, no process may lower the score, and sandboxes would not start.
restrict_oom_score_adj = true
sandbox_image = "{self.pause_image}"
{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
{cri}.cni]
bin_dir = "{CNI_PROGRAMS}"
conf_dir = "{self.root / "cni"}"
"""
        )

    def _write_kubelet(self, authority: pki.Authority) -> Path:
        name = self.spec.name
        client = authority.issue(f"{name}-client", f"system:node:{name}", ["system:nodes"])
        serving = authority.issue(f"{name}-serving", name, hosts=[name, str(self.address)])
        resolv = self.root / "resolv.conf"
        resolv.write_text(
            ""
        )  # its DNS server does not exist on this machine; pods use the cluster's
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "x509": {"clientCAFile": str(authority.certificate)},
                "webhook": {"enabled": True},
                "anonymous": {"enabled": False},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(serving.certificate),
            "tlsPrivateKeyFile": str(serving.key),
            "clusterDomain": "cluster.local",
            "clusterDNS": [str(self.state.dns_address)],
            "resolvConf": str(resolv),
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "registerWithTaints": self.spec.taints,
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
            # Control groups of version 1, shared with everything else on this machine.
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "cgroupRoot": f"{cgroup(self.state)}/{name}",
            "enforceNodeAllocatable": [],
            # Without it the kubelet neither checks file systems nor reports volume statistics.
            "localStorageCapacityIsolation": True,
            "makeIPTablesUtilChains": False,
            "failSwapOn": False,
            "evictionHard": {"memory.available": "0%", "nodefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "serializeImagePulls": False,
            # How soon an unhealthy device is seen in the node's allocatable.
            "nodeStatusUpdateFrequency": "1s",
            "nodeLeaseDurationSeconds": 20,
            "syncFrequency": "30s",
            # How soon the use and the condition of a claim are seen; one minute by default.
            "volumeStatsAggPeriod": "10s",
            "featureGates": {"CSIVolumeHealth": True},
            "shutdownGracePeriod": "0s",
            # Scenarios kill the same container repeatedly; the default restart back-off doubles
            # from 10 s to 5 min.
            "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
        }
        (self.root / "kubelet.json").write_text(json.dumps(config, indent=1))
        kubeconfig = self.root / "kubelet.kubeconfig"
        pki.write_kubeconfig(kubeconfig, self.state.server_for_nodes, authority.certificate, client)
        return kubeconfig

    def _write_proxy(self, authority: pki.Authority) -> Path:
        client = authority.issue(f"{self.spec.name}-proxy", "system:kube-proxy")
        kubeconfig = self.root / "proxy.kubeconfig"
        pki.write_kubeconfig(kubeconfig, self.state.server_for_nodes, authority.certificate, client)
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "hostnameOverride": self.spec.name,
            "clusterCIDR": str(self.state.pod_network),
            "conntrack": {"maxPerCore": 0, "min": 0},
            "iptables": {"minSyncPeriod": "100ms"},
        }
        (self.root / "proxy.json").write_text(json.dumps(config, indent=1))
        return kubeconfig


def _installed(program: str, package: str) -> str:
    path = shutil.which(program, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin")
    if path is None:
        raise ClusterError(f"{program} is missing; install Debian's {package}")
    return path
