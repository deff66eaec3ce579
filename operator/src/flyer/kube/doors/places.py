"""Places for connections that have not authenticated: limits, shares and eviction per source.

Pure: `now` is an argument, and closing a connection is the caller's. Rules keep one source
from taking the places of others:

- An expected source (the address of a pod that should connect) has places of its own, which other
  sources never use.
- A source that opens connections faster than its token bucket allows is refused at accept, and so
  are unexpected sources that together do: a TLS handshake costs a millisecond of processor time.
  Expected sources have a smaller bucket each and none together: they are pods of tenants, too, and
  no number of one tenant's pods may keep another's out.
- Of what unexpected sources together may open, a part is for sources that open few connections: a
  source that opens as many as it may does not get another refused that opens one a second.
- When all places of unexpected sources are taken, the oldest silent connection of the source that
  has most of them is evicted in favour of a source that has fewer. A source at its own limit
  evicts its own oldest silent connection.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["Admission", "Place", "PlaceSettings", "Places", "source_of"]

IPV6_SITE_BITS = 64
"""A host usually has a whole /64 of IPv6 addresses: all of them are one source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceSettings:
    """Numbers of connections, and connections per second."""

    total_max: int = 1024
    """Connections of unexpected sources that have not authenticated."""
    source_max: int = 128
    """Of them, those of one source: a node that masquerades its pods is one source."""
    expected_source_max: int = 16
    """Places of an expected source: a pod has one stream, and a few half-open ones."""
    rate_per_second: float = 100.0
    """Connections that a source may open in the long run."""
    burst: int = 400
    """And at once: every pod of a masqueraded node reconnects after a leader change."""
    expected_per_second: float = 4.0
    """The same of an expected source: a sidecar tries again every second or two."""
    expected_burst: int = 64
    """And at once: some pods of a node's network, each from its first, shortest pauses on."""
    unexpected_per_second: float = 200.0
    """Connections that all unexpected sources together may open in the long run."""
    unexpected_burst: int = 1000
    """And at once."""
    calm_per_second: float = 2.0
    """Connections that a calm source may open in the long run, beyond these if need be."""
    calm_burst: int = 20
    """And at once."""
    all_calm_per_second: float = 50.0
    """The same of all calm sources together."""
    all_calm_burst: int = 200
    """And at once."""
    sources_max: int = 8192
    """Sources whose rate is remembered; the least recently seen is forgotten."""


@dataclass(slots=True, eq=False)
class Place:
    """One connection that has not authenticated."""

    source: str
    expected: bool
    busy: bool = False
    """The server works on its request: it is not evicted."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to a new connection."""

    place: Place | None
    """None: refuse it."""
    evicted: Place | None = None
    """Close this connection: the new one has its place."""


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float

    def spend(self, now: float, per_second: float, burst: int) -> bool:
        """Take a token; False when there is none."""
        earned = max(now - self.at, 0.0) * per_second
        self.tokens = min(self.tokens + earned, float(burst))
        self.at = now
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True


@dataclass(slots=True)
class _Rates:
    """Of one source."""

    own: _Bucket
    calm: _Bucket


class Places:
    """The places of one listener."""

    def __init__(self, settings: PlaceSettings) -> None:
        self._settings = settings
        self._held: dict[str, dict[Place, None]] = {}  # per source, oldest first
        self._expected: dict[str, dict[Place, None]] = {}
        self._total = 0
        self._rates: OrderedDict[str, _Rates] = OrderedDict()
        self._unexpected = _Bucket(float(settings.unexpected_burst), 0.0)
        self._calm = _Bucket(float(settings.all_calm_burst), 0.0)

    @property
    def total(self) -> int:
        """Places that unexpected sources hold."""
        return self._total

    def __len__(self) -> int:
        """All places that are held."""
        return self._total + sum(len(places) for places in self._expected.values())

    def admit(self, source: str, now: float, *, expected: bool = False) -> Admission:
        """Decide on a new connection from `source`."""
        settings = self._settings
        rates = self._rates_of(source, now, expected=expected)
        if not rates.own.spend(now, *self._limit(expected=expected)):
            return Admission(None)
        if expected:
            mine = self._expected.get(source, {})
            evicted = None
            if len(mine) >= settings.expected_source_max:
                evicted = _oldest_silent(mine)
                if evicted is None:
                    return Admission(None)
                self.release(evicted)
            place = Place(source, expected=True)
            self._expected.setdefault(source, {})[place] = None
            return Admission(place, evicted)
        if not self._spend_together(rates, now):
            return Admission(None)
        mine = self._held.get(source, {})
        evicted = None
        if len(mine) >= settings.source_max:
            evicted = _oldest_silent(mine)
        elif self._total >= settings.total_max:
            evicted = self._victim(len(mine))
        if evicted is None and (
            len(mine) >= settings.source_max or self._total >= settings.total_max
        ):
            return Admission(None)
        if evicted is not None:
            self.release(evicted)
        place = Place(source, expected=False)
        self._held.setdefault(source, {})[place] = None
        self._total += 1
        return Admission(place, evicted)

    def release(self, place: Place) -> None:
        """The connection authenticated or ended. Repeating it is harmless."""
        pool = self._expected if place.expected else self._held
        mine = pool.get(place.source)
        if mine is None or place not in mine:
            return
        del mine[place]
        if not mine:
            del pool[place.source]
        if not place.expected:
            self._total -= 1

    def _victim(self, own: int) -> Place | None:
        """The oldest silent place of the busiest source that has at least as many as `own`."""
        by_share = sorted(self._held.values(), key=len, reverse=True)
        for places in by_share:
            if len(places) < max(own, 1):
                return None
            silent = _oldest_silent(places)
            if silent is not None:
                return silent
        return None

    def _spend_together(self, rates: _Rates, now: float) -> bool:
        """Of what unexpected sources may open together."""
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
        found = self._rates.get(source)
        if found is None:
            _, burst = self._limit(expected=expected)
            own = _Bucket(float(burst), now)
            found = self._rates[source] = _Rates(
                own, _Bucket(float(self._settings.calm_burst), now)
            )
            if len(self._rates) > self._settings.sources_max:
                self._rates.popitem(last=False)
        self._rates.move_to_end(source)
        return found


def _oldest_silent(places: dict[Place, None]) -> Place | None:
    return next((place for place in places if not place.busy), None)


def source_of(address: str) -> str:
    """The source that an address counts for: an IPv4 address, or an IPv6 network of a host."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, IPV6_SITE_BITS), strict=False))
    return str(found)
