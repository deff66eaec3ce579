//! Heartbeats to mgmtd; leases, routing and fences from mgmtd.

use std::sync::Arc;
use std::time::Duration;

use fabric::deadline::Deadline;
use threefs_core::fence::FenceTable;
use threefs_core::heartbeat::Heartbeat;
use threefs_core::location::Location;
use threefs_core::routing::RoutingInfo;
use threefs_mgmtd::{MgmtdClient, MgmtdClientError, MgmtdError};
use tokio::sync::watch;

use crate::node::Node;

/// Interval before the first reply has returned the lease.
const INTERVAL_FIRST: Duration = Duration::from_millis(100);
/// Shortest interval, even if reports change constantly.
const INTERVAL_MIN: Duration = Duration::from_millis(20);
/// Longest interval.
const INTERVAL_MAX: Duration = Duration::from_secs(10);

/// Sends heartbeats until mgmtd rejects this node permanently: another incarnation of it has replaced
/// it, or its data belongs to another cluster.
pub(crate) async fn send(
    node: Arc<Node>,
    mgmtd: MgmtdClient,
    address: String,
    location: Location,
) -> MgmtdError {
    let mut interval = INTERVAL_FIRST;
    let mut sequence = 0;
    loop {
        sequence += 1;
        let (targets, fences) = node.reports();
        let heartbeat = Heartbeat {
            node: node.id,
            address: address.clone(),
            incarnation: node.incarnation,
            sequence,
            targets,
            capacity_bytes: node.capacity_bytes(),
            data: node.data(),
        };
        let reports = heartbeat.targets.clone();
        let sent_at = node.context.clock.now();
        let deadline = Deadline::after((interval * 4).max(Duration::from_millis(250)));
        let seen = node.context.memberships.seen(node.context.routing().version);
        match mgmtd.heartbeat_from(&location, (seen, fences), heartbeat, deadline).await {
            Ok((reply, fences)) => {
                interval =
                    (Duration::from_millis(reply.lease_ms) / 4).clamp(INTERVAL_MIN, INTERVAL_MAX);
                node.heartbeat_answered(sent_at, reply, fences);
                node.heartbeat_accepted(&reports);
            }
            Err(MgmtdClientError::Refused(refusal)) if refusal.ends_node() => return refusal,
            Err(error) => tracing::debug!(%error, "heartbeat"),
        }
        tokio::time::sleep(INTERVAL_MIN).await;
        // The next heartbeat is due either way.
        let rest = interval.saturating_sub(INTERVAL_MIN);
        let _ = tokio::time::timeout(rest, node.context.report_changed.notified()).await;
    }
}

/// Passes every routing change to the node until the follower is dropped. `routing` has not been
/// read, so the first change is the current routing.
pub(crate) async fn follow(node: Arc<Node>, mut routing: watch::Receiver<Arc<RoutingInfo>>) {
    while routing.changed().await.is_ok() {
        let newest = Arc::clone(&routing.borrow_and_update());
        if node.belongs_to(&newest).await {
            node.update_routing(&newest);
        }
    }
}

/// Passes the fences of volumes to the node, and every change of them, until the follower ends.
pub(crate) async fn follow_fences(node: Arc<Node>, mut fences: watch::Receiver<Arc<FenceTable>>) {
    loop {
        let newest = Arc::clone(&fences.borrow_and_update());
        node.update_fences(&newest);
        if fences.changed().await.is_err() {
            return;
        }
    }
}
