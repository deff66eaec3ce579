"""Alert rules: a PromQL expression each, and the name of its runbook.

`charts/generate.py` writes them to the chart as rules. Alerts describe symptoms, not single
counters. `critical` pages, `warning` is for working hours, `info` needs no response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["GROUPS", "RUNBOOKS", "Alert", "rules"]

RUNBOOKS = "RUNBOOKS"
"""Placeholder for `monitoring.runbookUrl`, which the chart inserts."""


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
    """A gauge of the replica that leads: the other replicas export stale values."""
    return f"({metric} and on (pod) (flyer_leader == 1))"


QUEUED, READY = 'flyer_jobs{phase="Queued"}', 'flyer_nodes{state="ready"}'

REMOVALS = 'flyer_node_removals{state="%s"}'

GROUPS: dict[str, tuple[Alert, ...]] = {
    "fire-flyer-operator": (
        Alert(
            "FlyerNoLeader", "critical", "sum(flyer_leader) == 0 or absent(flyer_leader)", "1m",
            "No replica of the operator leads",
            "Running jobs continue; no job is started, preempted or restarted until a replica leads.",
        ),
        Alert(
            "FlyerTwoLeaders", "warning", "sum(flyer_leader) > 1", "1m",
            "{{ $value }} replicas report leadership",
            "Fencing rejects the writes of the older leader. Find the cause.",
        ),
        Alert(
            "FlyerWatchStale", "warning", "max by (resource) (flyer_watch_age_seconds) > 120", "2m",
            "The watch of {{ $labels.resource }} has been silent for {{ $value | humanizeDuration }}",
            "The operator schedules with stale data of {{ $labels.resource }}.",
        ),
        Alert(
            "FlyerDecisionsSlow", "warning",
            "histogram_quantile(0.99, sum by (le) (rate(flyer_decision_duration_seconds_bucket[10m]))) > 0.25",
            "10m",
            "A scheduling step takes {{ $value | humanizeDuration }} at the 99th percentile",
            "Steps normally take milliseconds. Suspends and starts are delayed by the same amount.",
        ),
        Alert(
            "FlyerRemovalBudgetSpent", "warning",
            f"{of_leader(REMOVALS % 'spent')} > 0 and on (pod, node_class)"
            f" {of_leader(REMOVALS % 'spent')} >= on (pod, node_class) {of_leader(REMOVALS % 'budget')}",
            "5m",
            "{{ $value }} nodes of class {{ $labels.node_class }} are out because their health is unknown:"
            " the removal budget is spent",
            "The next node of this class whose health cannot be observed keeps getting jobs.",
        ),
        Alert(
            "FlyerSuspectNodesHeld", "critical", f"{of_leader(REMOVALS % 'held')} > 0", "2m",
            "{{ $value }} nodes of class {{ $labels.node_class }} get jobs although their health is unknown",
            "Beyond the removal budget: a changed driver, agent or policy is a more likely cause"
            " than this many defects.",
        ),
        Alert(
            "FlyerNodesDefectiveTogether", "critical",
            f"{of_leader(REMOVALS % 'defective')} > on (pod, node_class) {of_leader(REMOVALS % 'budget')}",
            "2m",
            "{{ $value }} nodes of class {{ $labels.node_class }} are lost or have a hardware fault",
            "The removal budget does not limit confirmed faults: look for a common cause.",
        ),
        Alert(
            "FlyerGangStartsRollBack", "warning",
            'sum(increase(flyer_evictions_total{reason="PodsReadyTimeout"}[30m])) > 3', "5m",
            "{{ $value | humanize }} gangs could not be started within 30 minutes",
            "Each gang was rolled back and requeued; check nodes and images.",
        ),
        Alert(
            "FlyerJobsWaitWhileNodesIdle", "info",
            f"sum({of_leader(QUEUED)}) > 0 and sum({of_leader(READY)})"
            f" - sum({of_leader('flyer_gang_nodes')}) > 0",
            "1h",
            "Jobs have waited for an hour while nodes are idle",
            "Often correct (quota, zone, size); otherwise check labels and quotas.",
        ),
        Alert(
            "FlyerInterruptsLoseWork", "warning",
            'sum(increase(flyer_lost_node_seconds_total{reason=~"Preempted|Suspended|Requeued"}[1h]))'
            ' / sum(increase(flyer_evictions_total{reason=~"Preempted|Suspended|Requeued"}[1h])) > 600',
            "5m",
            "A preemption loses {{ $value | humanizeDuration }} of node time on average",
            "Jobs that release their nodes lose almost nothing: some do not, or are killed while saving.",
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
            "The scheduler rebuilt its state {{ $value | humanize }} times within 30 minutes",
            "Another client writes the status of jobs, or leadership changes repeatedly.",
        ),
        Alert(
            "FlyerCrossZoneTokenHeldLong", "info", f"{of_leader('flyer_cross_zone_token_held')} == 1", "24h",
            "One job has spanned both zones for a day",
            "No other job can span zones until this job is suspended or ends.",
        ),
        Alert(
            "FlyerGatewayRefusals", "warning",
            "sum by (reason) (increase(flyer_gateway_refusals_total{reason!~'replaced|forgotten'}[15m])) > 20", "5m",
            "The gateway refused {{ $value | humanize }} streams or messages: {{ $labels.reason }}",
            "Jobs wait for sidecars that cannot connect; repeated unauthenticated attempts may indicate an attack.",
        ),
        Alert(
            "FlyerApiErrors", "warning",
            'sum(rate(flyer_api_requests_total{code=~"5..|429|none"}[10m]))'
            " / sum(rate(flyer_api_requests_total[10m])) > 0.05",
            "10m",
            "{{ $value | humanizePercentage }} of the operator's API requests fail",
            "The API server is overloaded or throttles the operator; scheduling decisions are delayed.",
        ),
        Alert(
            "FlyerJobRequestsHeld", "warning",
            "sum by (priority_level) (apiserver_flowcontrol_current_inqueue_requests"
            '{priority_level=~"flyer-jobs|flyer-job-reads|flyer-nodes"}) > 0'
            " and sum by (priority_level) (rate(apiserver_flowcontrol_dispatched_requests_total[2m])) < 1",
            "1m",
            "{{ $value }} requests wait at the API server while others occupy all seats of"
            " {{ $labels.priority_level }}",
            "A few requests take very long: request bodies that are sent slowly, or a"
            " webhook that does not respond.",
        ),
    ),
    "fire-flyer-devices": (
        Alert(
            "FlyerNodeAgentSilent", "warning",
            'count(kube_pod_status_phase{phase="Running", pod=~"flyer-node-.*"} == 1)'
            " - (count(count by (pod) (flyer_node_last_observation_timestamp_seconds)) or vector(0)) > 0",
            "10m",
            "{{ $value | humanize }} node agents run but report nothing",
            "Devices of these nodes are not monitored.",
        ),
        Alert(
            "FlyerDeviceUnhealthy", "warning",
            'sum by (node, resource) (flyer_node_devices{health="unhealthy"}) > 0', "10m",
            "{{ $value }} {{ $labels.resource }} on {{ $labels.node }} are unhealthy",
            "They are not allocatable; whole-node jobs do not fit on the node.",
        ),
        Alert(
            "FlyerNodesUnhealthyTogether", "critical",
            'count(sum by (node) (flyer_node_devices{health="unhealthy"}) > 0)'
            " / count(count by (node) (flyer_node_devices)) > 0.1",
            "5m",
            "{{ $value | humanizePercentage }} of the nodes have unhealthy devices",
            "A common cause is likely: check switches, the subnet manager and the driver.",
        ),
        Alert(
            "FlyerNodesUnknownTogether", "critical",
            'count(count by (node) (flyer_node_device_state{state="Unknown"} == 1)) > 2'
            ' and count(count by (node) (flyer_node_device_state{state="Unknown"} == 1))'
            " / count(count by (node) (flyer_node_devices)) > 0.1",
            "2m",
            "The devices of {{ $value | humanize }} nodes cannot be observed, without a detected fault",
            "More than two nodes and more than 10 %: likely a driver or an agent update.",
        ),
        Alert(
            "FlyerXidHardware", "warning",
            'sum by (node, xid) (increase(flyer_node_gpu_xid_total{class=~"uncorrectable|ecc|gsp"}[30m])) > 0', "0m",
            "Xid {{ $labels.xid }} on {{ $labels.node }}",
            "The GPU reports a hardware fault.",
        ),
        Alert(
            "FlyerLinkFlaps", "warning",
            "sum by (node, hca, port) (increase(flyer_node_port_errors_total{counter='link_downed'}[1h])) >= 3", "0m",
            "{{ $labels.hca }} port {{ $labels.port }} on {{ $labels.node }} went down"
            " {{ $value | humanize }} times in an hour",
            "Cable, transceiver or switch port; collectives stall at each interruption.",
        ),
        Alert(
            "FlyerHardwareHangs", "warning",
            "sum by (node) (increase(flyer_node_hardware_worker_kills_total[15m])) > 2", "5m",
            "Calls into a driver on {{ $labels.node }} hang",
            "The driver does not answer; the node's device health is unknown.",
        ),
    ),
    "fire-flyer-storage": (
        Alert(
            "ThreeFSDown", "critical", "max(threefs_up) == 0 or absent(threefs_up)", "2m",
            "The 3FS cluster manager does not answer",
            "Open files stay usable; there is no failover and no new client can connect.",
        ),
        Alert(
            "ThreeFSNodeDead", "warning", 'sum(threefs_nodes{state="dead"}) > 0', "2m",
            "{{ $value }} storage nodes are dead",
            "Their chains are served by the other replicas; another failure may make data unavailable.",
        ),
        Alert(
            "ThreeFSChainsDegraded", "warning", 'sum(threefs_chains{state="degraded"}) > 0', "30m",
            "{{ $value }} chains have lacked a copy for half an hour",
            "A returning node syncs within minutes: it did not return or does not finish.",
        ),
        Alert(
            "ThreeFSChainsUnavailable", "critical",
            'sum(threefs_chains{state="unavailable"}) > 0', "30s",
            "{{ $value }} chains have no serving replica",
            "Reads and writes of their chunks wait until a copy returns.",
        ),
        Alert(
            "ThreeFSChainsUnconfirmed", "critical",
            "max(threefs_unconfirmed_chains) + max(threefs_unknown_targets) > 0", "5m",
            "{{ $value }} chains wait, or targets are not used, after a restore of mgmtd",
            "Reads and writes of these chains block until all their replicas have reported.",
        ),
        Alert(
            "ThreeFSMovesStalled", "warning", 'sum(threefs_moves{state="stalled"}) > 0', "30m",
            "{{ $value }} replicas are being moved without progress",
            "Few replicas are moved at a time: drains and rebalancing wait for them.",
        ),
        Alert(
            "ThreeFSNodesUnlabeled", "warning",
            "max by (level) (threefs_nodes_without_domain) > 0", "1h",
            "{{ $value }} storage nodes have no {{ $labels.level }}, and others have one",
            "Their replicas may be in the same failure domain as the other ones of a chain.",
        ),
        Alert(
            "ThreeFSChunksDamaged", "critical",
            "sum(threefs_scrub_damaged_chunks) + sum(threefs_scrub_different_chunks) > 0", "15m",
            "{{ $value }} stored chunks are damaged or differ, and cannot be repaired",
            "Reads of damaged chunks fail. Chunks that differ from the previous replica are served.",
        ),
        Alert(
            "ThreeFSScrubLate", "warning",
            "max(threefs_scrub_age_seconds) > 28 * 86400", "1h",
            "The least recent scrub started {{ $value | humanizeDuration }} ago",
            "Damage of chunks that are not read is detected late.",
        ),
        Alert(
            "ThreeFSFillingUp", "warning",
            "max(threefs_used_bytes / (threefs_capacity_bytes > 0)) > 0.85", "15m",
            "The fullest storage node is {{ $value | humanizePercentage }} full",
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
            "Mounted volumes on the node may be lost; new volumes cannot be mounted.",
        ),
        Alert(
            "ThreeFSMountsLost", "critical",
            'sum by (node) (threefs_csi_mounts{state=~"lost|down|ended"}) > 0', "2m",
            "{{ $value }} volumes on {{ $labels.node }} have no daemon",
            "File operations of their pods fail or block.",
        ),
        Alert(
            "ThreeFSDaemonsRestart", "warning",
            "sum by (node) (increase(threefs_csi_daemon_restarts_total[30m])) > 3", "0m",
            "FUSE daemons on {{ $labels.node }} were replaced {{ $value | humanize }} times",
            "Pods saw only pauses; the cause is a crash or a lack of memory.",
        ),
        Alert(
            "ThreeFSCallsFail", "warning",
            'sum by (call) (rate(threefs_csi_calls_total{code!~"OK|NOT_FOUND"}[15m]))'
            " / sum by (call) (rate(threefs_csi_calls_total[15m])) > 0.2",
            "15m",
            "{{ $value | humanizePercentage }} of {{ $labels.call }} calls fail",
            "Volumes cannot be created, mounted or deleted.",
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
