"""Series for which each alert fires, and series for which it does not."""

# For each alert: series that make it fire after some time, and series in the normal state.
# Promtool's notation: "0+1x60" starts at 0 and grows by 1 at each of 60 steps of one minute.
Series = dict[str, str]


def removals(budget_spent: int, budget_held: int, defective: int) -> Series:
    """A class with a budget of two, from the leader; a former leader exports higher values."""
    counts = {"budget": 2, "spent": budget_spent, "held": budget_held, "defective": defective}
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
        # The last values of a former leader are ignored.
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
    "ThreeFSChainsUnconfirmed": (
        {"threefs_unconfirmed_chains": "2x180", "threefs_unknown_targets": "0x180"},
        {"threefs_unconfirmed_chains": "2x2 0x178", "threefs_unknown_targets": "0x180"},
    ),
    "ThreeFSMovesStalled": (
        {'threefs_moves{state="stalled"}': "2x180"},
        {'threefs_moves{state="stalled"}': "0x100 2x20 0x60"},
    ),
    "ThreeFSNodesUnlabeled": (
        {'threefs_nodes_without_domain{level="zone"}': "1x180"},
        {'threefs_nodes_without_domain{level="zone"}': "0x180"},
    ),
    "ThreeFSChunksDamaged": (
        {
            'threefs_scrub_damaged_chunks{storage="1"}': "2x180",
            'threefs_scrub_different_chunks{storage="1"}': "0x180",
        },
        {
            'threefs_scrub_damaged_chunks{storage="1"}': "0x100 2x10 0x70",
            'threefs_scrub_different_chunks{storage="1"}': "0x180",
        },
    ),
    "ThreeFSScrubLate": (
        {'threefs_scrub_age_seconds{storage="1"}': "2500000x180"},
        {'threefs_scrub_age_seconds{storage="1"}': "600000x180"},
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
