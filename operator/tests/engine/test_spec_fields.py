"""Fields of FlyerJobSpec: each has a defined effect on a running job and on the choice of nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import FlyerJobSpec
from flyer.api.mutability import CHANGEABLE_FIELDS, DEFERRED_FIELDS, FIXED_FIELDS
from flyer.engine import GangStarted, JobSubmitted, rebuild
from flyer.engine.placement.node_selection import needs_of
from flyer.engine.state import transitions
from flyer.engine.state.cycle_state import CycleState
from flyer.sim.samples import sample_job
from pydantic.alias_generators import to_camel

if TYPE_CHECKING:
    from collections.abc import Callable

OTHER_VALUES: dict[str, Any] = {
    "nodes": 3,
    "ranks_per_node": 4,
    "priority": "high",
    "queue": "other",
    "node_class": "h100",
    "zone": "B",
    "cross_zone": "Never",
    "suspend": True,
    "stop": "Graceful",
    "active_deadline": "1h",
    "progress_deadline": "1h",
    "max_restarts": 3,
    "ttl_seconds_after_finished": 5,
    "preemption": {"minRuntime": "1s"},
    "checkpoint": {"path": "/checkpoints", "interval": "1s"},
    "collectives": {"inject": False},
    "managed_by": "example.com/other",
    "template": {"spec": {"containers": [{"name": "other", "command": ["true"]}]}},
}
"""Valid values that `sample_job` does not have."""

# Fields that do not decide which nodes a job may have. The number of nodes is compared separately.
NOT_IN_NEEDS = {
    "nodes", "queue", "suspend", "stop", "progress_deadline", "max_restarts",
    "ttl_seconds_after_finished", "collectives", "managed_by", "template",
}  # fmt: skip


def test_every_field_is_in_one_list_of_mutability() -> None:
    lists = (*FIXED_FIELDS, *CHANGEABLE_FIELDS, *DEFERRED_FIELDS)
    assert sorted(lists) == sorted(FlyerJobSpec.model_fields)


@pytest.mark.parametrize("field", FlyerJobSpec.model_fields)
def test_a_running_job_takes_only_changeable_fields(new_harness: Callable, field: str) -> None:
    harness = new_harness()
    harness.submit("a", 2)
    harness.step(GangStarted("default/a", 1))
    before = harness.state.jobs["default/a"].spec
    changed = sample_job("a", **{"nodes": 2, to_camel(field): OTHER_VALUES[field]})
    assert getattr(changed.spec, field) != getattr(before, field)
    harness.step(JobSubmitted(changed))
    after = harness.state.jobs["default/a"].spec
    expected = changed.spec if field in CHANGEABLE_FIELDS else before
    assert getattr(after, field) == getattr(expected, field)


@pytest.mark.parametrize("field", FlyerJobSpec.model_fields)
def test_jobs_whose_needs_are_equal_may_have_the_same_nodes(field: str) -> None:
    cycle = CycleState(rebuild([], (), 0.0, 1), 0.0)

    def needs(name: str, **spec: Any) -> tuple[object, ...]:
        job = sample_job(name, **{"nodes": 2, **spec})
        return needs_of(cycle, cycle.put(transitions.new_job(job, 0.0)))

    differs = needs("a") != needs("b", **{to_camel(field): OTHER_VALUES[field]})
    assert differs == (field not in NOT_IN_NEEDS)
