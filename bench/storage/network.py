"""iperf3 over loopback, and a cluster without shared memory, whose clients use TCP."""

from __future__ import annotations

import json
import socket
import subprocess
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from bench.storage_load import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bench.storage_load import Cluster

__all__ = ["iperf3", "received", "serving_tcp"]

SECONDS = 3
HOST = "127.0.0.1"


def iperf3() -> float:
    """Bytes per second that one TCP stream carries over loopback, its defaults otherwise."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(
        ["iperf3", "--server", "--one-off", "--bind", HOST, "--port", port, "--forceflush"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("Server listening"):
                break
        command = ["iperf3", "--client", HOST, "--port", port, "--time", str(SECONDS), "--json"]
        result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    finally:
        server.kill()
        server.communicate()
    return received(result.stdout)


def received(output: str) -> float:
    """Bytes per second of the receiver in the JSON of iperf3.

    Raises:
        RuntimeError: iperf3 reports an error.
    """
    report = json.loads(output)
    if "error" in report:
        raise RuntimeError(f"iperf3: {report['error']}")
    return float(report["end"]["sum_received"]["bits_per_second"]) / 8


@contextmanager
def serving_tcp(folder: Path) -> Iterator[Cluster]:
    """A cluster all of whose connections use TCP.

    A service whose name for shared memory is taken offers none. The names follow from the ports,
    which a folder keeps, so the cluster is started once before. No service has a name that this
    process could bind.
    """
    with serving(folder):
        pass
    ports = json.loads((folder / "cluster" / "settings.json").read_text())["ports"]
    with ExitStack() as stack:
        for port in ports.values():
            name = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            # Bound and not listening: clients are refused and use TCP.
            name.bind(f"\0fabric-rpc {HOST}:{port}")
        yield stack.enter_context(serving(folder))
