"""Quota status reporter: writes the usage of quotas and zones into their statuses.

The leader checks after each step of the engine and writes changes at most once every
`INTERVAL_SECONDS`. No decision depends on these statuses. Their conditions and
`observedGeneration` belong to `flyer.kube.handlers`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from flyer.api import FlyerQuotaStatus, QuotaUse, ZoneCount
from flyer.api.names import TOPOLOGY_NAME
from flyer.engine import quota_usage
from flyer.kube.apiserver.election import LeadershipLostError
from flyer.kube.apiserver.errors import ApiError, InvalidError, NotFoundError
from flyer.kube.apiserver.resources import FLYERQUOTAS, FLYERTOPOLOGIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flyer.engine import EngineState, Node, QuotaUsage, Zones
    from flyer.kube.apiserver import Api, Cache
    from flyer.kube.apiserver.resources import Resource
    from flyer.kube.cache.cluster_cache import ClusterCache
    from flyer.kube.services.jobs.token import Token

__all__ = ["QuotaStatusReporter", "count_zones"]

INTERVAL_SECONDS: Final = 3.0
# Limits of the CRDs.
_ZONES_MAX: Final = 64
_SUBJECTS_MAX: Final = 1_000
# With more jobs, usage is computed in a thread.
_JOBS_INLINE_MAX: Final = 200

log = logging.getLogger(__name__)


def count_zones(nodes: Iterable[Node], zones: Zones) -> tuple[ZoneCount, ...]:
    """Nodes by zone. Zones of the topology have precedence and are included even if empty."""
    total: Counter[str] = Counter()
    ready: Counter[str] = Counter()
    for node in nodes:
        total[node.zone] += 1
        ready[node.zone] += node.ready and zones.admits(node)
    named = sorted({*total, *zones.names}, key=lambda zone: (zone not in zones.names, zone))
    return tuple(
        ZoneCount(name=zone, nodes=total[zone], ready_nodes=ready[zone])
        for zone in sorted(named[:_ZONES_MAX])
    )


class QuotaStatusReporter:
    """The reporter of one term; `state_of` returns the engine's state."""

    def __init__(
        self, api: Api, cache: ClusterCache, token: Token, state_of: Callable[[], EngineState]
    ) -> None:
        self._api = api
        self._cache = cache
        self._token = token
        self._state_of = state_of
        self._due = asyncio.Event()

    def mark_dirty(self) -> None:
        """Request a check for changes."""
        self._due.set()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            state = self._state_of()
            for count in (self._zones, self._quotas):
                try:
                    await count(state)
                except LeadershipLostError:
                    raise
                except Exception:  # scheduling does not depend on these figures
                    log.exception("%s: a bug, please report it", count.__name__)
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _zones(self, state: EngineState) -> None:
        topology = self._cache.topologies.get("", TOPOLOGY_NAME)
        if topology is None:
            return
        nodes = (
            node
            if (node_state := state.nodes.get(node.name)) is None or node_state.eligible
            else replace(node, ready=False)
            for node in self._cache.engine_nodes()
        )
        zones = count_zones(nodes, state.zones)
        if topology.status is None or topology.status.zones != zones:
            changes = {"epoch": state.epoch, "zones": [zone.to_object() for zone in zones]}
            stored = await self._write(
                FLYERTOPOLOGIES, TOPOLOGY_NAME, changes, self._cache.topologies
            )
            if stored is not None:
                self._token.observe(stored)

    async def _quotas(self, state: EngineState) -> None:
        quotas = [quota for quota in self._cache.quotas.values() if quota is not None]
        if not quotas:
            return
        if len(state.jobs) > _JOBS_INLINE_MAX:
            usage = await asyncio.to_thread(quota_usage, state, state.now)
        else:
            usage = quota_usage(state, state.now)
        for quota in quotas:
            name, before = quota.metadata.name, quota.status or FlyerQuotaStatus()
            after = _status(usage.get(name), before, state.epoch)
            # A first status is written even if all counts are zero.
            if before.epoch == 0 or after != before.replace(epoch=state.epoch):
                changes = {
                    "epoch": after.epoch,
                    "usedNodes": after.used_nodes,
                    "waitingJobs": after.waiting_jobs,
                    "subjects": [subject.to_object() for subject in after.subjects],
                }
                await self._write(FLYERQUOTAS, name, changes, self._cache.quotas)

    async def _write(
        self, resource: Resource, name: str, status: dict[str, Any], cache: Cache[Any]
    ) -> dict[str, Any] | None:
        """Write without compare-and-swap: the epoch check of the API server suffices."""
        try:
            answer = await self._api.merge(resource, name, {"status": status}, subresource="status")
        except NotFoundError:
            return None
        except InvalidError as error:
            log.warning("%s %s: status update rejected: %s", resource.plural, name, error)
            return None
        except ApiError as error:
            log.warning("%s %s: status update failed, retrying: %s", resource.plural, name, error)
            self.mark_dirty()
            return None
        cache.offer(answer)
        return answer


def _status(usage: QuotaUsage | None, before: FlyerQuotaStatus, epoch: int) -> FlyerQuotaStatus:
    """The quota's new status; without a usage it does not apply, or no longer."""
    usage_of = usage.held if usage is not None else {}
    subjects = sorted(
        (QuotaUse(name=name, nodes=sum(jobs), jobs=len(jobs)) for name, jobs in usage_of.items()),
        key=lambda subject: (-subject.nodes, subject.name),
    )
    return before.replace(
        epoch=epoch,
        used_nodes=sum(subject.nodes for subject in subjects),
        waiting_jobs=usage.waiting if usage is not None else 0,
        subjects=tuple(subjects[:_SUBJECTS_MAX]),
    )
