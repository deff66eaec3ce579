"""The bridge that joins the nodes of one cluster, and the routes to their pods.

Each node is a network namespace with one interface on the bridge; this host has the bridge's first
address, on which the API server and the DNS server listen. Masquerading is not used, and
iptables rules of this host are not changed: nodes route to each other's pods directly.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
from ipaddress import IPv4Address, IPv4Network
from typing import TYPE_CHECKING, Any

from testcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testcluster.state import State

__all__ = [
    "choose_range",
    "connect",
    "create",
    "ip",
    "node_address",
    "pod_range",
    "remove",
    "traces",
]

# Range of the second byte of a cluster's addresses: cloud networks rarely use this part of 10/8.
OCTETS = range(100, 250)
LOCK_DEADLINE_S = 60.0


def ip(*arguments: str) -> str:
    """Runs iproute2's ip; an error has its output."""
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ClusterError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout


def node_address(state: State, index: int) -> IPv4Address:
    """The address of the node with this index."""
    return state.node_network[10 + index]


def pod_range(state: State, index: int) -> IPv4Network:
    """The addresses of the pods of the node with this index."""
    return list(state.pod_network.subnets(new_prefix=24))[index]


def create(state: State) -> None:
    """Chooses an address range that is unused on this machine and creates the bridge."""
    with _machine_lock():
        state.octet = choose_range(json.loads(ip("-json", "route", "show", "table", "all")))
        state.save()  # before the bridge exists, so that `down` can remove it
        ip("link", "add", _bridge(state), "type", "bridge")
        ip(
            "address",
            "add",
            f"{state.gateway}/{state.node_network.prefixlen}",
            "dev",
            _bridge(state),
        )
        ip("link", "set", _bridge(state), "up")


def choose_range(routes: list[dict[str, Any]]) -> int:
    """The first octet K for which no route of this machine meets 10.K.0.0/16."""
    networks = [
        IPv4Network(route["dst"], strict=False)
        for route in routes
        if route["dst"][0].isdecimal() and ":" not in route["dst"]
    ]
    for octet in OCTETS:
        if not any(IPv4Network(f"10.{octet}.0.0/16").overlaps(network) for network in networks):
            return octet
    raise ClusterError(f"all of 10.{OCTETS[0]}.0.0 to 10.{OCTETS[-1]}.0.0 are in use here")


def disconnect(state: State, index: int) -> None:
    """Disconnects the node first, so that peers do not receive the kernel's FIN or RST packets."""
    with contextlib.suppress(ClusterError):
        ip("link", "delete", _veth(state, index))


def connect(state: State, index: int, init_pid: int) -> None:
    """Connects the node's namespace to the bridge, and adds routes to and from its pods."""
    veth, address = _veth(state, index), node_address(state, index)
    disconnect(state, index)  # the kernel may not have removed a killed node's interface yet
    ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", str(init_pid))
    ip("link", "set", veth, "master", _bridge(state), "up")
    lines = [
        "link set lo up",
        f"address add {address}/{state.node_network.prefixlen} dev eth0",
        "link set eth0 up",
        f"route add default via {state.gateway}",
    ]
    lines += [
        f"route add {pod_range(state, other)} via {node_address(state, other)}"
        for other in range(len(state.nodes))
        if other != index
    ]
    _batch(lines, init_pid)
    ip("route", "replace", str(pod_range(state, index)), "via", str(address))


def remove(state: State) -> None:
    """Deletes every interface of the cluster (routes go with them)."""
    for link in json.loads(ip("-json", "link", "show")):
        if link["ifname"].startswith(_prefix(state)):
            # Deleting a namespace may already have deleted the veth pair.
            with contextlib.suppress(ClusterError):
                ip("link", "delete", link["ifname"])


def traces(state: State) -> list[str]:
    """Interfaces, routes and iptables rules of this machine that are the cluster's."""
    lines = ip("-oneline", "link").splitlines()
    link_lines = [line for line in lines if _prefix(state) in line]
    if not state.octet:
        return link_lines
    lines = ip("route", "show", "table", "all").splitlines()
    if shutil.which("iptables-save"):
        save = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True)
        lines += save.stdout.splitlines()
    own = re.compile(rf"\b10\.{state.octet}\.\d|{_prefix(state)}")
    return link_lines + [line for line in lines if own.search(line)]


def _prefix(state: State) -> str:
    return f"ff{state.id}"


def _veth(state: State, index: int) -> str:
    return f"{_prefix(state)}n{index}"


def _bridge(state: State) -> str:
    return f"{_prefix(state)}br"


def _batch(lines: list[str], init_pid: int) -> None:
    result = subprocess.run(
        ["nsenter", "--target", str(init_pid), "--net", "--", "ip", "-batch", "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise ClusterError(f"the network of a node could not be set up: {result.stderr.strip()}")


@contextlib.contextmanager
def _machine_lock() -> Iterator[None]:
    """Lock of this machine: an abstract socket, which the kernel releases with the process."""
    deadline = time.monotonic() + LOCK_DEADLINE_S
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind("\0fireflyer-e2e-network")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"another cluster has held the network lock for {LOCK_DEADLINE_S:g} s"
                    ) from None
                time.sleep(0.05)
        yield
