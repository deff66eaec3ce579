"""The state folder of one cluster: layout, names, ports and address range.

Invariant: a resource is recorded here before it is created, so that `down` finds all resources.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import socket
from dataclasses import asdict, dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING

from testcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DEFAULT", "State", "free_ports"]

DEFAULT = Path(__file__).parents[1] / "build" / "cluster" / "default"

# Below Linux's range of ephemeral ports.
PORTS = range(20_000, 32_000)


@dataclass
class State:
    """One cluster. All paths and names follow from `folder`; the rest is in its state.json."""

    folder: Path
    light: bool = False
    kind: bool = False  # created by kind, which runs its processes
    engine: str = ""  # container engine of kind: docker or podman
    ports: dict[str, int] = field(default_factory=dict)
    octet: int = 0  # the cluster's addresses are 10.octet.0.0/16
    nodes: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Six characters unique to this folder; used in the names of interfaces and cgroups."""
        return hashlib.sha256(str(self.folder).encode()).hexdigest()[:6]

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    @property
    def server(self) -> str:
        """The API server's address on this machine."""
        return f"https://127.0.0.1:{self.ports['kube-apiserver']}"

    @property
    def server_for_nodes(self) -> str:
        """The API server's address on the cluster's bridge."""
        return f"https://{self.gateway}:{self.ports['kube-apiserver']}"

    def log(self, process: str) -> Path:
        """The log file of a process."""
        return self.folder / "logs" / f"{process}.log"

    @property
    def network(self) -> IPv4Network:
        """All addresses of the cluster: nodes, pods and Services."""
        return IPv4Network(f"10.{self.octet}.0.0/16")

    @property
    def gateway(self) -> IPv4Address:
        """This machine on the cluster's bridge; the API server and the DNS server listen there."""
        return self.network[1]

    @property
    def node_network(self) -> IPv4Network:
        """The addresses of nodes, on one bridge."""
        return IPv4Network(f"10.{self.octet}.0.0/20")

    @property
    def pod_network(self) -> IPv4Network:
        """The addresses of pods; each node has a /24 of it."""
        return IPv4Network(f"10.{self.octet}.64.0/18")

    @property
    def service_network(self) -> IPv4Network:
        """The addresses of Services."""
        return IPv4Network(f"10.{self.octet}.128.0/17")

    @property
    def dns_address(self) -> IPv4Address:
        """The Service address of the cluster's DNS."""
        return self.service_network[10]

    def save(self) -> None:
        """Writes state.json in one step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        values = asdict(self)
        del values["folder"]
        scratch = self.folder / "state.json.new"
        scratch.write_text(json.dumps(values, indent=2))
        scratch.rename(self.folder / "state.json")

    @classmethod
    def load(cls, folder: Path) -> State:
        """The cluster of this folder; fails if it does not exist."""
        folder = folder.resolve()
        try:
            values = json.loads((folder / "state.json").read_text())
        except FileNotFoundError:
            raise ClusterError(
                f"no cluster in {folder}; "
                f"start one with `python -m testcluster up --state {folder}`"
            ) from None
        return cls(folder=folder, **values)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Allows one `up` or `down` of a folder at a time; the lock file is next to the folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f".{folder.name}.lock")
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError(f"another command works on {folder}; wait until it ends") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def free_ports(names: tuple[str, ...]) -> dict[str, int]:
    """A currently free TCP port for each name, below the range of ephemeral ports."""
    ports: dict[str, int] = {}
    generator = random.Random(os.urandom(8))
    for port in generator.sample(PORTS, 500):
        if len(ports) == len(names):
            break
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("0.0.0.0", port))
                ports[names[len(ports)]] = port
    return ports
