"""Health of a 3FS, read from the metrics that the exporter next to mgmtd serves.

The page is read with a deadline and a size limit and parsed in a thread: its size grows with the
number of storage services, and it must not delay the scheduler.
"""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Health", "NodeState", "health_of", "read_health"]

PAGE_BYTES_MAX: Final = 8 << 20
PAGE_SECONDS: Final = 20.0
"""The exporter waits up to 5 s for mgmtd, and as long for storage services that are down."""
_NEEDED: Final = ("threefs_chains", "threefs_storage_replicas", "threefs_storage_sole_replicas")
_READ: Final = (
    "threefs_up", *_NEEDED, "threefs_storage_draining", "threefs_capacity_bytes",
    "threefs_used_bytes", "threefs_mgmtd_primary",
)  # fmt: skip


_NODE_LABEL: Final = re.compile(r"([0-9]{1,6})(?:\.[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class NodeState:
    """One storage service, as mgmtd knows it."""

    replicas: int = 0
    sole_replicas: int = 0
    """Chains of which no other service has a serving replica."""
    draining: bool = False
    """Whether each of its disks is drained."""
    capacity_bytes: int = 0
    used_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Health:
    """A 3FS whose mgmtd responds."""

    whole: int = 0
    degraded: int = 0
    unavailable: int = 0
    nodes: dict[int, NodeState] = field(default_factory=dict)
    primaries: frozenset[str] = frozenset()
    """Addresses of the primary mgmtd."""

    @property
    def has_chains(self) -> bool:
        """Whether chains exist: without them, nothing can be lost."""
        return self.whole + self.degraded + self.unavailable > 0

    @property
    def healthy(self) -> bool:
        """Whether every replica of every chain serves."""
        return self.degraded == 0 and self.unavailable == 0


def health_of(page: str) -> Health | None:
    """The health on a page of metrics; None: mgmtd does not respond, or metrics are missing."""
    samples: dict[str, dict[str, float]] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name not in _READ:
                    continue
                if not math.isfinite(sample.value):
                    return None
                label = next(iter(sample.labels.values()), "")
                samples.setdefault(sample.name, {})[label] = sample.value
    except ValueError:
        return None
    if samples.get("threefs_up") != {"": 1.0} or any(name not in samples for name in _NEEDED):
        return None
    chains = samples["threefs_chains"]
    return Health(
        whole=int(chains.get("whole", 0)),
        degraded=int(chains.get("degraded", 0)),
        unavailable=int(chains.get("unavailable", 0)),
        nodes=_services(samples),
        primaries=frozenset(
            label for label, leads in samples.get("threefs_mgmtd_primary", {}).items() if leads
        ),
    )


def _services(samples: dict[str, dict[str, float]]) -> dict[int, NodeState]:
    """The storage services: sums over their disks, of which 3.2 is one of service 3."""
    disks: dict[int, list[str]] = {}
    for label in samples["threefs_storage_replicas"]:
        if match := _NODE_LABEL.fullmatch(label):
            disks.setdefault(int(match[1]), []).append(label)

    def values(name: str, labels: list[str]) -> list[int]:
        return [int(samples.get(name, {}).get(label, 0)) for label in labels]

    return {
        number: NodeState(
            replicas=sum(values("threefs_storage_replicas", labels)),
            sole_replicas=sum(values("threefs_storage_sole_replicas", labels)),
            draining=all(values("threefs_storage_draining", labels)),
            capacity_bytes=sum(values("threefs_capacity_bytes", labels)),
            used_bytes=sum(values("threefs_used_bytes", labels)),
        )
        for number, labels in disks.items()
    }


async def read_health(addresses: Sequence[str], port: int) -> Health | None:
    """The health from the first exporter that knows it; None after `PAGE_SECONDS`."""
    timeout = aiohttp.ClientTimeout(total=PAGE_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        pages = [asyncio.create_task(_read(session, address, port)) for address in addresses]
        try:
            for page in asyncio.as_completed(pages):
                health = await page
                if health is not None:
                    return health
        finally:
            for task in pages:
                task.cancel()
            await asyncio.gather(*pages, return_exceptions=True)
    return None


async def _read(session: aiohttp.ClientSession, address: str, port: int) -> Health | None:
    host = f"[{address}]" if ":" in address else address
    try:
        async with session.get(f"http://{host}:{port}/metrics", allow_redirects=False) as response:
            if response.status != 200:
                return None
            page = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                page += chunk
                if len(page) > PAGE_BYTES_MAX:
                    return None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    return await asyncio.to_thread(health_of, bytes(page).decode(errors="replace"))
