"""mgmtd's status as Prometheus metrics."""

import json
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from threefs.errors import Unavailable
from threefs.exporter import StatusCollector, scrub_families


def node(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "node": number, "alive": True, "heartbeat_age_ms": 1500,
        "used_bytes": 10, "capacity_bytes": 100, **changes,
    }  # fmt: skip


STATUS = {
    "cluster": {
        "chains": 4,
        "chains_whole": 1,
        "chains_down": 1,
        "nodes": [node(1), node(2, alive=False, heartbeat_age_ms=None)],
    },
    "domains": {"violations_total": 2},
    "unconfirmed": {"chains": [{"chain": 3, "reason": "none"}], "unknown_targets": []},
    "moves": {
        "leaving": [2],
        "under_way": [{"stalled": None}, {"stalled": {"cause": "dead_node"}}],
    },
    "routing": {
        "nodes": {"1": {"location": "A//h1"}, "2": {"location": "//h2"}, "3": {"location": "A"}},
        "chains": {
            "1": {"targets": [{"node": 1, "state": "SERVING"}, {"node": 2, "state": "SYNCING"}]},
            "2": {"targets": [{"node": 1, "state": "LASTSRV"}, {"node": 3, "state": "OFFLINE"}]},
        },
    },
    "mgmtds": [
        {"address": "a:1", "state": "serving", "leads": True},
        {"address": "b:1", "state": "standby", "leads": False},
    ],
    "metas": [{"address": "a:2", "state": "serving"}, {"address": "b:2", "state": "unreachable"}],
}


def scrape(collector: Collector) -> set[str]:
    registry = CollectorRegistry()
    registry.register(collector)
    return {line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"}


def test_a_status_becomes_metrics() -> None:
    assert scrape(StatusCollector(lambda: json.dumps(STATUS))) == {
        "threefs_up 1.0",
        'threefs_service_up{address="a:1",service="mgmtd"} 1.0',
        'threefs_service_up{address="b:1",service="mgmtd"} 1.0',
        'threefs_service_up{address="a:2",service="meta"} 1.0',
        'threefs_service_up{address="b:2",service="meta"} 0.0',
        'threefs_mgmtd_primary{address="a:1"} 1.0',
        'threefs_mgmtd_primary{address="b:1"} 0.0',
        'threefs_nodes{state="alive"} 1.0',
        'threefs_nodes{state="dead"} 1.0',
        'threefs_targets{state="serving"} 1.0',
        'threefs_targets{state="syncing"} 1.0',
        'threefs_targets{state="waiting"} 0.0',
        'threefs_targets{state="lastsrv"} 1.0',
        'threefs_targets{state="offline"} 1.0',
        'threefs_chains{state="whole"} 1.0',
        'threefs_chains{state="degraded"} 2.0',
        'threefs_chains{state="unavailable"} 1.0',
        "threefs_domain_violations 2.0",
        "threefs_unconfirmed_chains 1.0",
        "threefs_unknown_targets 0.0",
        'threefs_moves{state="running"} 1.0',
        'threefs_moves{state="stalled"} 1.0',
        'threefs_storage_draining{storage="1"} 0.0',
        'threefs_storage_draining{storage="2"} 1.0',
        'threefs_storage_replicas{storage="1"} 2.0',
        'threefs_storage_replicas{storage="2"} 1.0',
        'threefs_storage_replicas{storage="3"} 1.0',
        'threefs_storage_sole_replicas{storage="1"} 1.0',
        'threefs_storage_sole_replicas{storage="2"} 0.0',
        'threefs_nodes_without_domain{level="zone"} 1.0',
        'threefs_nodes_without_domain{level="rack"} 0.0',
        'threefs_nodes_without_domain{level="host"} 1.0',
        'threefs_heartbeat_age_seconds{storage="1"} 1.5',
        'threefs_capacity_bytes{storage="1"} 100.0',
        'threefs_capacity_bytes{storage="2"} 100.0',
        'threefs_used_bytes{storage="1"} 10.0',
        'threefs_used_bytes{storage="2"} 10.0',
    }


def scrub(node: int, **status: Any) -> dict[str, Any]:
    counts = {"bytes": 5, "damaged": 3, "repaired": 2}
    known = {
        "damaged": 0, "different": 0, "running": None, "last": None, "total": counts, **status,
    }  # fmt: skip
    return {"node": node, "scrub": known}


def test_scrubs_become_metrics_of_the_services_that_answer() -> None:
    scrubs = [
        scrub(1, last={"started_unix_s": 900}),
        scrub(1, damaged=1, different=4, running={"started_unix_s": 800}),
        scrub(2),
        {"node": 3, "scrub": None},
    ]

    class Scrubs(Collector):
        def collect(self) -> Iterable[Metric]:
            return scrub_families(scrubs, 1000.0)

    assert scrape(Scrubs()) == {
        'threefs_scrub_damaged_chunks{storage="1"} 1.0',
        'threefs_scrub_damaged_chunks{storage="2"} 0.0',
        'threefs_scrub_different_chunks{storage="1"} 4.0',
        'threefs_scrub_different_chunks{storage="2"} 0.0',
        'threefs_scrub_age_seconds{storage="1"} 200.0',
        'threefs_scrub_read_bytes_total{storage="1"} 10.0',
        'threefs_scrub_read_bytes_total{storage="2"} 5.0',
        'threefs_scrub_detected_chunks_total{storage="1"} 6.0',
        'threefs_scrub_detected_chunks_total{storage="2"} 3.0',
        'threefs_scrub_repaired_chunks_total{storage="1"} 4.0',
        'threefs_scrub_repaired_chunks_total{storage="2"} 2.0',
    }


def test_a_further_disk_of_a_service_is_labeled_with_both_numbers() -> None:
    status = {
        **STATUS,
        "cluster": {**STATUS["cluster"], "nodes": [node(2_000_003)]},
        "moves": {"leaving": [2_000_003], "under_way": []},
        "routing": {
            "nodes": {},
            "chains": {"1": {"targets": [{"node": 2_000_003, "state": "SERVING"}]}},
        },
    }

    class Scrubs(Collector):
        def collect(self) -> Iterable[Metric]:
            return scrub_families([scrub(2_000_003)], 1000.0)

    metrics = scrape(StatusCollector(lambda: json.dumps(status))) | scrape(Scrubs())
    labeled = {line.rpartition(" ")[0] for line in metrics if "storage=" in line}
    assert {line.partition("{")[2] for line in labeled} == {'storage="3.2"}'}
    assert {line.partition("{")[0] for line in labeled} >= {
        "threefs_storage_draining",
        "threefs_storage_replicas",
        "threefs_storage_sole_replicas",
        "threefs_heartbeat_age_seconds",
        "threefs_capacity_bytes",
        "threefs_used_bytes",
        "threefs_scrub_damaged_chunks",
    }


def test_an_unreachable_mgmtd_is_reported_without_other_metrics() -> None:
    def ask() -> str:
        raise Unavailable("mgmtd does not answer", who="mgmtd")

    assert scrape(StatusCollector(ask)) == {"threefs_up 0.0"}


def test_entries_in_the_trash_are_counted() -> None:
    collector = StatusCollector(lambda: json.dumps(STATUS), trash=lambda: 7)
    assert "threefs_trash_entries 7.0" in scrape(collector)

    def earlier() -> int:
        raise Unavailable("the metadata service is of an earlier release", who="meta")

    metrics = scrape(StatusCollector(lambda: json.dumps(STATUS), trash=earlier))
    assert "threefs_up 1.0" in metrics
    assert not [metric for metric in metrics if metric.startswith("threefs_trash")]
