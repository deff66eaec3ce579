"""Objects that the schemas refuse: types, bounds, patterns, enumerations, required fields.

What the API server says of them is its own; it names the field, what was given, and what may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .rule_cases import job, status

Json = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    name: str
    plural: str
    body: Json
    message: str


SHAPES = [
    Shape(
        "no nodes",
        "flyerjobs",
        job(nodes=0),
        "spec.nodes: Invalid value: 0: spec.nodes in body should be greater than or equal to 1",
    ),
    Shape(
        "more restarts than are counted",
        "flyerjobs",
        job(maxRestarts=10_001),
        "spec.maxRestarts: Invalid value: 10001: spec.maxRestarts in body should be less "
        "than or equal to 10000",
    ),
    Shape(
        "half a node",
        "flyerjobs",
        job(nodes=1.5),
        "spec.nodes: Invalid value: ",
    ),
    Shape(
        "a number as text",
        "flyerjobs",
        job(nodes="2"),
        'spec.nodes: Invalid value: "string": spec.nodes in body must be of type integer',
    ),
    Shape(
        "nothing to run",
        "flyerjobs",
        {"spec": {"nodes": 2}},
        "spec.template: Required value",
    ),
    Shape(
        "nothing at all",
        "flyerjobs",
        {},
        "spec: Required value",
    ),
    Shape(
        "a priority that is none",
        "flyerjobs",
        job(priority="hihg"),
        'spec.priority: Unsupported value: "hihg": supported values: "extreme-high", '
        '"very-high", "high"',
    ),
    Shape(
        "a phase that is none",
        "flyerjobs",
        job(status=status("Lost")),
        'status.phase: Unsupported value: "Lost": supported values: "Queued"',
    ),
    Shape(
        "a zone that is missing",
        "flyerjobs",
        job(nodeClass="a100#A"),
        'spec.nodeClass: Invalid value: "a100#A": spec.nodeClass in body should match',
    ),
    Shape(
        "a duration without a unit",
        "flyerjobs",
        job(activeDeadline="24"),
        'spec.activeDeadline: Invalid value: "24": spec.activeDeadline in body should match',
    ),
    Shape(
        "a suspend code beyond the last",
        "flyerjobs",
        job(status=status("Running", suspendCode=4)),
        "status.suspendCode: ",
    ),
    Shape(
        "a limit below nothing",
        "flyerquotas",
        {"spec": {"nodes": -1}},
        "spec.nodes: Invalid value: -1: spec.nodes in body should be greater than or equal to 0",
    ),
    Shape(
        "a quota of nothing",
        "flyerquotas",
        {"spec": {}},
        "spec.nodes: Required value",
    ),
    Shape(
        "a state that is none",
        "nodehealths",
        {"spec": {}, "status": {"state": "Sick"}},
        'status.state: Unsupported value: "Sick": supported values: "Healthy"',
    ),
    Shape(
        "a drain without a reason",
        "nodehealths",
        {"spec": {"drain": {"by": "anna"}}},
        "spec.drain.reason: Required value",
    ),
]
