"""Nodes as the scheduler sees them."""

from typing import Any

import pytest
from flyer.kube.services.views import shape_node


def node(allocatable: dict[str, str], capacity: dict[str, str]) -> dict[str, Any]:
    return {
        "metadata": {"name": "a", "labels": {"fireflyer.dev/zone": "A"}},
        "spec": {},
        "status": {
            "allocatable": allocatable,
            "capacity": capacity,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


@pytest.mark.parametrize(
    ("allocatable", "capacity", "slots", "usable"),
    [
        ({"cpu": "8"}, {"cpu": "8"}, 8, True),
        ({"cpu": "8", "fireflyer.dev/gpu": "4"}, {"fireflyer.dev/gpu": "4"}, 4, True),
        # The plugin found no device: a node without GPUs.
        ({"cpu": "8", "fireflyer.dev/gpu": "0"}, {"fireflyer.dev/gpu": "0"}, 8, True),
        # It has four, and all of them are out of order.
        ({"cpu": "8", "fireflyer.dev/gpu": "0"}, {"fireflyer.dev/gpu": "4"}, 0, False),
    ],
)
def test_slots_are_the_devices_that_work_or_the_cores(
    allocatable: dict[str, str], capacity: dict[str, str], slots: int, usable: bool
) -> None:
    seen = shape_node(node(allocatable, capacity)).node
    assert (seen.slots, seen.ready) == (slots, usable)
