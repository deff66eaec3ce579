"""Starts a cluster."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from images.pause import PAUSE_IMAGE, pause_archive
from programs import binaries
from testcluster import control_plane, dns, kind, kwok, network, pki
from testcluster.down import remove
from testcluster.handle import Cluster, wait_for
from testcluster.node import Node, load_image
from testcluster.nodes import NODES, NodeSpec
from testcluster.state import State, free_ports, locked

__all__ = ["Options", "programs", "up"]

PORTS = (
    "etcd",
    "etcd-peer",
    control_plane.API_SERVER,
    control_plane.CONTROLLER_MANAGER,
    control_plane.SCHEDULER,
)
INOTIFY_INSTANCES = 8192
POD_SHARES = 10_240  # cpu.shares; a process has 1024
READY_DEADLINE_S = 180.0  # a loaded machine; usually 15 s


@dataclass(frozen=True)
class Options:
    """Components of the cluster."""

    light: bool = False  # only the control plane
    controllers: bool = False  # in a light cluster: the controller manager too
    nodes: tuple[NodeSpec, ...] = NODES  # in a whole cluster
    kwok: int = 0  # additional simulated nodes


def programs(options: Options) -> tuple[str, ...]:
    """The programs of the Go modules that this cluster runs."""
    names = [control_plane.API_SERVER, "kubectl"]
    if options.controllers or not options.light:
        names.append(control_plane.CONTROLLER_MANAGER)
    if not options.light:
        names += [control_plane.SCHEDULER, "kubelet", "kube-proxy", dns.DNS]
    if options.kwok:
        names.append(kwok.KWOK)
    return tuple(names)


def up(folder: Path, options: Options) -> State:
    """Starts a cluster in this folder and replaces an existing one; ready on return."""
    folder = folder.resolve()
    binaries.require(*programs(options))
    with locked(folder):
        remove(folder)
        started = time.monotonic()
        state = State(folder, light=options.light, ports=free_ports(PORTS))
        if not options.light and kind.usable():
            state.kind = True
            state.nodes = [node.name for node in options.nodes]
            state.save()
            kind.create(state, options.nodes)
        elif options.light:
            state.save()
            control_plane.start(state, controllers=options.controllers, scheduler=False)
        else:
            state.nodes = [node.name for node in options.nodes]
            _start_whole(state, options)
        if options.kwok:
            kwok.add(Cluster(state), options.kwok)
        print(f"cluster: ready in {time.monotonic() - started:.1f} s", flush=True)
    return state


def _raise_inotify_limit() -> None:
    """Raises the limit of inotify instances: a kubelet needs about 20, the default is 128.

    The limit is not restored when the cluster is removed: other programs may rely on it by then.
    """
    limit = Path("/proc/sys/fs/inotify/max_user_instances")
    if int(limit.read_text()) < INOTIFY_INSTANCES:
        limit.write_text(str(INOTIFY_INSTANCES))
        print(f"cluster: raised fs.inotify.max_user_instances to {INOTIFY_INSTANCES}", flush=True)


def _raise_cpu_shares() -> None:
    """Raises the CPU shares of the control group that holds the containers of all nodes.

    By default the group has the weight of one process, so that ten other processes get ten times
    the processor time of five nodes. Only for version 1 of control groups.
    """
    folder = Path("/sys/fs/cgroup/cpu/k8s.io")
    if folder.parent.is_dir():
        folder.mkdir(exist_ok=True)
        (folder / "cpu.shares").write_text(str(POD_SHARES))


def _start_whole(state: State, options: Options) -> None:
    _raise_inotify_limit()
    _raise_cpu_shares()
    network.create(state)
    pause = pause_archive(binaries.cache() / "images")
    nodes = [Node(state, spec, index, PAUSE_IMAGE) for index, spec in enumerate(options.nodes)]

    def start_machine(node: Node) -> None:
        node.start_machine()
        load_image(state, node.spec.name, pause)

    with ThreadPoolExecutor(len(nodes)) as threads:
        machines = [threads.submit(start_machine, node) for node in nodes]
        control_plane.start(state, controllers=True, scheduler=True)
        print("cluster: the control plane is ready", flush=True)
        authority = pki.Authority(state.folder / "pki")
        dns.start(state, authority)
        for node, machine in zip(nodes, machines, strict=True):
            machine.result()
            node.start_kubelet(authority)
            print(f"cluster: started node {node.spec.name}", flush=True)

    cluster = Cluster(state)
    cluster.apply(*dns.objects(state), namespace="kube-system")
    wait_for(
        f"registration of all {len(nodes)} nodes",
        lambda: len(cluster.get("nodes")) == len(nodes),
        READY_DEADLINE_S,
    )
    cluster.kubectl(
        "wait",
        "--for=condition=Ready",
        *(f"node/{name}" for name in state.nodes),
        f"--timeout={READY_DEADLINE_S:g}s",
        deadline_s=READY_DEADLINE_S + 10,
    )
