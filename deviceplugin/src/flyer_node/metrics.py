"""Prometheus metrics of the agent: one registry, base units, all series initialized at startup.

A node has at most 1,500 series; labels are devices, resources, methods and codes, never pods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from flyer_node.health.state_machine import State
from flyer_node.inventory import FindingKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from flyer_node.health.policy import Policy
    from flyer_node.health.state_machine import DeviceHealth
    from flyer_node.health.store import Change, Subject
    from flyer_node.inventory import Inventory
    from flyer_node.inventory.hca import PortStatus

__all__ = ["Metrics"]

CODES = (
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "INTERNAL",
)
CALLS = ("ListAndWatch", "GetPreferredAllocation", "Allocate")
"""Methods whose series are initialized at startup; the other two never fail."""
FAST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)


class Metrics:
    """The metrics registry of the agent."""

    def __init__(self, resources: Iterable[str] = ()) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "flyer_node_requests",
            "Kubelet requests by resource, method and gRPC code",
            ["resource", "method", "code"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "flyer_node_request_seconds",
            "Time to answer a kubelet request, in seconds",
            ["resource", "method"],
            buckets=FAST,
            registry=registry,
        )
        self.registrations = Counter(
            "flyer_node_registrations",
            "Registration attempts with the kubelet",
            ["resource", "outcome"],
            registry=registry,
        )
        self.kubelet_restarts = Counter(
            "flyer_node_kubelet_restarts", "Observed kubelet restarts", registry=registry
        )
        self.devices = Gauge(
            "flyer_node_devices",
            "Advertised devices by resource and health",
            ["resource", "health"],
            registry=registry,
        )
        self.state = Gauge(
            "flyer_node_device_state",
            "1 for the current state of a device",
            ["kind", "device", "state"],
            registry=registry,
        )
        self.transitions = Counter(
            "flyer_node_device_transitions",
            "Device state transitions",
            ["kind", "before", "after"],
            registry=registry,
        )
        self.xids = Counter(
            "flyer_node_gpu_xid", "Xid errors by GPU", ["gpu", "xid", "class"], registry=registry
        )
        self.port_errors = Counter(
            "flyer_node_port_errors",
            "Increase of a port's error counters since the agent started",
            ["hca", "port", "counter"],
            registry=registry,
        )
        self.findings = Gauge(
            "flyer_node_findings",
            "Inconsistencies in the hardware inventory by kind",
            ["kind"],
            registry=registry,
        )
        self.worker_kills = Counter(
            "flyer_node_hardware_worker_kills",
            "Hardware workers that were killed after a timeout or died",
            registry=registry,
        )
        self.observed = Gauge(
            "flyer_node_last_observation_timestamp_seconds",
            "Unix time of the last observation of a source (0: none)",
            ["source"],
            registry=registry,
        )
        self.reports = Counter(
            "flyer_node_report_writes",
            "NodeHealth status writes by outcome",
            ["outcome"],
            registry=registry,
        )
        self.events = Counter(
            "flyer_node_events",
            "Kubernetes Events about devices by outcome; dropped: over the rate limit",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("posted", "failed", "dropped"):
            self.events.labels(outcome)
        self.probes = Counter(
            "flyer_node_gpu_probes",
            "Recovery probes of GPUs on probation",
            registry=registry,
        )
        self.kernel_log_lost = Counter(
            "flyer_node_kernel_log_lost",
            "Kernel log records overwritten before they were read",
            registry=registry,
        )
        self._port_last: dict[tuple[str, int], Mapping[str, int]] = {}
        self._zero(resources)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def value(self, name: str, **labels: str) -> float:
        """The current value of a series; KeyError if it does not exist."""
        value = self._registry.get_sample_value(name, labels)
        if value is None:
            raise KeyError(f"{name}{labels}")
        return value

    def _zero(self, resources: Iterable[str]) -> None:
        for resource in resources:
            for method in CALLS:
                for code in CODES:
                    self.requests.labels(resource, method, code)
            for outcome in ("ok", "failed"):
                self.registrations.labels(resource, outcome)
            for health in ("healthy", "unhealthy"):
                self.devices.labels(resource, health)
        for kind in ("gpu", "pair", "hca"):
            for before in State:
                for after in State:
                    if before is not after:
                        self.transitions.labels(kind, before.value, after.value)
        for source in ("driver", "events", "ports", "kernel-log", "inventory"):
            self.observed.labels(source)
        for outcome in ("ok", "failed"):
            self.reports.labels(outcome)

    def track(self, inventory: Inventory, policy: Policy) -> None:
        """Initializes the series of the node's devices and of every Xid in the policy."""
        for gpu in inventory.gpus:
            for rule in policy.xids.values():
                self.xids.labels(gpu.uuid, str(rule.code), rule.klass)
        counts = {kind.value: 0 for kind in FindingKind}
        for finding in inventory.findings:
            counts[finding.kind.value] += 1
        for kind, count in counts.items():
            self.findings.labels(kind).set(count)

    def request(self, resource: str, method: str, code: str, seconds: float | None = None) -> None:
        """Counts a kubelet request."""
        self.requests.labels(resource, method, code).inc()
        if seconds is not None:
            self.request_seconds.labels(resource, method).observe(seconds)

    def registration(self, resource: str, *, ok: bool) -> None:
        """Counts a registration attempt."""
        self.registrations.labels(resource, "ok" if ok else "failed").inc()

    def changed(self, change: Change) -> None:
        """Counts a state transition."""
        after = change.after.state.value
        self.transitions.labels(change.subject.kind, change.before.value, after).inc()

    def states(self, health: Mapping[Subject, DeviceHealth]) -> None:
        """Sets the states of all devices."""
        for subject, record in health.items():
            for state in State:
                value = 1 if record.state is state else 0
                self.state.labels(subject.kind, subject.id, state.value).set(value)

    def ports(self, statuses: Iterable[PortStatus]) -> None:
        """Adds the increase of the error counters; a counter that decreased was reset."""
        for status in statuses:
            key = (status.hca, status.port)
            before = self._port_last.get(key, status.counters)
            for name, value in status.counters.items():
                increase = max(0, value - before.get(name, value))
                self.port_errors.labels(status.hca, str(status.port), name).inc(increase)
            self._port_last[key] = status.counters
