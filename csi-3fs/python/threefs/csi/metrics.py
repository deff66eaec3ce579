"""Metrics of the driver, for Prometheus; names begin with `threefs_csi_`, units are base units."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from threefs.csi.errors import CsiError
from threefs.metrics_server import MetricsServer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

    from threefs.csi.holder_client import Holder

__all__ = ["Metrics", "NodeCollector", "serve"]

BUCKETS_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STATES = ("serving", "starting", "stopped", "down", "ended", "lost")


class Metrics:
    """One registry a process, so that tests do not share counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "threefs_csi_calls_total",
            "Calls of the driver by name and gRPC code.",
            ["call", "code"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "threefs_csi_call_seconds",
            "How long calls took.",
            ["call"],
            buckets=BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "threefs_csi_calls_in_flight", "Calls under way.", registry=self.registry
        )
        self.ephemeral_left = Counter(
            "threefs_csi_inline_removals_deferred_total",
            "Inline volumes whose directory could not be removed at once; the sweep removes them.",
            registry=self.registry,
        )
        self.tickets = Counter(
            "threefs_csi_tickets_total",
            "Tickets for volumes by result: issued, or refused (also: the issuer did not answer).",
            ["result"],
            registry=self.registry,
        )
        self.unreadable = Counter(
            "threefs_csi_unreadable_records_total",
            "Times that a volume's record could not be read and the volume was left out.",
            registry=self.registry,
        )
        self.undone = Counter(
            "threefs_csi_mounts_undone_total",
            "Mounts undone by how: clean, unseen (synced, but without fusectl nothing says whether "
            "all was answered), detached, or unwritten (detached, data not written).",
            ["how"],
            registry=self.registry,
        )


class NodeCollector(Collector):
    """What the holder says at the moment of a scrape."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder

    def collect(self) -> Iterable[Metric]:
        """Mounts by state of their daemon, and replacements of daemons that live."""
        up = GaugeMetricFamily("threefs_csi_holder_up", "1 when the holder answers.")
        mounts = GaugeMetricFamily(
            "threefs_csi_mounts",
            "Volumes mounted on this node by their daemon's state.",
            labels=["state"],
        )
        restarts = CounterMetricFamily(
            "threefs_csi_daemon_restarts", "Replacements of daemons of present mounts."
        )
        try:
            table, held = self._holder.state()
        except CsiError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        kept = {served.device for served in held}
        lost = {mounted.device for mounted in table} - kept
        for state in STATES:
            count = sum(served.state == state for served in held)
            mounts.add_metric([state], len(lost) if state == "lost" else count)
        restarts.add_metric([], sum(served.restarts for served in held))
        yield from (up, mounts, restarts)


def serve(metrics: Metrics, port: int) -> None:
    """Answer scrapes; port 0 is no."""
    if port:
        MetricsServer(metrics.registry, port).start()
