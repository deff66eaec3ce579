"""Dashboards, alerts and pages name existing metrics; every alert fires only in its case."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from charts import alerts, dashboards, generate, metrics_reference
from charts.metrics_reference import COMPONENTS, Metric
from charts.tests.alert_cases import CASES
from charts.tests.conftest import CHART, Render

ROOT = generate.ROOT
METRICS = {
    metric.name: metric
    for component in COMPONENTS
    for metric in metrics_reference.metrics(component)
}
OWN_METRICS = re.compile(r"\b(?:flyer|threefs)_[a-z0-9_]+\b")
FOREIGN_METRICS = re.compile(r"\b(?:apiserver_flowcontrol|kubelet_volume_stats|kube)_[a-z_]+\b")
"""Metrics of the API server, the kubelet and kube-state-metrics."""
ALERTS = [alert for group in alerts.GROUPS.values() for alert in group]
PAGES = ROOT / "docs" / "operations" / "runbooks"


def defined(name: str) -> Metric | None:
    if name in METRICS:
        return METRICS[name]
    series = re.sub(r"_(bucket|sum|count)$", "", name)
    metric = METRICS.get(series)
    return metric if metric and metric.kind == "histogram" else None


def labels_of(name: str) -> set[str]:
    metric = defined(name)
    return set(metric.labels) if metric else set()


def expressions() -> Iterator[tuple[str, str]]:
    for alert in ALERTS:
        yield f"alert {alert.name}", alert.expression
    for page in dashboards.DASHBOARDS:
        for panel in (*page.figures, *page.graphs):
            for expression, _ in panel.queries:
                yield f"{page.name}: {panel.title}", expression


@pytest.mark.parametrize(("where", "expression"), list(expressions()), ids=lambda text: text[:60])
def test_every_metric_of_a_query_is_defined(where: str, expression: str) -> None:
    names = OWN_METRICS.findall(expression)
    assert names or FOREIGN_METRICS.findall(expression), where
    assert not [name for name in names if defined(name) is None]


@pytest.mark.parametrize(("where", "expression"), list(expressions()), ids=lambda text: text[:60])
def test_every_label_of_a_query_is_a_label_of_its_metric(where: str, expression: str) -> None:
    for name, matchers in re.findall(r"\b((?:flyer|threefs)_[a-z0-9_]+)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        assert labels <= labels_of(name) | {"pod"}, where
    grouped = {
        label.strip()
        for part in re.findall(r"by \(([^)]*)\)", expression)
        for label in part.split(",")
    }
    allowed = {label for name in OWN_METRICS.findall(expression) for label in labels_of(name)}
    if "apiserver_flowcontrol_" in expression:
        allowed.add("priority_level")
    # Prometheus adds the pod, the PodMonitors the node; a histogram has its bounds.
    assert grouped <= allowed | {"node", "pod", "le"}, where


def test_metrics_that_pages_name_exist() -> None:
    folders = ("docs/operations", "docs/guides", "docs/tutorial")
    for path in (page for folder in folders for page in (ROOT / folder).rglob("*.md")):
        names = set(re.findall(r"`((?:flyer|threefs)_[a-z0-9_]+)", path.read_text()))
        assert not {name for name in names if defined(name) is None}, path


def test_metrics_follow_the_conventions_of_prometheus() -> None:
    for name, metric in METRICS.items():
        assert (metric.kind == "counter") == name.endswith("_total"), name
        assert not {"pod", "job", "user", "name", "namespace"} & set(metric.labels), name
        if metric.kind == "histogram":
            assert name.endswith(("_seconds", "_bytes", "_ratio")), name


def test_every_metric_is_on_a_dashboard_or_explained() -> None:
    expressions_text = " ".join(expression for _, expression in expressions())
    # Metrics for troubleshooting, which are not on a dashboard.
    rest = {
        "flyer_node_kubelet_restarts_total", "flyer_node_findings",
        "flyer_node_report_writes_total", "flyer_node_kernel_log_lost_total",
        "flyer_node_events_total", "flyer_node_gpu_probes_total",
        "flyer_queued_nodes", "flyer_waiting_jobs",
        "threefs_csi_calls_in_flight", "threefs_csi_inline_removals_deferred_total",
        "threefs_csi_unreadable_records_total", "threefs_csi_unmounts_total",
        "threefs_csi_tickets_total", "threefs_csi_copies_total",
        # The operator reads them for a ThreeFSCluster.
        "threefs_mgmtd_primary", "threefs_storage_draining",
        "threefs_storage_replicas", "threefs_storage_sole_replicas",
    }  # fmt: skip
    missing = {
        name for name in METRICS if not re.search(rf"\b{name}(_bucket)?\b", expressions_text)
    }
    assert missing <= rest


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_a_runbook(alert: alerts.Alert) -> None:
    text = (PAGES / f"{alert.name}.md").read_text()
    assert text.startswith(f"# {alert.name}\n")
    parts = re.findall(r"^\*\*([A-Z][a-z ]+)\.\*\*", text, re.MULTILINE)
    assert parts == ["Symptom", "Why", "Look", "Do", "When to worry"]
    assert alert.severity in {"critical", "warning", "info"}


def test_every_page_belongs_to_an_alert() -> None:
    pages = {path.stem for path in PAGES.glob("*.md")} - {"index"}
    assert pages == {alert.name for alert in ALERTS}


def test_alerts_link_to_the_pages_of_the_installation(render: Render) -> None:
    rendered = render(**{"monitoring.rules": True, "monitoring.runbookUrl": "https://wiki/books/"})
    [rule] = rendered.of("PrometheusRule")
    urls = [
        item["annotations"]["runbook_url"]
        for group in rule["spec"]["groups"]
        for item in group["rules"]
    ]
    assert urls == [f"https://wiki/books/{alert.name}.md" for alert in ALERTS]


def test_dashboards_are_what_grafana_imports(render: Render) -> None:
    config_maps = render(**{"monitoring.dashboards": True}).of("ConfigMap")
    pages = [
        json.loads(text)
        for match in config_maps
        for name, text in match["data"].items()
        if name.endswith(".json") and name != "cluster.json"
    ]
    assert len(pages) == len(dashboards.DASHBOARDS)
    for page in pages:
        places = [tuple(sorted(panel["gridPos"].items())) for panel in page["panels"]]
        assert len(places) == len(set(places))
        assert len({panel["id"] for panel in page["panels"]}) == len(page["panels"])
        for panel in page["panels"]:
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["targets"]
            assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= dashboards.GRID_WIDTH


def test_every_alert_has_a_case() -> None:
    assert CASES.keys() == {alert.name for alert in ALERTS}


@pytest.mark.parametrize("fires", [True, False], ids=["fires", "does not fire"])
def test_alerts_fire_when_they_should_and_only_then(fires: bool, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing; `scripts/bootstrap prometheus=promtool` installs it")
    alerts = YAML(typ="safe").load((CHART / "files" / "alerts.yaml").read_text())
    rules = {rule["alert"]: rule for group in alerts["groups"] for rule in group["rules"]}
    files = []
    for name, (bad, good) in CASES.items():
        series = bad if fires else good
        # The last minute of the series; one alert needs a series of a day.
        at = "1500m" if name == "FlyerCrossZoneTokenHeldLong" else "178m"
        alerts_firing = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) > bool 0'
        test = {
            "name": name,
            "interval": "1m",
            "input_series": [{"series": key, "values": value} for key, value in series.items()],
            "promql_expr_test": [
                {
                    "expr": alerts_firing,
                    "eval_time": at,
                    "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                }
            ],
        }
        # Each alert by itself: with all of them promtool evaluates each rule for each test.
        rule = {"groups": [{"name": name, "rules": [rules[name]]}]}
        YAML().dump(rule, tmp_path / f"{name}.yaml")
        case = {"rule_files": [f"{name}.yaml"], "evaluation_interval": "1m", "tests": [test]}
        YAML().dump(case, tmp_path / f"{name}.test.yaml")
        files.append(f"{name}.test.yaml")
    result = subprocess.run(
        [promtool, "test", "rules", *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
