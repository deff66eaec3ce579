"""The book of all devices' health: applies faults and looks, tells what changed.

Pure but for its own memory: times come in as arguments, changes go out through `take_changes`.
Driven by the monitor in production and by tests and traces directly.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from flyer_node.health import probes, signs
from flyer_node.health.machine import (
    Fault,
    Health,
    Look,
    Severity,
    State,
    Times,
    begin_probation,
    look,
    probed,
    take,
    unseen,
)
from flyer_node.health.policy import Action

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from flyer_node.hardware.driver import EventKind, GpuProbe, GpuStatus
    from flyer_node.health.policy import Policy, XidRule
    from flyer_node.inventory import Inventory
    from flyer_node.inventory.hca import PortStatus

__all__ = ["Change", "Happened", "Kind", "Ledger", "Subject", "port_id"]

Kind = Literal["gpu", "pair", "hca"]
DAY_SECONDS = 86_400.0
HAPPENED_MAX = 64
"""Faults kept as evidence."""


@dataclass(frozen=True, slots=True, order=True)
class Subject:
    """A device by kind and id; ids are the device plugin's."""

    kind: Kind
    id: str


@dataclass(frozen=True, slots=True)
class Change:
    """A device changed its state."""

    subject: Subject
    before: State
    after: Health


@dataclass(frozen=True, slots=True)
class Happened:
    """A fault as it was seen, kept after the device has recovered."""

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


class Ledger:
    """Health by subject."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.health: dict[Subject, Health] = {}
        self.happened: deque[Happened] = deque(maxlen=HAPPENED_MAX)
        self._changes: list[Change] = []
        self._gpu_statuses: dict[str, GpuStatus] = {}
        self._xids: dict[tuple[str, int], _LastXid] = {}
        self._software: dict[tuple[str, int], dict[str, float]] = {}
        self._port_counters: dict[str, Mapping[str, int]] = {}
        self._port_down_since: dict[str, float] = {}
        self._flaps: dict[str, tuple[float, ...]] = {}
        # The first sample of a probation.
        self._gpu_samples: dict[str, GpuProbe] = {}
        self._pair_begun: set[Subject] = set()
        self._port_samples: dict[str, PortStatus] = {}
        timers = policy.timers
        self._times = {
            "gpu": Times(
                timers.gpu_hold, timers.gpu_hold_max, timers.gpu_probation, timers.suspect
            ),
            "pair": Times(
                timers.pair_hold, timers.gpu_hold_max, timers.pair_probation, timers.suspect
            ),
            "hca": Times(
                timers.port_hold, timers.gpu_hold_max, timers.port_probation, timers.suspect
            ),
        }

    def know(self, inventory: Inventory, now: float) -> None:
        """Opens a page for every device of the inventory; pages of vanished ones are closed."""
        subjects = {Subject("gpu", gpu.uuid) for gpu in inventory.gpus}
        subjects |= {Subject("pair", bridge.id) for bridge in inventory.bridges}
        subjects |= {
            Subject("hca", port_id(hca.name, port.number))
            for hca in inventory.hcas
            for port in hca.ports
        }
        for gone in self.health.keys() - subjects:
            del self.health[gone]
            self._gpu_statuses.pop(gone.id, None)
        for subject in sorted(subjects - self.health.keys()):
            self.health[subject] = Health(since=now)

    def restore(self, pages: Mapping[Subject, Health], *, same_boot: bool) -> None:
        """Takes over what an earlier agent wrote down; after a reboot every GPU was reset."""
        for subject, page in pages.items():
            if subject in self.health:
                booted = replace(page, reset_seen=True, gone=False, action="")
                self.health[subject] = page if same_boot else booted

    def take_changes(self) -> list[Change]:
        """The changes of state since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def out_of_service(self, kind: Kind) -> frozenset[str]:
        """Ids of this kind that new containers must not get."""
        return frozenset(
            subject.id
            for subject, page in self.health.items()
            if subject.kind == kind and not page.in_service
        )

    def xid(
        self, inventory: Inventory, uuid: str, code: int, now: float, *, source: str, **seen: str
    ) -> bool:
        """An Xid on a GPU; False if another source told it already. `seen`: process, line."""
        key = (uuid, code)
        last = self._xids.get(key)
        if last and last.source != source and now - last.at < self._policy.timers.merge:
            return False
        self._xids[key] = _LastXid(source, now)
        rule = self._policy.rule(code)
        process, line = seen.get("process", ""), seen.get("line", "")
        evidence = line or f"{source}: Xid {code}" + (f", pid {process}" if process else "")
        self._note(Happened(now, uuid, f"Xid{code}", evidence))
        gpu = Subject("gpu", uuid)
        if rule.action is Action.UNHEALTHY:
            self._take(gpu, signs.xid_fault(rule, Severity.UNHEALTHY, evidence), now)
        elif rule.action is Action.SUSPECT:
            self._take(gpu, signs.xid_fault(rule, Severity.SUSPECT, evidence), now)
        elif rule.action is Action.PAIR:
            self._pair(inventory, rule, gpu, evidence, now)
        elif rule.recurrence:
            # The driver's events name no process: a burst of them counts as one.
            burst = f"burst {now // self._policy.timers.merge:.0f}"
            self._recurrence(rule, gpu, process or burst, evidence, now)
        return True

    def event(self, uuid: str, kind: EventKind, now: float) -> None:
        """An event of the driver other than an Xid."""
        fault = signs.event_fault(kind)
        if fault is not None:
            self._note(Happened(now, uuid, fault.reason, fault.message))
            self._take(Subject("gpu", uuid), fault, now)

    def gpu_statuses(self, inventory: Inventory, statuses: Iterable[GpuStatus], now: float) -> None:
        """A look at all GPUs and, through them, at the bridges."""
        by_uuid = {status.uuid: status for status in statuses}
        for uuid, status in by_uuid.items():
            found = signs.gpu_look(status, self._gpu_statuses.get(uuid))
            if status.answers:
                self._gpu_statuses[uuid] = status
            subject = Subject("gpu", uuid)
            self._note_look(subject, found, now)
            self._look(subject, found, now)
        for bridge in inventory.bridges:
            first, second = by_uuid.get(bridge.first), by_uuid.get(bridge.second)
            if first is not None and second is not None:
                seen = signs.bridge_look(bridge.links, first, second)
                if seen is not None:
                    self._note_look(Subject("pair", bridge.id), seen, now)
                    self._look(Subject("pair", bridge.id), seen, now)

    def gpus_to_probe(self, inventory: Inventory, now: float) -> tuple[str, ...]:
        """GPUs whose probation begins or ends with a probe now, and ends of such bridges."""
        wanted: set[str] = set()
        for subject, page in self.health.items():
            if page.state is not State.RECOVERING or subject.kind == "hca":
                continue
            begun = subject.id in self._gpu_samples or subject in self._pair_begun
            if begun and now < page.until:
                continue
            if subject.kind == "gpu":
                wanted.add(subject.id)
            else:
                for bridge in inventory.bridges:
                    if bridge.id == subject.id:
                        wanted |= {bridge.first, bridge.second}
        return tuple(sorted(wanted))

    def gpus_probed(self, inventory: Inventory, found: Iterable[GpuProbe], now: float) -> None:
        """What these probes say; the first one of a probation begins it."""
        by_uuid = {one.uuid: one for one in found}
        for uuid, sample in by_uuid.items():
            subject = Subject("gpu", uuid)
            page = self.health.get(subject)
            if page is None or page.state is not State.RECOVERING:
                continue
            first = self._gpu_samples.get(uuid)
            if first is None:
                self._gpu_samples[uuid] = sample
                self._begin(subject, page, now)
            elif now >= page.until:
                del self._gpu_samples[uuid]
                self._probed(subject, page, probes.gpu_verdict(first, sample), now)
        for bridge in inventory.bridges:
            subject = Subject("pair", bridge.id)
            page = self.health.get(subject)
            ends = by_uuid.get(bridge.first), by_uuid.get(bridge.second)
            if page is None or page.state is not State.RECOVERING or None in ends:
                continue
            if subject not in self._pair_begun:
                self._pair_begun.add(subject)
                self._begin(subject, page, now)
            elif now >= page.until and ends[0] is not None and ends[1] is not None:
                self._pair_begun.discard(subject)
                verdict = probes.pair_verdict(bridge.links, ends[0], ends[1])
                self._probed(subject, page, verdict, now)

    def port_statuses(self, statuses: Iterable[PortStatus], now: float) -> dict[str, int]:
        """A look at all ports; how often the link of each went down since the last one."""
        drops: dict[str, int] = {}
        for status in statuses:
            name = port_id(status.hca, status.port)
            subject = Subject("hca", name)
            down = status.state != "active"
            since = self._port_down_since.setdefault(name, now) if down else now
            if not down:
                self._port_down_since.pop(name, None)
            found = signs.port_look(status, now - since, self._policy.timers)
            self._note_look(subject, found, now)
            before = self._port_counters.get(name, status.counters).get("link_downed", 0)
            drops[name] = max(0, status.counters.get("link_downed", 0) - before)
            self._port_counters[name] = status.counters
            if drops[name] and subject in self.health:
                self._take(subject, self._flap(name, drops[name], now), now)
            self._look(subject, found, now)
            self._probe_port(subject, status, now)
        return drops

    def _probe_port(self, subject: Subject, status: PortStatus, now: float) -> None:
        """A look at a port shows all that its probe needs: the link, and what its counters did."""
        page = self.health.get(subject)
        if page is None or page.state is not State.RECOVERING:
            return
        first = self._port_samples.get(subject.id)
        if first is None:
            self._port_samples[subject.id] = status
            self._begin(subject, page, now)
        elif now >= page.until:
            del self._port_samples[subject.id]
            self._probed(subject, page, probes.port_verdict(first, status), now)

    def _begin(self, subject: Subject, page: Health, now: float) -> None:
        self._store(subject, begin_probation(page, now, self._times[subject.kind]))

    def _probed(self, subject: Subject, page: Health, failure: str, now: float) -> None:
        if failure:
            self._note(Happened(now, subject.id, "ProbeFailed", failure))
        self._store(subject, probed(page, failure, now, self._times[subject.kind]))

    def blind(self, kinds: Iterable[Kind], reason: str) -> None:
        """Devices of these kinds cannot be observed now."""
        for subject, page in list(self.health.items()):
            if subject.kind in kinds:
                self._store(subject, unseen(page, reason))

    def _pair(
        self, inventory: Inventory, rule: XidRule, gpu: Subject, evidence: str, now: float
    ) -> None:
        bridge = inventory.bridge_of.get(gpu.id)
        if bridge is None:
            self._take(gpu, signs.xid_fault(rule, Severity.SUSPECT, evidence), now)
            return
        fault = signs.xid_fault(rule, Severity.UNHEALTHY, evidence)
        self._take(Subject("pair", bridge.id), fault, now)

    def _recurrence(
        self, rule: XidRule, gpu: Subject, process: str, evidence: str, now: float
    ) -> None:
        """The applications' own Xids make a GPU Suspect when several processes had them on it."""
        seen = self._software.setdefault((gpu.id, rule.code), {})
        seen[process] = now
        for old in [one for one, at in seen.items() if at <= now - DAY_SECONDS]:
            del seen[old]
        while len(seen) > max(rule.recurrence, 1):
            del seen[next(iter(seen))]
        if len(seen) >= rule.recurrence:
            fault = signs.xid_fault(rule, Severity.SUSPECT, evidence)
            text = f"Xid {rule.code} of {len(seen)} processes in 24 h; the hardware may be at fault"
            self._take(gpu, replace(fault, message=text, remedy="validation"), now)

    def _flap(self, name: str, drops: int, now: float) -> Fault:
        timers = self._policy.timers
        window = now - timers.flap_window
        recent = (*(one for one in self._flaps.get(name, ()) if one > window), *[now] * drops)
        self._flaps[name] = recent[-HAPPENED_MAX:]
        text = f"link_downed grew by {drops}; {len(recent)} in {timers.flap_window / 3600:g} h"
        self._note(Happened(now, name, "LinkDowned", text))
        flapping = len(recent) >= timers.flap_count
        return Fault(
            "LinkFlapping" if flapping else "LinkDowned",
            text,
            Severity.UNHEALTHY if flapping else Severity.SUSPECT,
            "a stable link; look at cable and switch port",
            evidence=text,
            hold=timers.flap_hold if flapping else 0.0,
        )

    def _note_look(self, subject: Subject, found: Look, now: float) -> None:
        """A fault that an observation finds is written down once, when it begins."""
        page = self.health.get(subject)
        if found.fault is None or page is None:
            return
        if page.known in (State.UNHEALTHY, State.SUSPECT):
            return
        self._note(Happened(now, subject.id, found.fault.reason, found.fault.message))

    def _note(self, one: Happened) -> None:
        """Repetitions of the newest entry are counted in it."""
        if self.happened:
            newest = self.happened[-1]
            if (newest.device, newest.code) == (one.device, one.code):
                self.happened[-1] = replace(one, count=newest.count + 1)
                return
        self.happened.append(one)

    def _take(self, subject: Subject, fault: Fault, now: float) -> None:
        page = self.health.get(subject)
        if page is not None:
            self._store(subject, take(page, fault, now, self._times[subject.kind]))

    def _look(self, subject: Subject, found: Look, now: float) -> None:
        page = self.health.get(subject)
        if page is not None:
            self._store(subject, look(page, found, now, self._times[subject.kind]))

    def _store(self, subject: Subject, page: Health) -> None:
        before = self.health[subject]
        self.health[subject] = page
        if page.known is not State.RECOVERING:  # the next probation begins anew
            self._gpu_samples.pop(subject.id, None)
            self._port_samples.pop(subject.id, None)
            self._pair_begun.discard(subject)
        if before.state is not page.state:
            self._changes.append(Change(subject, before.state, page))
