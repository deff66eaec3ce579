"""What quotas and zones hold, written into their statuses: for people and their dashboards.

The leader looks after each step of the engine and writes what has changed, at most once every
`INTERVAL_SECONDS`; nothing waits for it and nothing is decided by it. Conditions and
`observedGeneration` of the same statuses belong to `flyer.kube.handlers`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from flyer.api import FlyerQuotaStatus, QuotaUse, ZoneCount
from flyer.api.names import TOPOLOGY_NAME
from flyer.engine import quota_loads
from flyer.kube.client.election import LeadershipLostError
from flyer.kube.client.errors import ApiError, InvalidError, NotFoundError
from flyer.kube.client.resources import FLYERQUOTAS, FLYERTOPOLOGIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flyer.engine import EngineState, Node, QuotaLoad, Zones
    from flyer.kube.client import Api, Cache
    from flyer.kube.client.resources import Resource
    from flyer.kube.services.token import Token
    from flyer.kube.services.world import World

__all__ = ["Counts", "count_zones"]

INTERVAL_SECONDS: Final = 3.0
# As many as the CRDs take.
_ZONES_MAX: Final = 64
_SUBJECTS_MAX: Final = 1_000
# With more jobs they are counted in a thread.
_JOBS_INLINE_MAX: Final = 200

log = logging.getLogger(__name__)


def count_zones(nodes: Iterable[Node], zones: Zones) -> tuple[ZoneCount, ...]:
    """Nodes by zone, the zones that the topology names first among them even if they are empty."""
    found: Counter[str] = Counter()
    ready: Counter[str] = Counter()
    for node in nodes:
        found[node.zone] += 1
        ready[node.zone] += node.ready and zones.admits(node)
    named = sorted({*found, *zones.names}, key=lambda zone: (zone not in zones.names, zone))
    return tuple(
        ZoneCount(name=zone, nodes=found[zone], ready_nodes=ready[zone])
        for zone in sorted(named[:_ZONES_MAX])
    )


class Counts:
    """Of one term, whose state `state_of` tells."""

    def __init__(
        self, api: Api, world: World, token: Token, state_of: Callable[[], EngineState]
    ) -> None:
        self._api = api
        self._world = world
        self._token = token
        self._state_of = state_of
        self._due = asyncio.Event()

    def look(self) -> None:
        """Something may have changed."""
        self._due.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            state = self._state_of()
            for count in (self._zones, self._quotas):
                try:
                    await count(state)
                except LeadershipLostError:
                    raise
                except Exception:  # scheduling goes on without these figures
                    log.exception("%s: a bug, please report it", count.__name__)
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _zones(self, state: EngineState) -> None:
        known = self._world.topologies.get("", TOPOLOGY_NAME)
        if known is None:
            return
        nodes = (
            node
            if (seen := state.nodes.get(node.name)) is None or seen.eligible
            else replace(node, ready=False)
            for node in self._world.engine_nodes()
        )
        zones = count_zones(nodes, state.zones)
        if known.status is None or known.status.zones != zones:
            changes = {"epoch": state.epoch, "zones": [one.to_object() for one in zones]}
            written = await self._write(
                FLYERTOPOLOGIES, TOPOLOGY_NAME, changes, self._world.topologies
            )
            if written is not None:
                self._token.saw(written)

    async def _quotas(self, state: EngineState) -> None:
        limits = [one for one in self._world.quotas.values() if one is not None]
        if not limits:
            return
        if len(state.jobs) > _JOBS_INLINE_MAX:
            loads = await asyncio.to_thread(quota_loads, state, state.now)
        else:
            loads = quota_loads(state, state.now)
        for limit in limits:
            name, before = limit.metadata.name, limit.status or FlyerQuotaStatus()
            after = _status(loads.get(name), before, state.epoch)
            # Zero is news, too, where nobody has counted yet.
            if before.epoch == 0 or after != before.replace(epoch=state.epoch):
                changes = {
                    "epoch": after.epoch,
                    "usedNodes": after.used_nodes,
                    "waitingJobs": after.waiting_jobs,
                    "subjects": [one.to_object() for one in after.subjects],
                }
                await self._write(FLYERQUOTAS, name, changes, self._world.quotas)

    async def _write(
        self, resource: Resource, name: str, status: dict[str, Any], cache: Cache[Any]
    ) -> dict[str, Any] | None:
        """Not a compare-and-swap: a later leader's epoch refuses it, and nothing else has to."""
        try:
            answer = await self._api.merge(resource, name, {"status": status}, subresource="status")
        except NotFoundError:
            return None
        except InvalidError as error:
            log.warning("%s %s: its counts are refused: %s", resource.plural, name, error)
            return None
        except ApiError as error:
            log.warning("%s %s: its counts are written later: %s", resource.plural, name, error)
            self.look()
            return None
        cache.offer(answer)
        return answer


def _status(load: QuotaLoad | None, before: FlyerQuotaStatus, epoch: int) -> FlyerQuotaStatus:
    """What the limit's status is to be; no load: it does not apply (any more)."""
    held = load.held if load is not None else {}
    subjects = sorted(
        (QuotaUse(name=name, nodes=sum(jobs), jobs=len(jobs)) for name, jobs in held.items()),
        key=lambda one: (-one.nodes, one.name),
    )
    return before.replace(
        epoch=epoch,
        used_nodes=sum(one.nodes for one in subjects),
        waiting_jobs=load.waiting if load is not None else 0,
        subjects=tuple(subjects[:_SUBJECTS_MAX]),
    )
