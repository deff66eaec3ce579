"""The FlyerTopology: which zones and leaves get gangs, and whether gangs may cross."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyer.api import Phase
from flyer.engine import Zones, ZonesObserved, rebuild, step
from flyer.engine.log import rebuild_line, replay, step_line

if TYPE_CHECKING:
    from collections.abc import Callable

T0 = 1_800_000_000.0


def test_the_topology_says_which_zones_and_leaves_get_gangs(desk: Callable) -> None:
    d = desk()
    d.tell(ZonesObserved(Zones(("B",), ("B/B0",))))
    assert set(d.run("one", 2).assignment.names) == {"b0", "b1"}
    d.submit("two", 3)
    assert d.status("two").pending.verdict == "Never"
    d.tell(ZonesObserved(Zones()))
    assert d.status("two").phase is Phase.STARTING


def test_the_topology_may_forbid_to_cross(desk: Callable) -> None:
    d = desk()
    d.tell(ZonesObserved(Zones(cross_zone_jobs=0)))
    d.submit("wide", 4)
    pending = d.status("wide").pending
    assert pending.verdict == "Never"
    assert pending.message == (
        "wants 4 nodes in one zone, the largest has 3: the FlyerTopology lets no gang cross zones "
        "(spec.crossZoneJobs is 0)"
    )


def test_a_log_keeps_the_zones(desk: Callable) -> None:
    d = desk()
    zones = Zones(("A", "B"), ("A/A0",), 0)
    d.tell(ZonesObserved(zones))
    lines = [rebuild_line(d.nodes, (), T0, 1, d.policy, (), Zones(("A",)))]
    state = rebuild(d.nodes, (), T0, 1, d.policy, (), Zones(("A",)))
    state, actions = step(state, (ZonesObserved(zones),), T0)
    lines.append(step_line((ZonesObserved(zones),), T0, actions))
    assert list(replay(lines)) == []
    assert state.zones == zones
