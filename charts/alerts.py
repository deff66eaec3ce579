"""The alerts: one line of Prometheus each, and the page that tells what to do.

`charts/generate.py` writes them to the chart as rules. An alert says what people notice, not what a
counter shows; `critical` wakes somebody, `warning` is for the working day, `info` for the curious.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["GROUPS", "RUNBOOKS", "Alert", "rules"]

RUNBOOKS = "RUNBOOKS"
"""Stands for `monitoring.runbookUrl`, which the chart puts in."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule."""

    name: str
    severity: str
    expression: str
    hold: str
    summary: str
    description: str


def of_leader(metric: str) -> str:
    """A gauge of the replica that leads: the others still tell what they saw last."""
    return f"({metric} and on (pod) (flyer_leader == 1))"


QUEUED, READY = 'flyer_jobs{phase="Queued"}', 'flyer_nodes{state="ready"}'

REMOVALS = 'flyer_node_removals{state="%s"}'

GROUPS: dict[str, tuple[Alert, ...]] = {
    "fire-flyer-operator": (
        Alert(
            "FlyerNoLeader", "critical", "sum(flyer_leader) == 0 or absent(flyer_leader)", "1m",
            "No replica of the operator leads",
            "Running jobs go on; none starts, makes room or is replaced until one leads again.",
        ),
        Alert(
            "FlyerTwoLeaders", "warning", "sum(flyer_leader) > 1", "1m",
            "{{ $value }} replicas believe that they lead",
            "Fencing keeps them from harm: the older one's writes are refused. Find out why.",
        ),
        Alert(
            "FlyerWatchStale", "warning", "max by (resource) (flyer_watch_age_seconds) > 120", "2m",
            "The watch of {{ $labels.resource }} has been silent for {{ $value | humanizeDuration }}",
            "The operator decides on an old picture of {{ $labels.resource }}.",
        ),
        Alert(
            "FlyerDecisionsSlow", "warning",
            "histogram_quantile(0.99, sum by (le) (rate(flyer_decision_duration_seconds_bucket[10m]))) > 0.25",
            "10m",
            "A scheduling step takes {{ $value | humanizeDuration }} at the 99th percentile",
            "Expected are milliseconds; suspends and starts are late by as much.",
        ),
        Alert(
            "FlyerRemovalBudgetSpent", "warning",
            f"{of_leader(REMOVALS % 'spent')} > 0 and on (pod, group)"
            f" {of_leader(REMOVALS % 'spent')} >= on (pod, group) {of_leader(REMOVALS % 'budget')}",
            "5m",
            "{{ $value }} nodes of class {{ $labels.group }} are out because their health is unknown:"
            " the removal budget is spent",
            "The next node of this class whose health cannot be observed keeps getting jobs.",
        ),
        Alert(
            "FlyerSuspectNodesHeld", "critical", f"{of_leader(REMOVALS % 'held')} > 0", "2m",
            "{{ $value }} nodes of class {{ $labels.group }} get jobs although their health is unknown",
            "Beyond the removal budget: a driver, an agent or a policy that changed everywhere is"
            " likelier than this many defects.",
        ),
        Alert(
            "FlyerNodesDefectiveTogether", "critical",
            f"{of_leader(REMOVALS % 'defective')} > on (pod, group) {of_leader(REMOVALS % 'budget')}",
            "2m",
            "{{ $value }} nodes of class {{ $labels.group }} are lost or have a hardware fault",
            "Evidence is not bounded by the removal budget: look at what these nodes share.",
        ),
        Alert(
            "FlyerGangStartsRollBack", "warning",
            'sum(increase(flyer_evictions_total{reason="PodsReadyTimeout"}[30m])) > 3', "5m",
            "{{ $value | humanize }} gangs could not be started within 30 minutes",
            "Each was rolled back whole and queued again; a node or an image is likely at fault.",
        ),
        Alert(
            "FlyerJobsWaitWhileNodesIdle", "info",
            f"sum({of_leader(QUEUED)}) > 0 and sum({of_leader(READY)})"
            f" - sum({of_leader('flyer_gang_nodes')}) > 0",
            "1h",
            "Jobs have waited for an hour while nodes are idle",
            "Often right (quota, zone, size), sometimes a label or a quota that nobody remembers.",
        ),
        Alert(
            "FlyerInterruptsLoseWork", "warning",
            'sum(increase(flyer_lost_node_seconds_total{reason=~"Preempted|Suspended|Requeued"}[1h]))'
            ' / sum(increase(flyer_evictions_total{reason=~"Preempted|Suspended|Requeued"}[1h])) > 600',
            "5m",
            "An interrupt costs {{ $value | humanizeDuration }} of node time that was not saved",
            "Jobs that leave by themselves lose next to nothing: some do not, or are killed while they save.",
        ),
        Alert(
            "FlyerGoodputLow", "warning",
            "sum(increase(flyer_lost_node_seconds_total[6h]))"
            " / sum(increase(flyer_gang_node_seconds_total[6h])) > 0.1",
            "30m",
            "{{ $value | humanizePercentage }} of the jobs' node time was lost within six hours",
            "Work since the last durable checkpoint of attempts that ended early.",
        ),
        Alert(
            "FlyerSchedulerRebuilds", "warning",
            "sum(increase(flyer_scheduler_rebuilds_total[30m])) > 6", "0m",
            "The scheduler read everything anew {{ $value | humanize }} times within 30 minutes",
            "Somebody else writes the status of jobs, or leadership changes again and again.",
        ),
        Alert(
            "FlyerCrossZoneTokenHeldLong", "info", f"{of_leader('flyer_cross_zone_token_held')} == 1", "24h",
            "One job has spanned both zones for a day",
            "No other job can; it is given back when the job is next suspended or ends.",
        ),
        Alert(
            "FlyerGatewayRefusals", "warning",
            "sum by (reason) (increase(flyer_gateway_refusals_total{reason!~'replaced|forgotten'}[15m])) > 20", "5m",
            "The gateway refused {{ $value | humanize }} streams or messages: {{ $labels.reason }}",
            "Sidecars that cannot connect leave their job waiting; strangers that try are an attack.",
        ),
        Alert(
            "FlyerApiErrors", "warning",
            'sum(rate(flyer_api_requests_total{code=~"5..|429|none"}[10m]))'
            " / sum(rate(flyer_api_requests_total[10m])) > 0.05",
            "10m",
            "{{ $value | humanizePercentage }} of the operator's API requests fail",
            "The API server is overloaded or limits us; decisions are committed late.",
        ),
        Alert(
            "FlyerJobRequestsHeld", "warning",
            "sum by (priority_level) (apiserver_flowcontrol_current_inqueue_requests"
            '{priority_level=~"flyer-jobs|flyer-job-reads|flyer-nodes"}) > 0'
            " and sum by (priority_level) (rate(apiserver_flowcontrol_dispatched_requests_total[2m])) < 1",
            "1m",
            "{{ $value }} requests wait at the API server while others occupy all seats of"
            " {{ $labels.priority_level }}",
            "Few requests take long instead of many a moment: bodies that are sent slowly, or a"
            " webhook that does not answer.",
        ),
    ),
    "fire-flyer-devices": (
        Alert(
            "FlyerNodeAgentSilent", "warning",
            'count(kube_pod_status_phase{phase="Running", pod=~"flyer-node-.*"} == 1)'
            " - (count(count by (pod) (flyer_node_last_observation_timestamp_seconds)) or vector(0)) > 0",
            "10m",
            "{{ $value | humanize }} node agents run but report nothing",
            "Their nodes' devices are not watched.",
        ),
        Alert(
            "FlyerDeviceUnhealthy", "warning",
            'sum by (node, resource) (flyer_node_devices{health="unhealthy"}) > 0', "10m",
            "{{ $value }} {{ $labels.resource }} on {{ $labels.node }} are unhealthy",
            "They are out of the node's allocatable; whole-node jobs no longer fit there.",
        ),
        Alert(
            "FlyerNodesUnhealthyTogether", "critical",
            'count(sum by (node) (flyer_node_devices{health="unhealthy"}) > 0)'
            " / count(count by (node) (flyer_node_devices)) > 0.1",
            "5m",
            "{{ $value | humanizePercentage }} of the nodes have unhealthy devices",
            "So many at once are rarely the nodes: look at a switch, the subnet manager, a driver.",
        ),
        Alert(
            "FlyerNodesUnknownTogether", "critical",
            'count(count by (node) (flyer_node_device_state{state="Unknown"} == 1)) > 2'
            ' and count(count by (node) (flyer_node_device_state{state="Unknown"} == 1))'
            " / count(count by (node) (flyer_node_devices)) > 0.1",
            "2m",
            "The devices of {{ $value | humanize }} nodes do not answer, without a fault that was seen",
            "More than two nodes and more than a tenth: a driver or an agent update, not the nodes.",
        ),
        Alert(
            "FlyerXidHardware", "warning",
            'sum by (node, xid) (increase(flyer_node_gpu_xid_total{class=~"uncorrectable|ecc|gsp"}[30m])) > 0', "0m",
            "Xid {{ $labels.xid }} on {{ $labels.node }}",
            "The GPU reports a fault that no program causes.",
        ),
        Alert(
            "FlyerLinkFlaps", "warning",
            "sum by (node, hca, port) (increase(flyer_node_port_errors_total{counter='link_downed'}[1h])) >= 3", "0m",
            "{{ $labels.hca }} port {{ $labels.port }} on {{ $labels.node }} went down"
            " {{ $value | humanize }} times in an hour",
            "Cable, transceiver or switch port; collectives stall at each cut.",
        ),
        Alert(
            "FlyerHardwareHangs", "warning",
            "sum by (node) (increase(flyer_node_hardware_worker_kills_total[15m])) > 2", "5m",
            "Calls into a driver on {{ $labels.node }} hang",
            "The driver does not answer; health there is unknown, not good.",
        ),
    ),
    "fire-flyer-storage": (
        Alert(
            "ThreeFSDown", "critical", "max(threefs_up) == 0 or absent(threefs_up)", "2m",
            "The 3FS cluster manager does not answer",
            "Open files go on; nothing fails over and no client can begin.",
        ),
        Alert(
            "ThreeFSNodeDead", "warning", 'sum(threefs_nodes{state="dead"}) > 0', "2m",
            "{{ $value }} storage services are dead",
            "Their chains serve from the other copies; another loss may take data out of reach.",
        ),
        Alert(
            "ThreeFSChainsDegraded", "warning", 'sum(threefs_chains{state="degraded"}) > 0', "30m",
            "{{ $value }} chains have lacked a copy for half an hour",
            "A returning service is synced in minutes: this one does not return or does not finish.",
        ),
        Alert(
            "ThreeFSChainsUnavailable", "critical",
            'sum(threefs_chains{state="unavailable"}) > 0', "30s",
            "{{ $value }} chains are served by nobody",
            "Reads and writes of their chunks wait until a copy returns.",
        ),
        Alert(
            "ThreeFSFillingUp", "warning",
            "max(threefs_used_bytes / (threefs_capacity_bytes > 0)) > 0.85", "15m",
            "The fullest storage service is {{ $value | humanizePercentage }} full",
            "At 100 % writes wait, then fail.",
        ),
        Alert(
            "ThreeFSVolumeFillingUp", "warning",
            "kubelet_volume_stats_used_bytes / kubelet_volume_stats_capacity_bytes > 0.9"
            " and on (namespace, persistentvolumeclaim) kube_persistentvolumeclaim_info"
            '{storageclass="threefs"}',
            "15m",
            "Volume {{ $labels.persistentvolumeclaim }} in {{ $labels.namespace }} is"
            " {{ $value | humanizePercentage }} full",
            "The quota is hard: writes beyond it fail, and checkpoints with them.",
        ),
        Alert(
            "ThreeFSMountManagerDown", "critical", "min by (node) (threefs_csi_mount_manager_up) == 0", "2m",
            "The mount manager on {{ $labels.node }} does not answer",
            "Mounted volumes may be gone there; new ones cannot be mounted.",
        ),
        Alert(
            "ThreeFSMountsLost", "critical",
            'sum by (node) (threefs_csi_mounts{state=~"lost|down|ended"}) > 0', "2m",
            "{{ $value }} volumes on {{ $labels.node }} have no daemon",
            "Programs in their pods get errors or wait.",
        ),
        Alert(
            "ThreeFSDaemonsRestart", "warning",
            "sum by (node) (increase(threefs_csi_daemon_restarts_total[30m])) > 3", "0m",
            "FUSE daemons on {{ $labels.node }} were replaced {{ $value | humanize }} times",
            "Pods noticed pauses only; the cause is a crash or too little memory.",
        ),
        Alert(
            "ThreeFSCallsFail", "warning",
            'sum by (call) (rate(threefs_csi_calls_total{code!~"OK|NOT_FOUND"}[15m]))'
            " / sum by (call) (rate(threefs_csi_calls_total[15m])) > 0.2",
            "15m",
            "{{ $value | humanizePercentage }} of {{ $labels.call }} calls fail",
            "Volumes are not made, mounted or given back.",
        ),
    ),
}  # fmt: skip


def rules() -> dict[str, Any]:
    """The groups as Prometheus reads them."""
    return {
        "groups": [
            {"name": group, "rules": [_rule(alert) for alert in alerts]}
            for group, alerts in GROUPS.items()
        ]
    }


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.hold,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{RUNBOOKS}/{alert.name}.md",
        },
    }
