"""Limits for unauthenticated connections: slots, rates and eviction per source address.

Pure: `now` is an argument, and the caller closes connections. These rules prevent one source from
taking the slots of others:

- An expected source (the address of a pod that should connect) has reserved slots, which other
  sources never use.
- A source that opens connections faster than its token bucket allows is refused at accept. All
  unexpected sources share a second bucket: a TLS handshake costs a millisecond of processor time.
  Expected sources have smaller buckets and do not share one: they are pods of several tenants, and
  one tenant's pods must not exhaust another's rate.
- A part of the shared rate is reserved for calm sources, which open few connections, so that a
  source at its limit does not cause the refusal of one that connects once a second.
- When all slots for unexpected sources are taken, the oldest silent connection of the source with
  the most slots is evicted in favour of a source with fewer. A source at its own limit evicts its
  own oldest silent connection.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass

__all__ = [
    "Admission",
    "ConnectionLimitSettings",
    "ConnectionLimits",
    "ConnectionSlot",
    "source_of",
]

IPV6_SITE_BITS = 64
"""A host usually has a whole /64 of IPv6 addresses, which count as one source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimitSettings:
    """Numbers of connections, and connections per second."""

    total_max: int = 1024
    """Unauthenticated connections of all unexpected sources."""
    source_max: int = 128
    """Limit of one source; a node that masquerades its pods is one source."""
    expected_source_max: int = 16
    """Slots of an expected source: a pod has one stream, and a few half-open ones."""
    rate_per_second: float = 100.0
    """Sustained rate of new connections of one source."""
    burst: int = 400
    """Burst of one source: every pod of a masqueraded node reconnects after a leader change."""
    expected_per_second: float = 4.0
    """Sustained rate of an expected source: a sidecar retries every second or two."""
    expected_burst: int = 64
    """Burst of an expected source: several pods of a node with their shortest back-off."""
    unexpected_per_second: float = 200.0
    """Sustained rate of all unexpected sources together."""
    unexpected_burst: int = 1000
    """Burst of all unexpected sources together."""
    calm_per_second: float = 2.0
    """Sustained rate of a calm source, which may exceed the shared rate."""
    calm_burst: int = 20
    """Burst of a calm source."""
    all_calm_per_second: float = 50.0
    """Sustained rate of all calm sources together."""
    all_calm_burst: int = 200
    """Burst of all calm sources together."""
    sources_max: int = 8192
    """Sources whose rates are tracked; the least recently seen one is forgotten."""


@dataclass(slots=True, eq=False)
class ConnectionSlot:
    """One unauthenticated connection."""

    source: str
    expected: bool
    busy: bool = False
    """The server is processing its request: it is not evicted."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to a new connection."""

    slot: ConnectionSlot | None
    """None: refuse the connection."""
    evicted: ConnectionSlot | None = None
    """Close this connection; the new one takes its slot."""


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float

    def spend(self, now: float, per_second: float, burst: int) -> bool:
        """Take a token; False if there is none."""
        earned = max(now - self.at, 0.0) * per_second
        self.tokens = min(self.tokens + earned, float(burst))
        self.at = now
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True


@dataclass(slots=True)
class _Rates:
    """Token buckets of one source."""

    own: _Bucket
    calm: _Bucket


class ConnectionLimits:
    """The slots of one listener."""

    def __init__(self, settings: ConnectionLimitSettings) -> None:
        self._settings = settings
        self._held: dict[str, dict[ConnectionSlot, None]] = {}  # per source, oldest first
        self._expected: dict[str, dict[ConnectionSlot, None]] = {}
        self._total = 0
        self._rates: OrderedDict[str, _Rates] = OrderedDict()
        self._unexpected = _Bucket(float(settings.unexpected_burst), 0.0)
        self._calm = _Bucket(float(settings.all_calm_burst), 0.0)

    @property
    def total(self) -> int:
        """Slots held by unexpected sources."""
        return self._total

    def __len__(self) -> int:
        """All held slots."""
        return self._total + sum(len(slots) for slots in self._expected.values())

    def admit(self, source: str, now: float, *, expected: bool = False) -> Admission:
        """Admit or refuse a new connection from `source`."""
        settings = self._settings
        rates = self._rates_of(source, now, expected=expected)
        if not rates.own.spend(now, *self._limit(expected=expected)):
            return Admission(None)
        if expected:
            connections = self._expected.get(source, {})
            evicted = None
            if len(connections) >= settings.expected_source_max:
                evicted = _oldest_silent(connections)
                if evicted is None:
                    return Admission(None)
                self.release(evicted)
            slot = ConnectionSlot(source, expected=True)
            self._expected.setdefault(source, {})[slot] = None
            return Admission(slot, evicted)
        if not self._spend_together(rates, now):
            return Admission(None)
        connections = self._held.get(source, {})
        evicted = None
        if len(connections) >= settings.source_max:
            evicted = _oldest_silent(connections)
        elif self._total >= settings.total_max:
            evicted = self._victim(len(connections))
        if evicted is None and (
            len(connections) >= settings.source_max or self._total >= settings.total_max
        ):
            return Admission(None)
        if evicted is not None:
            self.release(evicted)
        slot = ConnectionSlot(source, expected=False)
        self._held.setdefault(source, {})[slot] = None
        self._total += 1
        return Admission(slot, evicted)

    def release(self, slot: ConnectionSlot) -> None:
        """The connection authenticated or ended. Idempotent."""
        pool = self._expected if slot.expected else self._held
        connections = pool.get(slot.source)
        if connections is None or slot not in connections:
            return
        del connections[slot]
        if not connections:
            del pool[slot.source]
        if not slot.expected:
            self._total -= 1

    def _victim(self, own: int) -> ConnectionSlot | None:
        """The oldest silent slot of the source with the most slots, if it has at least `own`."""
        by_share = sorted(self._held.values(), key=len, reverse=True)
        for slots in by_share:
            if len(slots) < max(own, 1):
                return None
            silent = _oldest_silent(slots)
            if silent is not None:
                return silent
        return None

    def _spend_together(self, rates: _Rates, now: float) -> bool:
        """Take a token of the rates that unexpected sources share."""
        settings = self._settings
        is_calm = rates.calm.spend(now, settings.calm_per_second, settings.calm_burst)
        if self._unexpected.spend(now, settings.unexpected_per_second, settings.unexpected_burst):
            return True
        per_second, burst = settings.all_calm_per_second, settings.all_calm_burst
        return is_calm and self._calm.spend(now, per_second, burst)

    def _limit(self, *, expected: bool) -> tuple[float, int]:
        settings = self._settings
        if not expected:
            return settings.rate_per_second, settings.burst
        return (
            min(settings.rate_per_second, settings.expected_per_second),
            min(settings.burst, settings.expected_burst),
        )

    def _rates_of(self, source: str, now: float, *, expected: bool) -> _Rates:
        rates = self._rates.get(source)
        if rates is None:
            _, burst = self._limit(expected=expected)
            own = _Bucket(float(burst), now)
            rates = self._rates[source] = _Rates(
                own, _Bucket(float(self._settings.calm_burst), now)
            )
            if len(self._rates) > self._settings.sources_max:
                self._rates.popitem(last=False)
        self._rates.move_to_end(source)
        return rates


def _oldest_silent(slots: dict[ConnectionSlot, None]) -> ConnectionSlot | None:
    return next((slot for slot in slots if not slot.busy), None)


def source_of(address: str) -> str:
    """The source of an address: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, IPV6_SITE_BITS), strict=False))
    return str(parsed)
