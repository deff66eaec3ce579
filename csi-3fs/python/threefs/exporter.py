"""`python -m threefs.exporter`: exports the status of a 3FS cluster to Prometheus.

It runs next to mgmtd and queries it when it is scraped, at most once a second; it stores nothing.
If mgmtd does not reply, the scrape succeeds with `threefs_up` 0: the alert then names the cluster,
not the exporter.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from threefs.client import connect
from threefs.errors import ThreeFSError
from threefs.metrics_server import MetricsServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import Metric

__all__ = ["StatusCollector", "families", "main"]

TARGET_STATES = ("serving", "syncing", "waiting", "lastsrv", "offline")
TIMEOUT_SECONDS = 5.0
"""Below Prometheus' default of 10 s: a complete scrape is more useful than an aborted one."""


class StatusCollector(Collector):
    """Queries the status at each scrape; `query` returns the result of `Client.status`."""

    def __init__(self, query: Callable[[], str]) -> None:
        self._query = query

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        try:
            status: dict[str, Any] | None = json.loads(self._query())
        except (ThreeFSError, OSError):
            status = None
        up = GaugeMetricFamily("threefs_up", "1 if mgmtd responds, otherwise 0.")
        up.add_metric([], float(status is not None))
        yield up
        if status is not None:
            yield from families(status)


def families(status: dict[str, Any]) -> Iterable[Metric]:
    """The metrics of a status."""
    cluster, chains = status["cluster"], status["routing"]["chains"].values()
    nodes = cluster["nodes"]
    alive = sum(node["alive"] for node in nodes)
    yield _filled(
        GaugeMetricFamily("threefs_nodes", "Storage services: alive, dead.", labels=["state"]),
        {"alive": alive, "dead": len(nodes) - alive},
    )
    service_up = GaugeMetricFamily(
        "threefs_service_up",
        "1 if the mgmtd or metadata service at this address serves or stands by, otherwise 0.",
        labels=["service", "address"],
    )
    for kind in ("mgmtd", "meta"):
        for service in status[f"{kind}s"]:
            up = service["state"] in ("serving", "standby")
            service_up.add_metric([kind, service["address"]], float(up))
    yield service_up
    states = Counter(place["state"].lower() for chain in chains for place in chain["targets"])
    yield _filled(
        GaugeMetricFamily("threefs_targets", "Targets by state.", labels=["state"]),
        {state: states[state] for state in TARGET_STATES},
    )
    whole, down = cluster["chains_whole"], cluster["chains_down"]
    yield _filled(
        GaugeMetricFamily(
            "threefs_chains",
            "Chains: whole, degraded (a replica is missing), unavailable (no replica serves).",
            labels=["state"],
        ),
        {"whole": whole, "degraded": cluster["chains"] - whole - down, "unavailable": down},
    )
    if (domains := status.get("domains")) is not None:
        yield GaugeMetricFamily(
            "threefs_domain_violations",
            "Chains with more replicas in a failure domain than necessary.",
            value=domains["violations_total"],
        )
    yield _filled(
        GaugeMetricFamily(
            "threefs_heartbeat_age_seconds",
            "Time since the last heartbeat of a storage service, in seconds.",
            labels=["storage"],
        ),
        {
            str(node["node"]): node["heartbeat_age_ms"] / 1000
            for node in nodes
            if node["heartbeat_age_ms"] is not None
        },
    )
    yield _filled(
        GaugeMetricFamily(
            "threefs_capacity_bytes",
            "Capacity of a storage service, in bytes; 0: unknown.",
            labels=["storage"],
        ),
        {str(node["node"]): node["capacity_bytes"] for node in nodes},
    )
    yield _filled(
        GaugeMetricFamily(
            "threefs_used_bytes", "Used bytes of a storage service.", labels=["storage"]
        ),
        {str(node["node"]): node["used_bytes"] for node in nodes},
    )


def _filled(family: GaugeMetricFamily, values: dict[str, float]) -> Metric:
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def main(arguments: list[str] | None = None) -> int:
    """Serve scrapes until SIGTERM."""
    parser = argparse.ArgumentParser(prog="threefs.exporter", description=__doc__)
    parser.add_argument("--cluster", default=os.environ.get("THREEFS_CLUSTER"), help="cluster.json")
    parser.add_argument("--port", type=int, default=os.environ.get("THREEFS_METRICS_PORT", "9180"))
    options = parser.parse_args(arguments)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: ended.set())
    try:
        client = connect(options.cluster, timeout_seconds=TIMEOUT_SECONDS)
    except ThreeFSError as error:
        sys.stderr.write(f"threefs.exporter: error: {error}\n")
        return 1
    registry = CollectorRegistry()
    registry.register(StatusCollector(client.status))
    server = MetricsServer(registry, options.port)
    server.start()
    ended.wait()
    server.stop()
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
