"""`python -m charts.generate`: write what is derived from the chart's sources; `--check` compares.

| source | what comes from it |
|---|---|
| `fire-flyer/values.schema.yaml` | `values.yaml`, `.schema.json`, `docs/reference/values.md` |
| `alerts.py` | `fire-flyer/files/alerts.yaml` |
| `dashboards.py` | `fire-flyer/files/dashboards/*.json` |
| the code, read by `metrics_reference.py` | `docs/reference/metrics.md` |
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

from charts import alerts, dashboards, metrics_reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["generated", "main", "rows"]

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "fire-flyer"
SOURCE = CHART / "values.schema.yaml"
NOTICE = "Generated from charts/fire-flyer/values.schema.yaml by `python -m charts.generate`."


def generated() -> dict[Path, str]:
    """Every generated file with its contents."""
    source = YAML(typ="safe").load(SOURCE)
    return {
        CHART / "values.yaml": f"# {NOTICE}\n" + "\n".join(_values(source, 0)) + "\n",
        CHART / "values.schema.json": json.dumps(_schema(source), indent=1, ensure_ascii=False)
        + "\n",
        ROOT / "docs" / "reference" / "values.md": _page(source),
        CHART / "files" / "alerts.yaml": _yaml(alerts.rules()),
        **{
            CHART / "files" / "dashboards" / f"{page.name}.json": json.dumps(
                dashboards.dashboard(page), indent=1
            )
            + "\n"
            for page in dashboards.DASHBOARDS
        },
        ROOT / "docs" / "reference" / "metrics.md": _metrics(),
    }


def rows(schema: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every key that can be set: its path, default and description."""
    for name, part in schema["properties"].items():
        path = f"{prefix}{name}"
        if _is_section(part):
            yield from rows(part, f"{path}.")
        else:
            yield path, part["default"], part["description"]


def _is_section(part: Mapping[str, Any]) -> bool:
    return "properties" in part


def _values(schema: Mapping[str, Any], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, part in schema["properties"].items():
        if depth == 0:
            yield ""
        yield f"{indent}# {part['description']}."
        if _is_section(part):
            yield f"{indent}{name}:"
            yield from _values(part, depth + 1)
        else:
            lines = _yaml({name: part["default"]}).splitlines()
            yield from (f"{indent}{line}" for line in lines)


def _yaml(value: Any) -> str:
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    stream = io.StringIO()
    yaml.dump(value, stream)
    return stream.getvalue()


def _schema(part: Any) -> Any:
    """The schema as Helm reads it: without defaults, which values.yaml holds."""
    if isinstance(part, dict):
        return {
            name: _schema(value) for name, value in part.items() if not _is_default(name, value)
        }
    return part


def _is_default(name: str, value: Any) -> bool:
    # A property may itself be called "default"; then its value is a schema.
    return name == "default" and not (isinstance(value, dict) and "description" in value)


def _page(source: Mapping[str, Any]) -> str:
    lines = [
        f"<!-- {NOTICE} -->",
        "# Values of the chart",
        "",
        "Set them with `--set KEY=VALUE` or in a file given with `-f`. "
        "An unknown key or a wrong value is refused before anything is installed.",
        "",
    ]
    for name, part in source["properties"].items():
        single = {"properties": {name: part}}
        lines += [f"## {name}", ""]
        if _is_section(part):
            lines += [f"{part['description']}.", ""]
        lines += ["| key | default | what it sets |", "|---|---|---|"]
        for path, default, description in rows(single):
            default_text = json.dumps(default, ensure_ascii=False).replace("|", "\\|")
            lines.append(f"| `{path}` | `{default_text}` | {description.replace('|', '&#124;')} |")
        lines.append("")
    return "\n".join(lines)


def _metrics() -> str:
    lines = [
        "<!-- Generated from the code by `python -m charts.generate`. -->",
        "# Metrics",
        "",
        "Read by Prometheus; `monitoring.podMonitors=true` creates PodMonitors, "
        "`monitoring.serviceMonitors=true` ServiceMonitors instead. Units are base units. No label "
        "contains the name of a job, a pod or a user, so the number of series is bounded. The "
        "monitors add the label `node`.",
        "",
    ]
    for component in metrics_reference.COMPONENTS:
        lines += [
            f"## {component.title}",
            "",
            "| metric | type | labels | what |",
            "|---|---|---|---|",
        ]
        for metric in metrics_reference.metrics(component):
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.what} |")
        lines.append("")
    lines += [
        "## Alerts",
        "",
        "`monitoring.rules=true` creates them. Each has a runbook.",
        "",
        "| alert | severity | after | message |",
        "|---|---|---|---|",
    ]
    for group in alerts.GROUPS.values():
        lines += [
            f"| [{alert.name}](../operations/runbooks/{alert.name}.md) | {alert.severity} "
            f"| {alert.hold} | {alert.summary.replace('|', '&#124;')} |"
            for alert in group
        ]
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> int:
    """Write every generated file, or report the one that differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail on a difference")
    check = parser.parse_args(arguments).check
    stale = [path for path, text in generated().items() if not _same(path, text)]
    for path in stale:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(generated()[path])
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(ROOT)}")
    return int(check and bool(stale))


def _same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
