"""Health store: the health of all devices, updated by faults and observations.

No I/O and no clock: times are arguments, and `drain_changes` returns state transitions. The agent
drives it in production; tests drive it directly.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from flyer_node.health import detectors, probes
from flyer_node.health.policy import Action
from flyer_node.health.state_machine import (
    DeviceHealth,
    Fault,
    Observation,
    Severity,
    State,
    Timings,
    apply_fault,
    apply_probe,
    mark_unobservable,
    observe,
    start_probation,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from flyer_node.hardware.driver import EventKind, GpuProbe, GpuStatus
    from flyer_node.health.policy import Policy, XidRule
    from flyer_node.inventory import Inventory
    from flyer_node.inventory.hca import PortStatus

__all__ = ["Change", "FaultEvent", "HealthStore", "Kind", "Subject", "port_id"]

Kind = Literal["gpu", "pair", "hca"]
DAY_SECONDS = 86_400.0
FAULT_EVENTS_MAX = 64
"""Number of fault events kept as evidence."""


@dataclass(frozen=True, slots=True, order=True)
class Subject:
    """A device, by kind and device plugin id."""

    kind: Kind
    id: str


@dataclass(frozen=True, slots=True)
class Change:
    """A state transition of a device."""

    subject: Subject
    before: State
    after: DeviceHealth


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """An observed fault, kept after the device has recovered."""

    at: float
    device: str
    code: str
    message: str
    count: int = 1


@dataclass(slots=True)
class _LastXid:
    source: str
    at: float


def port_id(hca: str, port: int) -> str:
    """The id of a port."""
    return f"{hca}-{port}"


class HealthStore:
    """Health of all devices, by subject."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.health: dict[Subject, DeviceHealth] = {}
        self.fault_events: deque[FaultEvent] = deque(maxlen=FAULT_EVENTS_MAX)
        self._changes: list[Change] = []
        self._gpu_statuses: dict[str, GpuStatus] = {}
        self._xids: dict[tuple[str, int], _LastXid] = {}
        self._software: dict[tuple[str, int], dict[str, float]] = {}
        self._port_counters: dict[str, Mapping[str, int]] = {}
        self._port_down_since: dict[str, float] = {}
        self._flaps: dict[str, tuple[float, ...]] = {}
        # The first sample of a probation.
        self._gpu_samples: dict[str, GpuProbe] = {}
        self._pair_probations: set[Subject] = set()
        self._port_samples: dict[str, PortStatus] = {}
        timers = policy.timers
        self._timings = {
            "gpu": Timings(
                timers.gpu_hold, timers.gpu_hold_max, timers.gpu_probation, timers.suspect
            ),
            "pair": Timings(
                timers.pair_hold, timers.gpu_hold_max, timers.pair_probation, timers.suspect
            ),
            "hca": Timings(
                timers.port_hold, timers.gpu_hold_max, timers.port_probation, timers.suspect
            ),
        }

    def track(self, inventory: Inventory, now: float) -> None:
        """Adds a record for each new device of the inventory and drops records of removed ones."""
        subjects = {Subject("gpu", gpu.uuid) for gpu in inventory.gpus}
        subjects |= {Subject("pair", bridge.id) for bridge in inventory.bridges}
        subjects |= {
            Subject("hca", port_id(hca.name, port.number))
            for hca in inventory.hcas
            for port in hca.ports
        }
        for removed in self.health.keys() - subjects:
            del self.health[removed]
            self._gpu_statuses.pop(removed.id, None)
        for subject in sorted(subjects - self.health.keys()):
            self.health[subject] = DeviceHealth(since=now)

    def restore(self, records: Mapping[Subject, DeviceHealth], *, same_boot: bool) -> None:
        """Restores the records of an earlier agent; a reboot counts as a reset of every device."""
        for subject, record in records.items():
            if subject in self.health:
                booted = replace(record, reset_seen=True, unresponsive=False, recovery_action="")
                self.health[subject] = record if same_boot else booted

    def drain_changes(self) -> list[Change]:
        """Returns the state transitions since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def out_of_service(self, kind: Kind) -> frozenset[str]:
        """Ids of devices of this kind that must not be allocated."""
        return frozenset(
            subject.id
            for subject, record in self.health.items()
            if subject.kind == kind and not record.in_service
        )

    def xid(
        self, inventory: Inventory, uuid: str, code: int, now: float, *, source: str, **details: str
    ) -> bool:
        """Applies an Xid; False if another source reported it already. `details`: process, line."""
        key = (uuid, code)
        last = self._xids.get(key)
        if last and last.source != source and now - last.at < self._policy.timers.merge:
            return False
        self._xids[key] = _LastXid(source, now)
        rule = self._policy.rule(code)
        process, line = details.get("process", ""), details.get("line", "")
        evidence = line or f"{source}: Xid {code}" + (f", pid {process}" if process else "")
        self._record_fault(FaultEvent(now, uuid, f"Xid{code}", evidence))
        gpu = Subject("gpu", uuid)
        if rule.action is Action.UNHEALTHY:
            self._apply_fault(gpu, detectors.xid_fault(rule, Severity.UNHEALTHY, evidence), now)
        elif rule.action is Action.SUSPECT:
            self._apply_fault(gpu, detectors.xid_fault(rule, Severity.SUSPECT, evidence), now)
        elif rule.action is Action.PAIR:
            self._pair(inventory, rule, gpu, evidence, now)
        elif rule.recurrence:
            # Driver events do not name the process: a burst of them counts as one.
            burst = f"burst {now // self._policy.timers.merge:.0f}"
            self._recurrence(rule, gpu, process or burst, evidence, now)
        return True

    def event(self, uuid: str, kind: EventKind, now: float) -> None:
        """Applies a driver event other than an Xid."""
        fault = detectors.event_fault(kind)
        if fault is not None:
            self._record_fault(FaultEvent(now, uuid, fault.reason, fault.message))
            self._apply_fault(Subject("gpu", uuid), fault, now)

    def gpu_statuses(self, inventory: Inventory, statuses: Iterable[GpuStatus], now: float) -> None:
        """Applies the statuses of all GPUs, and through them of the bridges."""
        by_uuid = {status.uuid: status for status in statuses}
        for uuid, status in by_uuid.items():
            observation = detectors.observe_gpu(status, self._gpu_statuses.get(uuid))
            if status.answers:
                self._gpu_statuses[uuid] = status
            subject = Subject("gpu", uuid)
            self._record_observation(subject, observation, now)
            self._observe(subject, observation, now)
        for bridge in inventory.bridges:
            first, second = by_uuid.get(bridge.first), by_uuid.get(bridge.second)
            if first is not None and second is not None:
                bridge_observation = detectors.observe_bridge(bridge.links, first, second)
                if bridge_observation is not None:
                    self._record_observation(Subject("pair", bridge.id), bridge_observation, now)
                    self._observe(Subject("pair", bridge.id), bridge_observation, now)

    def gpus_to_probe(self, inventory: Inventory, now: float) -> tuple[str, ...]:
        """GPUs whose probation, or whose bridge's probation, starts or ends now."""
        uuids: set[str] = set()
        for subject, record in self.health.items():
            if record.state is not State.RECOVERING or subject.kind == "hca":
                continue
            started = subject.id in self._gpu_samples or subject in self._pair_probations
            if started and now < record.until:
                continue
            if subject.kind == "gpu":
                uuids.add(subject.id)
            else:
                for bridge in inventory.bridges:
                    if bridge.id == subject.id:
                        uuids |= {bridge.first, bridge.second}
        return tuple(sorted(uuids))

    def gpus_probed(self, inventory: Inventory, samples: Iterable[GpuProbe], now: float) -> None:
        """Applies probe samples; the first sample of a probation starts its timer."""
        by_uuid = {sample.uuid: sample for sample in samples}
        for uuid, sample in by_uuid.items():
            subject = Subject("gpu", uuid)
            record = self.health.get(subject)
            if record is None or record.state is not State.RECOVERING:
                continue
            first = self._gpu_samples.get(uuid)
            if first is None:
                self._gpu_samples[uuid] = sample
                self._start_probation(subject, record, now)
            elif now >= record.until:
                del self._gpu_samples[uuid]
                self._finish_probation(subject, record, probes.gpu_verdict(first, sample), now)
        for bridge in inventory.bridges:
            subject = Subject("pair", bridge.id)
            record = self.health.get(subject)
            ends = by_uuid.get(bridge.first), by_uuid.get(bridge.second)
            if record is None or record.state is not State.RECOVERING or None in ends:
                continue
            if subject not in self._pair_probations:
                self._pair_probations.add(subject)
                self._start_probation(subject, record, now)
            elif now >= record.until and ends[0] is not None and ends[1] is not None:
                self._pair_probations.discard(subject)
                verdict = probes.pair_verdict(bridge.links, ends[0], ends[1])
                self._finish_probation(subject, record, verdict, now)

    def port_statuses(self, statuses: Iterable[PortStatus], now: float) -> dict[str, int]:
        """Applies the statuses of all ports; returns the link drops of each since the last poll."""
        drops: dict[str, int] = {}
        for status in statuses:
            name = port_id(status.hca, status.port)
            subject = Subject("hca", name)
            down = status.state != "active"
            since = self._port_down_since.setdefault(name, now) if down else now
            if not down:
                self._port_down_since.pop(name, None)
            observation = detectors.observe_port(status, now - since, self._policy.timers)
            self._record_observation(subject, observation, now)
            before = self._port_counters.get(name, status.counters).get("link_downed", 0)
            drops[name] = max(0, status.counters.get("link_downed", 0) - before)
            self._port_counters[name] = status.counters
            if drops[name] and subject in self.health:
                self._apply_fault(subject, self._flap(name, drops[name], now), now)
            self._observe(subject, observation, now)
            self._probe_port(subject, status, now)
        return drops

    def _probe_port(self, subject: Subject, status: PortStatus, now: float) -> None:
        """Probes a port on probation: a port's status has all that its probe needs."""
        record = self.health.get(subject)
        if record is None or record.state is not State.RECOVERING:
            return
        first = self._port_samples.get(subject.id)
        if first is None:
            self._port_samples[subject.id] = status
            self._start_probation(subject, record, now)
        elif now >= record.until:
            del self._port_samples[subject.id]
            self._finish_probation(subject, record, probes.port_verdict(first, status), now)

    def _start_probation(self, subject: Subject, record: DeviceHealth, now: float) -> None:
        self._store(subject, start_probation(record, now, self._timings[subject.kind]))

    def _finish_probation(
        self, subject: Subject, record: DeviceHealth, failure: str, now: float
    ) -> None:
        if failure:
            self._record_fault(FaultEvent(now, subject.id, "ProbeFailed", failure))
        self._store(subject, apply_probe(record, failure, now, self._timings[subject.kind]))

    def mark_unobservable(self, kinds: Iterable[Kind], reason: str) -> None:
        """Marks all devices of these kinds as unobservable."""
        for subject, record in list(self.health.items()):
            if subject.kind in kinds:
                self._store(subject, mark_unobservable(record, reason))

    def _pair(
        self, inventory: Inventory, rule: XidRule, gpu: Subject, evidence: str, now: float
    ) -> None:
        bridge = inventory.bridge_of.get(gpu.id)
        if bridge is None:
            self._apply_fault(gpu, detectors.xid_fault(rule, Severity.SUSPECT, evidence), now)
            return
        fault = detectors.xid_fault(rule, Severity.UNHEALTHY, evidence)
        self._apply_fault(Subject("pair", bridge.id), fault, now)

    def _recurrence(
        self, rule: XidRule, gpu: Subject, process: str, evidence: str, now: float
    ) -> None:
        """Makes a GPU Suspect when several processes had the same software Xid on it."""
        occurrences = self._software.setdefault((gpu.id, rule.code), {})
        occurrences[process] = now
        for old in [name for name, at in occurrences.items() if at <= now - DAY_SECONDS]:
            del occurrences[old]
        while len(occurrences) > max(rule.recurrence, 1):
            del occurrences[next(iter(occurrences))]
        if len(occurrences) >= rule.recurrence:
            fault = detectors.xid_fault(rule, Severity.SUSPECT, evidence)
            text = (
                f"Xid {rule.code} of {len(occurrences)} processes in 24 h; "
                "the hardware may be at fault"
            )
            self._apply_fault(gpu, replace(fault, message=text, remedy="validation"), now)

    def _flap(self, name: str, drops: int, now: float) -> Fault:
        timers = self._policy.timers
        window = now - timers.flap_window
        recent = (*(at for at in self._flaps.get(name, ()) if at > window), *[now] * drops)
        self._flaps[name] = recent[-FAULT_EVENTS_MAX:]
        text = f"link_downed increased by {drops}; {len(recent)} in {timers.flap_window / 3600:g} h"
        self._record_fault(FaultEvent(now, name, "LinkDowned", text))
        flapping = len(recent) >= timers.flap_count
        return Fault(
            "LinkFlapping" if flapping else "LinkDowned",
            text,
            Severity.UNHEALTHY if flapping else Severity.SUSPECT,
            "a stable link; check cable and switch port",
            evidence=text,
            hold=timers.flap_hold if flapping else 0.0,
        )

    def _record_observation(self, subject: Subject, observation: Observation, now: float) -> None:
        """Records the fault of an observation once, when it starts."""
        record = self.health.get(subject)
        if observation.fault is None or record is None:
            return
        if record.last_state in (State.UNHEALTHY, State.SUSPECT):
            return
        fault = observation.fault
        self._record_fault(FaultEvent(now, subject.id, fault.reason, fault.message))

    def _record_fault(self, event: FaultEvent) -> None:
        """Adds a fault event; repetitions of the newest one increase its count."""
        if self.fault_events:
            newest = self.fault_events[-1]
            if (newest.device, newest.code) == (event.device, event.code):
                self.fault_events[-1] = replace(event, count=newest.count + 1)
                return
        self.fault_events.append(event)

    def _apply_fault(self, subject: Subject, fault: Fault, now: float) -> None:
        record = self.health.get(subject)
        if record is not None:
            self._store(subject, apply_fault(record, fault, now, self._timings[subject.kind]))

    def _observe(self, subject: Subject, observation: Observation, now: float) -> None:
        record = self.health.get(subject)
        if record is not None:
            self._store(subject, observe(record, observation, now, self._timings[subject.kind]))

    def _store(self, subject: Subject, record: DeviceHealth) -> None:
        before = self.health[subject]
        self.health[subject] = record
        if record.last_state is not State.RECOVERING:  # reset for the next probation
            self._gpu_samples.pop(subject.id, None)
            self._port_samples.pop(subject.id, None)
            self._pair_probations.discard(subject)
        if before.state is not record.state:
            self._changes.append(Change(subject, before.state, record))
