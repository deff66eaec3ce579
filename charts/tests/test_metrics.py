"""Dashboards, alerts and pages name existing metrics; every alert fires when it should."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from charts import alerts, dashboards, generate, metrics
from charts.metrics import COMPONENTS, Metric
from charts.tests.conftest import CHART, Render

ROOT = generate.ROOT
METRICS = {metric.name: metric for component in COMPONENTS for metric in metrics.metrics(component)}
OURS = re.compile(r"\b(?:flyer|threefs)_[a-z0-9_]+\b")
THEIRS = re.compile(r"\b(?:apiserver_flowcontrol|kubelet_volume_stats|kube)_[a-z_]+\b")
"""Of the API server, the kubelet and kube-state-metrics: they exist where Prometheus watches a cluster."""
ALERTS = [alert for group in alerts.GROUPS.values() for alert in group]
PAGES = ROOT / "docs" / "operations" / "runbooks"


def defined(name: str) -> Metric | None:
    if name in METRICS:
        return METRICS[name]
    series = re.sub(r"_(bucket|sum|count)$", "", name)
    found = METRICS.get(series)
    return found if found and found.kind == "histogram" else None


def labels_of(name: str) -> set[str]:
    found = defined(name)
    return set(found.labels) if found else set()


def expressions() -> Iterator[tuple[str, str]]:
    for alert in ALERTS:
        yield f"alert {alert.name}", alert.expression
    for page in dashboards.DASHBOARDS:
        for panel in (*page.figures, *page.graphs):
            for expression, _ in panel.queries:
                yield f"{page.name}: {panel.title}", expression


@pytest.mark.parametrize(("where", "expression"), list(expressions()), ids=lambda text: text[:60])
def test_every_metric_of_a_query_is_defined(where: str, expression: str) -> None:
    names = OURS.findall(expression)
    assert names or THEIRS.findall(expression), where
    assert not [name for name in names if defined(name) is None]


@pytest.mark.parametrize(("where", "expression"), list(expressions()), ids=lambda text: text[:60])
def test_every_label_of_a_query_is_one_that_the_metric_has(where: str, expression: str) -> None:
    for name, matchers in re.findall(r"\b((?:flyer|threefs)_[a-z0-9_]+)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        assert labels <= labels_of(name) | {"pod"}, where
    grouped = {
        label.strip()
        for part in re.findall(r"by \(([^)]*)\)", expression)
        for label in part.split(",")
    }
    known = {label for name in OURS.findall(expression) for label in labels_of(name)}
    if "apiserver_flowcontrol_" in expression:
        known.add("priority_level")
    # Prometheus adds the pod, the PodMonitors the node; a histogram has its bounds.
    assert grouped <= known | {"node", "pod", "le"}, where


def test_pages_speak_of_metrics_that_exist() -> None:
    folders = ("docs/operations", "docs/guides", "docs/tutorial")
    for path in (page for folder in folders for page in (ROOT / folder).rglob("*.md")):
        names = set(re.findall(r"`((?:flyer|threefs)_[a-z0-9_]+)", path.read_text()))
        assert not {name for name in names if defined(name) is None}, path


def test_metrics_keep_prometheus_manners() -> None:
    for name, metric in METRICS.items():
        assert (metric.kind == "counter") == name.endswith("_total"), name
        assert not {"pod", "job", "user", "name", "namespace"} & set(metric.labels), name
        if metric.kind == "histogram":
            assert name.endswith(("_seconds", "_bytes")), name


def test_every_metric_is_shown_or_told_about() -> None:
    shown = " ".join(expression for _, expression in expressions())
    # Metrics for troubleshooting, which are not on a dashboard.
    rest = {
        "flyer_node_kubelet_restarts_total", "flyer_node_findings", "flyer_node_report_writes_total",
        "flyer_node_kernel_log_lost_total", "flyer_node_events_total", "flyer_node_gpu_probes_total",
        "flyer_queued_nodes", "flyer_waiting_jobs",
        "threefs_csi_calls_in_flight", "threefs_csi_inline_removals_deferred_total",
        "threefs_csi_unreadable_records_total", "threefs_csi_unmounts_total",
        "threefs_csi_tickets_total",
    }  # fmt: skip
    missing = {name for name in METRICS if not re.search(rf"\b{name}(_bucket)?\b", shown)}
    assert missing <= rest


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_a_page_that_tells_what_to_do(alert: alerts.Alert) -> None:
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
    found = render(**{"monitoring.dashboards": True}).of("ConfigMap")
    pages = [
        json.loads(text)
        for match in found
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


# For each alert: series that make it fire after some time, and the same once all is well.
# Promtool's notation: "0+1x60" begins at 0 and grows by 1 at each of 60 steps of one minute.
Series = dict[str, str]


def removals(spent: int, held: int, defective: int) -> Series:
    """A class with a budget of two, as the leader counts it; another replica saw worse before."""
    counts = {"budget": 2, "spent": spent, "held": held, "defective": defective}
    series = {
        f'flyer_node_removals{{node_class="a100",pod="a",state="{state}"}}': f"{number}x180"
        for state, number in counts.items()
    }
    earlier = {
        f'flyer_node_removals{{node_class="a100",pod="b",state="{state}"}}': f"{number}x180"
        for state, number in {"budget": 2, "spent": 2, "held": 9, "defective": 9}.items()
    }
    leader = {f'flyer_leader{{pod="{pod}"}}': f"{pod == 'a':d}x180" for pod in "ab"}
    return {**series, **earlier, **leader}


CASES: dict[str, tuple[Series, Series]] = {
    "FlyerNoLeader": (
        {'flyer_leader{pod="a"}': "0x180", 'flyer_leader{pod="b"}': "0x180"},
        {'flyer_leader{pod="a"}': "1x180", 'flyer_leader{pod="b"}': "0x180"},
    ),
    "FlyerTwoLeaders": (
        {'flyer_leader{pod="a"}': "1x180", 'flyer_leader{pod="b"}': "1x180"},
        {'flyer_leader{pod="a"}': "1x180", 'flyer_leader{pod="b"}': "0x180"},
    ),
    "FlyerWatchStale": (
        {'flyer_watch_age_seconds{resource="pods"}': "0+60x180"},
        {'flyer_watch_age_seconds{resource="pods"}': "59x180"},
    ),
    "FlyerDecisionsSlow": (
        {
            'flyer_decision_duration_seconds_bucket{le="0.1"}': "0+90x180",
            'flyer_decision_duration_seconds_bucket{le="1"}': "0+100x180",
            'flyer_decision_duration_seconds_bucket{le="+Inf"}': "0+100x180",
        },
        {
            'flyer_decision_duration_seconds_bucket{le="0.1"}': "0+100x180",
            'flyer_decision_duration_seconds_bucket{le="1"}': "0+100x180",
            'flyer_decision_duration_seconds_bucket{le="+Inf"}': "0+100x180",
        },
    ),
    "FlyerRemovalBudgetSpent": (removals(2, 0, 0), removals(1, 0, 1)),
    "FlyerSuspectNodesHeld": (removals(2, 1, 0), removals(2, 0, 0)),
    "FlyerNodesDefectiveTogether": (removals(0, 0, 3), removals(0, 0, 2)),
    "FlyerGangStartsRollBack": (
        {'flyer_evictions_total{reason="PodsReadyTimeout"}': "0+1x180"},
        {'flyer_evictions_total{reason="Preempted"}': "0+1x180"},
    ),
    "FlyerJobsWaitWhileNodesIdle": (
        {
            'flyer_leader{pod="a"}': "1x180",
            'flyer_jobs{phase="Queued",pod="a"}': "2x180",
            'flyer_nodes{state="ready",pod="a"}': "4x180",
            'flyer_gang_nodes{pod="a"}': "2x180",
        },
        # What an earlier leader saw last does not count.
        {
            'flyer_leader{pod="a"}': "1x180",
            'flyer_leader{pod="b"}': "0x180",
            'flyer_jobs{phase="Queued",pod="a"}': "2x180",
            'flyer_nodes{state="ready",pod="a"}': "4x180",
            'flyer_gang_nodes{pod="a"}': "4x180",
            'flyer_jobs{phase="Queued",pod="b"}': "2x180",
            'flyer_nodes{state="ready",pod="b"}': "4x180",
            'flyer_gang_nodes{pod="b"}': "0x180",
        },
    ),
    "FlyerInterruptsLoseWork": (
        {
            'flyer_lost_node_seconds_total{reason="Preempted"}': "0+900x180",
            'flyer_evictions_total{reason="Preempted"}': "0+1x180",
        },
        {
            'flyer_lost_node_seconds_total{reason="Preempted"}': "0+20x180",
            'flyer_evictions_total{reason="Preempted"}': "0+1x180",
            'flyer_lost_node_seconds_total{reason="NodeFailures"}': "0+9000x180",
        },
    ),
    "FlyerGoodputLow": (
        {
            'flyer_lost_node_seconds_total{reason="NodeFailures"}': "0+20x180",
            "flyer_gang_node_seconds_total": "0+100x180",
        },
        {
            'flyer_lost_node_seconds_total{reason="NodeFailures"}': "0+2x180",
            "flyer_gang_node_seconds_total": "0+100x180",
        },
    ),
    "FlyerSchedulerRebuilds": (
        {"flyer_scheduler_rebuilds_total": "0+1x180"},
        {"flyer_scheduler_rebuilds_total": "1x180"},
    ),
    "FlyerCrossZoneTokenHeldLong": (
        {'flyer_leader{pod="a"}': "1x1600", 'flyer_cross_zone_token_held{pod="a"}': "1x1600"},
        {'flyer_leader{pod="a"}': "1x1600", 'flyer_cross_zone_token_held{pod="a"}': "1x60 0 1x1400"},
    ),
    "FlyerGatewayRefusals": (
        {'flyer_gateway_refusals_total{reason="bad_token"}': "0+5x180"},
        {'flyer_gateway_refusals_total{reason="replaced"}': "0+5x180"},
    ),
    "FlyerApiErrors": (
        {
            'flyer_api_requests_total{code="200"}': "0+60x180",
            'flyer_api_requests_total{code="503"}': "0+20x180",
        },
        {
            'flyer_api_requests_total{code="200"}': "0+60x180",
            'flyer_api_requests_total{code="409"}': "0+20x180",
        },
    ),
    "FlyerJobRequestsHeld": (
        {
            'apiserver_flowcontrol_current_inqueue_requests{priority_level="flyer-jobs"}': "4x180",
            'apiserver_flowcontrol_dispatched_requests_total{priority_level="flyer-jobs"}': "0+3x180",
        },
        {
            'apiserver_flowcontrol_current_inqueue_requests{priority_level="flyer-jobs"}': "4x180",
            'apiserver_flowcontrol_dispatched_requests_total{priority_level="flyer-jobs"}': "0+600x180",
        },
    ),
    "FlyerNodeAgentSilent": (
        {
            'kube_pod_status_phase{phase="Running",pod="flyer-node-x"}': "1x180",
            'kube_pod_status_phase{phase="Running",pod="flyer-node-y"}': "1x180",
            'flyer_node_last_observation_timestamp_seconds{pod="x",source="driver"}': "9x180",
        },
        {
            'kube_pod_status_phase{phase="Running",pod="flyer-node-x"}': "1x180",
            'flyer_node_last_observation_timestamp_seconds{pod="x",source="driver"}': "9x180",
        },
    ),
    "FlyerDeviceUnhealthy": (
        {'flyer_node_devices{health="unhealthy",node="x",resource="gpu"}': "1x180"},
        {'flyer_node_devices{health="recovering",node="x",resource="gpu"}': "1x180"},
    ),
    "FlyerNodesUnknownTogether": (
        {
            series: "1x180"
            for node in ("a", "b", "c")
            for series in (
                f'flyer_node_device_state{{node="{node}",kind="gpu",device="0",state="Unknown"}}',
                f'flyer_node_devices{{node="{node}",health="unhealthy",resource="gpu"}}',
            )
        },
        {  # two of two, and evidence
            series: "1x180"
            for node in ("a", "b")
            for series in (
                f'flyer_node_device_state{{node="{node}",kind="gpu",device="0",state="Unknown"}}',
                f'flyer_node_device_state{{node="x{node}",kind="gpu",device="0",state="Unhealthy"}}',
                f'flyer_node_devices{{node="{node}",health="unhealthy",resource="gpu"}}',
            )
        },
    ),
    "FlyerNodesUnhealthyTogether": (
        {
            f'flyer_node_devices{{health="unhealthy",node="{node}",resource="gpu"}}': value
            for node, value in {"a": "1x180", "b": "0x180", "c": "0x180"}.items()
        },
        {
            f'flyer_node_devices{{health="unhealthy",node="n{number}",resource="gpu"}}': (
                "1x180" if number == 0 else "0x180"
            )
            for number in range(11)
        },
    ),
    "FlyerXidHardware": (
        {'flyer_node_gpu_xid_total{class="uncorrectable",node="x",xid="79"}': "0x170 1x10"},
        {'flyer_node_gpu_xid_total{class="software",node="x",xid="31"}': "0+1x180"},
    ),
    "FlyerLinkFlaps": (
        {'flyer_node_port_errors_total{counter="link_downed",hca="mlx5_0",node="x",port="1"}': "0x150 2 4 6x28"},
        {'flyer_node_port_errors_total{counter="link_downed",hca="mlx5_0",node="x",port="1"}': "0x170 1x10"},
    ),
    "FlyerHardwareHangs": (
        {'flyer_node_hardware_worker_kills_total{node="x"}': "0+1x180"},
        {'flyer_node_hardware_worker_kills_total{node="x"}': "1x180"},
    ),
    "ThreeFSDown": ({"threefs_up": "0x180"}, {"threefs_up": "1x180"}),
    "ThreeFSNodeDead": (
        {'threefs_nodes{state="dead"}': "1x180"},
        {'threefs_nodes{state="dead"}': "0x180"},
    ),
    "ThreeFSChainsDegraded": (
        {'threefs_chains{state="degraded"}': "4x180"},
        {'threefs_chains{state="degraded"}': "0x160 4x10 0x10"},
    ),
    "ThreeFSChainsUnavailable": (
        {'threefs_chains{state="unavailable"}': "1x180"},
        {'threefs_chains{state="unavailable"}': "0x180"},
    ),
    "ThreeFSFillingUp": (
        {
            'threefs_used_bytes{storage="1"}': "90x180",
            'threefs_capacity_bytes{storage="1"}': "100x180",
        },
        {'threefs_used_bytes{storage="1"}': "90x180", 'threefs_capacity_bytes{storage="1"}': "0x180"},
    ),
    "ThreeFSVolumeFillingUp": (
        {
            'kubelet_volume_stats_used_bytes{namespace="n",persistentvolumeclaim="c"}': "95x180",
            'kubelet_volume_stats_capacity_bytes{namespace="n",persistentvolumeclaim="c"}': "100x180",
            'kube_persistentvolumeclaim_info{namespace="n",persistentvolumeclaim="c",storageclass="threefs"}': "1x180",
        },
        {
            'kubelet_volume_stats_used_bytes{namespace="n",persistentvolumeclaim="c"}': "95x180",
            'kubelet_volume_stats_capacity_bytes{namespace="n",persistentvolumeclaim="c"}': "100x180",
            'kube_persistentvolumeclaim_info{namespace="n",persistentvolumeclaim="c",storageclass="other"}': "1x180",
        },
    ),
    "ThreeFSMountManagerDown": (
        {'threefs_csi_mount_manager_up{node="x"}': "0x180", 'threefs_csi_mount_manager_up{node="y"}': "1x180"},
        {'threefs_csi_mount_manager_up{node="x"}': "1x180", 'threefs_csi_mount_manager_up{node="y"}': "1x180"},
    ),
    "ThreeFSMountsLost": (
        {'threefs_csi_mounts{node="x",state="lost"}': "1x180"},
        {'threefs_csi_mounts{node="x",state="serving"}': "9x180"},
    ),
    "ThreeFSDaemonsRestart": (
        {'threefs_csi_daemon_restarts_total{node="x"}': "0+1x180"},
        {'threefs_csi_daemon_restarts_total{node="x"}': "2x180"},
    ),
    "ThreeFSCallsFail": (
        {
            'threefs_csi_calls_total{call="NodePublishVolume",code="OK"}': "0+1x180",
            'threefs_csi_calls_total{call="NodePublishVolume",code="UNAVAILABLE"}': "0+1x180",
        },
        {
            'threefs_csi_calls_total{call="NodePublishVolume",code="OK"}': "0+1x180",
            'threefs_csi_calls_total{call="NodePublishVolume",code="NOT_FOUND"}': "0+1x180",
        },
    ),
}  # fmt: skip


def test_every_alert_has_a_case() -> None:
    assert CASES.keys() == {alert.name for alert in ALERTS}


@pytest.mark.parametrize("fires", [True, False], ids=["fires", "stays quiet"])
def test_alerts_fire_when_they_should_and_only_then(fires: bool, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing; `scripts/bootstrap prometheus=promtool` brings it")
    written = YAML(typ="safe").load((CHART / "files" / "alerts.yaml").read_text())
    rules = {rule["alert"]: rule for group in written["groups"] for rule in group["rules"]}
    files = []
    for name, (bad, good) in CASES.items():
        series = bad if fires else good
        # The last minute of the series: a day for what needs a day.
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
    done = subprocess.run(
        [promtool, "test", "rules", *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
