"""`python -m threefs.exporter`: exports the status of a 3FS cluster to Prometheus.

It runs next to mgmtd and queries it when it is scraped, at most once a second; it stores nothing.
If mgmtd does not reply, the scrape succeeds with `threefs_up` 0: the alert then names the cluster,
not the exporter.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from threefs.client import connect
from threefs.errors import ThreeFSError
from threefs.metrics_server import MetricsServer
from threefs.nodes import node_label

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import Metric

__all__ = ["StatusCollector", "families", "main", "scrub_families"]

TARGET_STATES = ("serving", "syncing", "waiting", "lastsrv", "offline")
TIMEOUT_SECONDS = 5.0
"""Below Prometheus' default of 10 s: a complete scrape is more useful than an aborted one."""


class StatusCollector(Collector):
    """Queries the status at each scrape.

    `query` returns the result of `Client.status`, `scrub` that of `Client.scrub`, and `trash` that
    of `Client.trash_count`.
    """

    def __init__(
        self,
        query: Callable[[], str],
        scrub: Callable[[], str] | None = None,
        trash: Callable[[], int] | None = None,
    ) -> None:
        self._query = query
        self._scrub = scrub
        self._trash = trash

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
        if status is not None and self._scrub is not None:
            # A service that does not answer, or of an earlier release, has no such metrics.
            with suppress(ThreeFSError, OSError):
                yield from scrub_families(json.loads(self._scrub()), time.time())
        if status is not None and self._trash is not None:
            with suppress(ThreeFSError, OSError):
                yield GaugeMetricFamily(
                    "threefs_trash_entries",
                    "Removed files and directories in the trash of all volumes, counted up to "
                    "100,000.",
                    value=self._trash(),
                )


def families(status: dict[str, Any]) -> Iterable[Metric]:
    """The metrics of a status."""
    cluster, chains = status["cluster"], status["routing"]["chains"].values()
    nodes = cluster["nodes"]
    alive = sum(node["alive"] for node in nodes)
    yield _filled(
        GaugeMetricFamily(
            "threefs_nodes", "Storage nodes, which are disks: alive, dead.", labels=["state"]
        ),
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
    yield _filled(
        GaugeMetricFamily(
            "threefs_mgmtd_primary",
            "1 if the mgmtd at this address is the primary, 0 if it is a standby.",
            labels=["address"],
        ),
        {service["address"]: float(service["leads"]) for service in status["mgmtds"]},
    )
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
    if (unconfirmed := status.get("unconfirmed")) is not None:
        yield GaugeMetricFamily(
            "threefs_unconfirmed_chains",
            "Chains that wait for replicas after a restore of mgmtd's store.",
            value=len(unconfirmed["chains"]),
        )
        yield GaugeMetricFamily(
            "threefs_unknown_targets",
            "Targets with data that are not in the restored chain table.",
            value=len(unconfirmed["unknown_targets"]),
        )
    if (moves := status.get("moves")) is not None:
        stalled = sum(move["stalled"] is not None for move in moves["under_way"])
        yield _filled(
            GaugeMetricFamily(
                "threefs_moves",
                "Replicas being moved to another node: running, stalled (no progress).",
                labels=["state"],
            ),
            {"running": len(moves["under_way"]) - stalled, "stalled": stalled},
        )
        yield _filled(
            GaugeMetricFamily(
                "threefs_storage_draining",
                "1 if the storage node is being drained, or is drained; otherwise 0.",
                labels=["storage"],
            ),
            {node_label(node["node"]): float(node["node"] in moves["leaving"]) for node in nodes},
        )
    yield from _replica_families(status)
    yield _filled(
        GaugeMetricFamily(
            "threefs_nodes_without_domain",
            "Storage nodes without a zone, rack or host, if others have one.",
            labels=["level"],
        ),
        _without_domain([node.get("location", "") for node in status["routing"]["nodes"].values()]),
    )
    yield _filled(
        GaugeMetricFamily(
            "threefs_heartbeat_age_seconds",
            "Time since the last heartbeat of a storage node, in seconds.",
            labels=["storage"],
        ),
        {
            node_label(node["node"]): node["heartbeat_age_ms"] / 1000
            for node in nodes
            if node["heartbeat_age_ms"] is not None
        },
    )
    yield _filled(
        GaugeMetricFamily(
            "threefs_capacity_bytes",
            "Capacity of a storage node, in bytes; 0: unknown.",
            labels=["storage"],
        ),
        {node_label(node["node"]): node["capacity_bytes"] for node in nodes},
    )
    yield _filled(
        GaugeMetricFamily(
            "threefs_used_bytes", "Used bytes of a storage node.", labels=["storage"]
        ),
        {node_label(node["node"]): node["used_bytes"] for node in nodes},
    )


def _replica_families(status: dict[str, Any]) -> Iterable[Metric]:
    """Replicas by storage node, and those that serve alone; 0 for a service without any."""
    replicas = Counter({node["node"]: 0 for node in status["cluster"]["nodes"]})
    sole = Counter(replicas)
    for chain in status["routing"]["chains"].values():
        replicas.update(place["node"] for place in chain["targets"])
        serving = [place["node"] for place in chain["targets"] if place["state"] == "SERVING"]
        if len(serving) == 1:
            sole.update(serving)
    yield _filled(
        GaugeMetricFamily(
            "threefs_storage_replicas",
            "Replicas of chains on a storage node, in any state.",
            labels=["storage"],
        ),
        {node_label(node): count for node, count in replicas.items()},
    )
    yield _filled(
        GaugeMetricFamily(
            "threefs_storage_sole_replicas",
            "Chains of which only this storage node has a serving replica.",
            labels=["storage"],
        ),
        {node_label(node): count for node, count in sole.items()},
    )


def _without_domain(locations: list[str]) -> dict[str, float]:
    """Number of locations without a part, by level; 0 if none has it."""
    parts = [location.split("/") for location in locations]
    missing: dict[str, float] = {}
    for number, level in enumerate(("zone", "rack", "host")):
        count = sum(len(of_node) <= number or not of_node[number] for of_node in parts)
        missing[level] = count if count < len(parts) else 0
    return missing


def scrub_families(scrubs: list[dict[str, Any]], now: float) -> Iterable[Metric]:
    """The metrics of the scrubs, by storage node; services that do not answer have none."""
    nodes: dict[str, list[dict[str, Any]]] = {}
    for scrub in scrubs:
        if scrub["scrub"] is not None:
            nodes.setdefault(node_label(scrub["node"]), []).append(scrub["scrub"])

    def sums(key: str) -> dict[str, float]:
        return {node: sum(status[key] for status in statuses) for node, statuses in nodes.items()}

    def totals(key: str) -> dict[str, float]:
        return {
            node: sum(status["total"][key] for status in statuses)
            for node, statuses in nodes.items()
        }

    yield _filled(
        GaugeMetricFamily(
            "threefs_scrub_damaged_chunks",
            "Damaged chunks that no other replica could provide.",
            labels=["storage"],
        ),
        sums("damaged"),
    )
    yield _filled(
        GaugeMetricFamily(
            "threefs_scrub_different_chunks",
            "Chunks that are newer than on the previous replica of their chain.",
            labels=["storage"],
        ),
        sums("different"),
    )
    yield _filled(
        GaugeMetricFamily(
            "threefs_scrub_age_seconds",
            "Time since the start of the last complete scrub, or of the first scrub until it is "
            "complete, in seconds; of the target where it is longest.",
            labels=["storage"],
        ),
        {node: now - start for node, start in _least_recent(nodes).items()},
    )
    yield _filled(
        CounterMetricFamily(
            "threefs_scrub_read_bytes",
            "Bytes that scrubs have read and verified.",
            labels=["storage"],
        ),
        totals("bytes"),
    )
    yield _filled(
        CounterMetricFamily(
            "threefs_scrub_detected_chunks",
            "Damaged chunks that scrubs or reads have detected.",
            labels=["storage"],
        ),
        totals("damaged"),
    )
    yield _filled(
        CounterMetricFamily(
            "threefs_scrub_repaired_chunks",
            "Damaged chunks that were repaired from another replica.",
            labels=["storage"],
        ),
        totals("repaired"),
    )


def _least_recent(nodes: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Start of the least recent scrub of each node."""
    starts: dict[str, float] = {}
    for node, statuses in nodes.items():
        for status in statuses:
            scrub = status["last"] or status["running"]
            if scrub is not None:
                starts[node] = min(starts.get(node, math.inf), scrub["started_unix_s"])
    return starts


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: dict[str, float]) -> Metric:
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
    registry.register(StatusCollector(client.status, client.scrub, client.trash_count))
    server = MetricsServer(registry, options.port)
    server.start()
    ended.wait()
    server.stop()
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
