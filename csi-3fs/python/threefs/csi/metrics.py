"""Metrics of the driver, for Prometheus; names start with `threefs_csi_`, units are base units."""

from __future__ import annotations

import operator
import threading
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from threefs.csi.errors import CsiError
from threefs.csi.mount_manager.read_bytes import DISTANCES
from threefs.metrics_server import MetricsServer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from prometheus_client import Metric

    from threefs.csi.mount_manager_client import MountManager

__all__ = ["Metrics", "NodeCollector", "ReadTotals", "serve"]

BUCKETS_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
NOTHING = (0,) * len(DISTANCES)
STATES = ("serving", "starting", "stopped", "down", "ended", "lost")


class Metrics:
    """Metrics in a separate registry, so that tests do not share counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "threefs_csi_calls_total",
            "Calls to the driver, by name and gRPC code.",
            ["call", "code"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "threefs_csi_call_seconds",
            "Duration of calls, in seconds.",
            ["call"],
            buckets=BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "threefs_csi_calls_in_flight", "Calls in progress.", registry=self.registry
        )
        self.removals_deferred = Counter(
            "threefs_csi_inline_removals_deferred_total",
            "Inline volumes whose directory could not be removed immediately; the sweep "
            "removes them.",
            registry=self.registry,
        )
        self.tickets = Counter(
            "threefs_csi_tickets_total",
            "Ticket requests by result: issued, or refused (including when the issuer did "
            "not answer).",
            ["result"],
            registry=self.registry,
        )
        self.unreadable = Counter(
            "threefs_csi_unreadable_records_total",
            "Volume records that could not be parsed; their volumes were skipped.",
            registry=self.registry,
        )
        self.copies = Counter(
            "threefs_csi_copies_total",
            "Copies of snapshots and volumes to new volumes, by result: complete or failed. "
            "A failed copy is continued by the next call.",
            ["result"],
            registry=self.registry,
        )
        self.unmounts = Counter(
            "threefs_csi_unmounts_total",
            "Unmounts by result: clean, unverified (synced, but without fusectl it is "
            "unknown whether "
            "all requests were answered), detached, or data_lost (detached, data not written).",
            ["result"],
            registry=self.registry,
        )


class ReadTotals:
    """Bytes that mounts have read since the first scrape, by distance; thread-safe.

    Counters of a mount end with it, and those of the next mount with its number start at 0.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Mapping[str, Sequence[int]] | None = None
        self._totals = list(NOTHING)

    def update(self, mounts: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the totals with what the mounts have read since the last call."""
        with self._lock:
            # What was read before this process started is not an increase.
            for device, counters in mounts.items() if self._last is not None else ():
                before = (self._last or {}).get(device, NOTHING)
                if any(map(operator.gt, before, counters)):
                    before = NOTHING
                for index, (old, new) in enumerate(zip(before, counters, strict=True)):
                    self._totals[index] += new - old
            self._last = dict(mounts)
            return dict(zip(DISTANCES, self._totals, strict=True))


class NodeCollector(Collector):
    """State of the mount manager at each scrape."""

    def __init__(self, mount_manager: MountManager) -> None:
        self._mount_manager = mount_manager
        self._reads = ReadTotals()

    def collect(self) -> Iterable[Metric]:
        """Return mounts by state of their daemon, daemon restarts, and bytes read."""
        up = GaugeMetricFamily(
            "threefs_csi_mount_manager_up", "1 if the mount manager answers, otherwise 0."
        )
        by_state = GaugeMetricFamily(
            "threefs_csi_mounts",
            "Volumes mounted on this node, by state of their daemon.",
            labels=["state"],
        )
        restarts = CounterMetricFamily(
            "threefs_csi_daemon_restarts", "Daemon restarts of the present mounts."
        )
        read = CounterMetricFamily(
            "threefs_csi_read_bytes",
            "Bytes that mounts have read from storage services, by the distance of the replica.",
            labels=["distance"],
        )
        try:
            mount_points, mounts = self._mount_manager.state()
            totals = self._reads.update(self._mount_manager.read_bytes())
        except CsiError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        managed = {mount.device for mount in mounts}
        unmanaged = {point.device for point in mount_points} - managed
        for state in STATES:
            count = sum(mount.state == state for mount in mounts)
            by_state.add_metric([state], len(unmanaged) if state == "lost" else count)
        restarts.add_metric([], sum(mount.restarts for mount in mounts))
        for distance, total in totals.items():
            read.add_metric([distance], total)
        yield from (up, by_state, restarts, read)


def serve(metrics: Metrics, port: int) -> None:
    """Serve metrics; not for port 0."""
    if port:
        MetricsServer(metrics.registry, port).start()
