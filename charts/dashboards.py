"""The Grafana dashboards, as data: `charts/generate.py` writes them to the chart as JSON.

Four pages: the fleet and its queue, what jobs gain and lose, storage, devices. Two columns of
graphs under one row of figures; every graph names its unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from charts.alerts import of_leader

__all__ = ["DASHBOARDS", "Dashboard", "Panel", "dashboard"]

SOURCE = {"type": "prometheus", "uid": "${source}"}
STAT_WIDTH, STAT_HEIGHT = 4, 4
GRAPH_WIDTH, GRAPH_HEIGHT = 12, 8
GRID_WIDTH = 24
SCHEMA_VERSION = 39


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure or a graph. `queries` are pairs of expression and legend."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    why: str = ""
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page."""

    name: str
    title: str
    figures: tuple[Panel, ...]
    graphs: tuple[Panel, ...]


def quantiles(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """The median and the 99th percentile of a histogram."""
    labels = f"le, {by}" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    return tuple(
        (
            f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket[$__rate_interval])))",
            f"{legend}{name}",
        )
        for share, name in ((0.5, "median"), (0.99, "p99"))
    )


def rate(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """A counter's rate, by a label."""
    if not by:
        return ((f"sum(rate({metric}[$__rate_interval]))", "all"),)
    return ((f"sum by ({by}) (rate({metric}[$__rate_interval]))", f"{{{{{by}}}}}"),)


def gauge(metric: str, by: str) -> tuple[tuple[str, str], ...]:
    """A gauge, summed by a label."""
    return ((f"sum by ({by}) ({metric})", f"{{{{{by}}}}}"),)


QUEUED, RUNNING = 'flyer_jobs{phase="Queued"}', 'flyer_jobs{phase="Running"}'

DASHBOARDS = (
    Dashboard(
        "fleet",
        "Fire-Flyer: fleet and queue",
        (
            Panel("Occupancy", "percentunit", ((f"max({of_leader('flyer_node_occupancy_ratio')})", ""),), "Nodes of gangs, of those that may work"),
            Panel("Kept, 6 h", "percentunit", (("1 - sum(increase(flyer_lost_node_seconds_total[6h])) / sum(increase(flyer_gang_node_seconds_total[6h]))", ""),), "Node time of jobs that was not lost"),
            Panel("Queued", "short", ((f"sum({of_leader(QUEUED)})", ""),)),
            Panel("Running", "short", ((f"sum({of_leader(RUNNING)})", ""),)),
            Panel("Nodes with gangs", "short", ((f"sum({of_leader('flyer_gang_nodes')})", ""),)),
            Panel("Cross-zone token", "short", ((f"max({of_leader('flyer_cross_zone_token_held')})", ""),), "1 while a job spans zones"),
        ),
        (
            Panel("Nodes by state", "short", gauge(of_leader("flyer_nodes"), "state"), stacked=True),
            Panel("Jobs by phase", "short", gauge(of_leader("flyer_jobs"), "phase"), stacked=True),
            Panel("Nodes by zone", "short", gauge(of_leader("flyer_nodes"), "zone"), stacked=True),
            Panel("Nodes that waiting jobs ask for", "short", ((f"sum by (reason) ({of_leader('flyer_waiting_nodes')}) > 0", "{{reason}}"),)),
            Panel("From queued to running", "s", quantiles("flyer_job_wait_seconds")),
            Panel("Exposed share of steps", "percentunit", quantiles("flyer_step_exposed_ratio"), "Time for which jobs that report it wait for communication"),
            Panel("Scheduling step", "s", quantiles("flyer_decision_duration_seconds"), "Events in, decisions out"),
            Panel("Requests to the API server", "reqps", rate("flyer_api_requests_total", "verb")),
            Panel("Their duration", "s", quantiles("flyer_api_request_duration_seconds", "verb")),
            Panel("Silence of watches", "s", (("max by (resource) (flyer_watch_age_seconds)", "{{resource}}"),), "Beyond a minute or two the picture is old"),
            Panel("Sidecars connected", "short", (("sum(flyer_gateway_connections)", "proved"), ("sum(flyer_gateway_sockets)", "all"))),
            Panel("Refused by the gateway", "ops", rate("flyer_gateway_refusals_total", "reason")),
            Panel("Who leads", "short", (("flyer_leader", "{{pod}}"), ("flyer_leader_epoch", "{{pod}} epoch"))),
            Panel("Quarantined jobs", "short", ((f"sum({of_leader('flyer_jobs_quarantined')})", "now"), ("sum by (kind) (increase(flyer_job_faults_total[1h]))", "{{kind}}, 1 h")), "Their status is not taken, or the scheduler fails at them: the event Quarantined says why"),
        ),
    ),
    Dashboard(
        "jobs",
        "Fire-Flyer: jobs, interrupts and losses",
        (
            Panel("Gangs started, 1 h", "short", (("sum(increase(flyer_gangs_started_total[1h]))", ""),)),
            Panel("Rolled back, 1 h", "short", (('sum(increase(flyer_evictions_total{reason="PodsReadyTimeout"}[1h]))', ""),)),
            Panel("Made room, 1 h", "short", (('sum(increase(flyer_evictions_total{reason="Preempted"}[1h]))', ""),)),
            Panel("Node failures, 1 h", "short", (('sum(increase(flyer_evictions_total{reason="NodeFailures"}[1h]))', ""),)),
            Panel("Failed, 1 h", "short", (('sum(increase(flyer_jobs_ended_total{phase="Failed"}[1h]))', ""),)),
            Panel("Lost work, 1 h", "s", (("sum(increase(flyer_lost_node_seconds_total[1h]))", ""),), "Node seconds"),
        ),
        (
            Panel("Why gangs lost their nodes", "ops", rate("flyer_evictions_total", "reason")),
            Panel("Lost work by reason", "s", rate("flyer_lost_node_seconds_total", "reason"), "Node seconds each second"),
            Panel("Suspend: until the ranks know", "s", quantiles("flyer_gateway_signal_seconds")),
            Panel("Gang start", "s", quantiles("flyer_gateway_start_seconds"), "Pods made to all launchers running"),
            Panel("Jobs that ended", "ops", rate("flyer_jobs_ended_total", "phase")),
            Panel("Messages of sidecars", "ops", rate("flyer_gateway_messages_total", "kind")),
            Panel("Pods that the webhook saw", "ops", rate("flyer_injections_total", "result")),
        ),
    ),
    Dashboard(
        "storage",
        "Fire-Flyer: 3FS and volumes",
        (
            Panel("Chains whole", "percentunit", (('sum(threefs_chains{state="whole"}) / sum(threefs_chains)', ""),)),
            Panel("Chains unavailable", "short", (('sum(threefs_chains{state="unavailable"})', ""),)),
            Panel("Storage nodes alive", "short", (('sum(threefs_nodes{state="alive"})', ""),)),
            Panel("Used", "bytes", (("sum(threefs_used_bytes)", ""),)),
            Panel("Full", "percentunit", (("sum(threefs_used_bytes) / sum(threefs_capacity_bytes > 0)", ""),)),
            Panel("Mounts without a daemon", "short", (('sum(threefs_csi_mounts{state=~"lost|down|ended"})', ""),)),
        ),
        (
            Panel("mgmtd and metadata services up", "short", (("sum by (service) (threefs_service_up)", "{{service}}"),)),
            Panel("Copies by state", "short", gauge("threefs_targets", "state"), stacked=True),
            Panel("Chains by state", "short", gauge("threefs_chains", "state"), stacked=True),
            Panel("Chains that share a failure domain", "short", (("max(threefs_domain_violations)", ""),)),
            Panel("Since the last heartbeat", "s", (("max by (storage) (threefs_heartbeat_age_seconds)", "{{storage}}"),)),
            Panel("Used by storage node", "bytes", gauge("threefs_used_bytes", "storage")),
            Panel("Removed files in the trash", "short", (("max(threefs_trash_entries)", ""),)),
            Panel("Chunks that cannot be repaired", "short", (("sum by (storage) (threefs_scrub_damaged_chunks + threefs_scrub_different_chunks)", "{{storage}}"),)),
            Panel("Scrub: read", "Bps", rate("threefs_scrub_read_bytes_total", "storage")),
            Panel("Scrub: damage by node", "ops", rate("threefs_scrub_detected_chunks_total", "storage")),
            Panel("Scrub: repairs by node", "ops", rate("threefs_scrub_repaired_chunks_total", "storage")),
            Panel("Since the last scrub", "s", (("max by (storage) (threefs_scrub_age_seconds)", "{{storage}}"),)),
            Panel("Mounts by state of their daemon", "short", gauge("threefs_csi_mounts", "state"), stacked=True),
            Panel("Mounts: bytes read by distance of the replica", "Bps", rate("threefs_csi_read_bytes_total", "distance"), stacked=True),
            Panel("Replaced daemons", "ops", rate("threefs_csi_daemon_restarts_total", "node")),
            Panel("Driver: calls", "ops", rate("threefs_csi_calls_total", "call")),
            Panel("Driver: failures", "ops", (('sum by (call, code) (rate(threefs_csi_calls_total{code!="OK"}[$__rate_interval]))', "{{call}} {{code}}"),)),
            Panel("Driver: duration", "s", quantiles("threefs_csi_call_seconds", "call")),
            Panel("Fullest volumes", "percentunit", (("topk(10, kubelet_volume_stats_used_bytes / kubelet_volume_stats_capacity_bytes)", "{{namespace}}/{{persistentvolumeclaim}}"),)),
        ),
    ),
    Dashboard(
        "devices",
        "Fire-Flyer: devices",
        (
            Panel("Agents", "short", (("count(count by (pod) (flyer_node_last_observation_timestamp_seconds))", ""),)),
            Panel("Healthy", "short", (('sum(flyer_node_devices{health="healthy"})', ""),)),
            Panel("Unhealthy", "short", (('sum(flyer_node_devices{health="unhealthy"})', ""),)),
            Panel("On probation", "short", (('sum(flyer_node_device_state{state="Recovering"})', ""),)),
            Panel("Xid events, 24 h", "short", (("sum(increase(flyer_node_gpu_xid_total[24h]))", ""),)),
            Panel("Link cuts, 24 h", "short", (('sum(increase(flyer_node_port_errors_total{counter="link_downed"}[24h]))', ""),)),
        ),
        (
            Panel("Devices by state", "short", gauge("flyer_node_device_state", "state"), stacked=True),
            Panel("Unhealthy by node", "short", (('sum by (node, resource) (flyer_node_devices{health="unhealthy"}) > 0', "{{node}} {{resource}}"),)),
            Panel("Xid by number", "short", (("sum by (xid) (increase(flyer_node_gpu_xid_total[$__rate_interval]))", "Xid {{xid}}"),), stacked=True),
            Panel("Errors of ports", "ops", rate("flyer_node_port_errors_total", "counter")),
            Panel("Changes of state", "ops", rate("flyer_node_device_transitions_total", "after")),
            Panel("Answers to the kubelet", "s", quantiles("flyer_node_request_seconds", "method")),
            Panel("Refused calls of the kubelet", "ops", (('sum by (method, code) (rate(flyer_node_requests_total{code!="OK"}[$__rate_interval]))', "{{method}} {{code}}"),)),
            Panel("Registrations", "ops", rate("flyer_node_registrations_total", "outcome")),
            Panel("Workers that hardware hung", "ops", rate("flyer_node_hardware_worker_kills_total", "node")),
            Panel("Since a source last spoke", "s", (("max by (source) (time() - (flyer_node_last_observation_timestamp_seconds > 0))", "{{source}}"),)),
        ),
    ),
)  # fmt: skip


def dashboard(page: Dashboard) -> dict[str, Any]:
    """A page as Grafana imports it."""
    panels = [
        _panel(
            number,
            figure,
            "stat",
            {"w": STAT_WIDTH, "h": STAT_HEIGHT, "x": number * STAT_WIDTH, "y": 0},
        )
        for number, figure in enumerate(page.figures)
    ]
    for number, graph in enumerate(page.graphs):
        across = GRID_WIDTH // GRAPH_WIDTH
        place = {
            "w": GRAPH_WIDTH,
            "h": GRAPH_HEIGHT,
            "x": number % across * GRAPH_WIDTH,
            "y": STAT_HEIGHT + number // across * GRAPH_HEIGHT,
        }
        panels.append(_panel(len(page.figures) + number, graph, "timeseries", place))
    return {
        "uid": f"fire-flyer-{page.name}",
        "title": page.title,
        "tags": ["fire-flyer"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                }
            ]
        },
        "links": [
            {
                "type": "dashboards",
                "title": "Fire-Flyer",
                "tags": ["fire-flyer"],
                "asDropdown": True,
            }
        ],
        "panels": panels,
    }


def _panel(number: int, panel: Panel, kind: str, place: dict[str, int]) -> dict[str, Any]:
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if panel.stacked else {}
    return {
        "id": number + 1,
        "type": kind,
        "title": panel.title,
        "description": panel.why,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": expression,
                "legendFormat": legend,
                "datasource": SOURCE,
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }
