"""Reference of metrics: every metric that a component serves, read from the code that defines it.

Dashboards, alerts and pages may speak of nothing else. Names must stand as literals in a call of
prometheus_client's constructors: what is not found here is not documented.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMPONENTS", "Component", "Metric", "metrics"]

ROOT = Path(__file__).resolve().parents[1]
TYPES = {
    "Counter": "counter",
    "CounterMetricFamily": "counter",
    "Gauge": "gauge",
    "GaugeMetricFamily": "gauge",
    "Histogram": "histogram",
}


@dataclass(frozen=True, slots=True)
class Component:
    """A component that serves metrics: its title and the location of its code."""

    title: str
    sources: tuple[str, ...]


COMPONENTS = (
    Component(
        "Operator (`flyer-operator`) and injection webhook (`flyer-webhook`)",
        ("operator/src/flyer/kube",),
    ),
    Component("Node agent (`flyer-node`)", ("deviceplugin/src/flyer_node",)),
    Component("CSI driver (`threefs-csi`)", ("csi-3fs/python/threefs/csi",)),
    Component("3FS (in the pod of mgmtd)", ("csi-3fs/python/threefs/exporter.py",)),
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, under the name that Prometheus stores."""

    name: str
    kind: str
    labels: tuple[str, ...]
    what: str


def metrics(component: Component) -> list[Metric]:
    """The metrics that a component's code defines, in source order."""
    result = []
    for source in component.sources:
        path = ROOT / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            result += list(_of(ast.parse(file.read_text())))
    return result


def _of(tree: ast.AST) -> Iterator[Metric]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        kind = TYPES.get(node.func.id)
        texts = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)]
        if kind is None or len(texts) < 2 or not all(isinstance(text, str) for text in texts):
            continue
        name, help_text = (str(text) for text in texts)
        if kind == "counter":
            name = name.removesuffix("_total") + "_total"
        yield Metric(name, kind, _labels(node), help_text.rstrip("."))


def _labels(call: ast.Call) -> tuple[str, ...]:
    named = [word.value for word in call.keywords if word.arg in {"labels", "labelnames"}]
    for value in [*call.args[2:3], *named]:
        if isinstance(value, ast.List | ast.Tuple):
            return tuple(
                str(element.value) for element in value.elts if isinstance(element, ast.Constant)
            )
    return ()
