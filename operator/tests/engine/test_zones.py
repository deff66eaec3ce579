"""FlyerTopology: usable zones and leaves, and cross-zone jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine import Zones, ZonesObserved, rebuild, step
from flyer.engine.decision_log import rebuild_line, replay, step_line

if TYPE_CHECKING:
    from collections.abc import Callable

T0 = 1_800_000_000.0


def test_the_topology_defines_the_zones_and_leaves_of_gangs(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(ZonesObserved(Zones(("B",), ("B/B0",))))
    assert set(harness.run("one", 2).assignment.names) == {"b0", "b1"}
    harness.submit("two", 3)
    assert harness.status("two").pending.verdict == "Never"
    harness.step(ZonesObserved(Zones()))
    assert harness.status("two").phase is Phase.STARTING


def test_the_topology_may_forbid_cross_zone_jobs(new_harness: Callable) -> None:
    harness = new_harness()
    harness.step(ZonesObserved(Zones(cross_zone_jobs=0)))
    harness.submit("wide", 4)
    pending = harness.status("wide").pending
    assert pending.verdict == "Never"
    assert pending.message == (
        "wants 4 nodes in one zone, the largest has 3: the FlyerTopology lets no gang cross zones "
        "(spec.crossZoneJobs is 0)"
    )


def test_a_log_keeps_the_zones(new_harness: Callable) -> None:
    harness = new_harness()
    zones = Zones(("A", "B"), ("A/A0",), 0)
    harness.step(ZonesObserved(zones))
    lines = [rebuild_line(harness.nodes, (), T0, 1, harness.settings, (), Zones(("A",)))]
    state = rebuild(harness.nodes, (), T0, 1, harness.settings, (), Zones(("A",)))
    state, actions = step(state, (ZonesObserved(zones),), T0)
    lines.append(step_line((ZonesObserved(zones),), T0, actions))
    assert list(replay(lines)) == []
    assert state.zones == zones
