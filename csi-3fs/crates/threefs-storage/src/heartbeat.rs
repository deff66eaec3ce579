//! The conversation with mgmtd: heartbeats out, leases and routing in.

use std::sync::Arc;
use std::time::Duration;

use fabric::deadline::Deadline;
use threefs_core::heartbeat::Heartbeat;
use threefs_mgmtd::{MgmtdClient, MgmtdClientError, MgmtdError};

use crate::node::Node;

/// Pace before the first answer has told the lease.
const PACE_FIRST: Duration = Duration::from_millis(100);
/// Fastest pace, also when reports change all the time.
const PACE_MIN: Duration = Duration::from_millis(20);
/// Slowest pace.
const PACE_MAX: Duration = Duration::from_secs(10);

/// Sends heartbeats until mgmtd refuses this process for good: another life of the node has taken
/// over, or its data is of another cluster.
pub(crate) async fn send(node: Arc<Node>, mgmtd: MgmtdClient, address: String) -> MgmtdError {
    let mut pace = PACE_FIRST;
    let mut sequence = 0;
    loop {
        sequence += 1;
        let heartbeat = Heartbeat {
            node: node.id,
            address: address.clone(),
            incarnation: node.incarnation,
            sequence,
            targets: node.reports(),
            capacity_bytes: node.capacity_bytes(),
            data: node.data(),
        };
        let said = heartbeat.targets.clone();
        let sent_at = node.shared.clock.now();
        let deadline = Deadline::after((pace * 4).max(Duration::from_millis(250)));
        match mgmtd.heartbeat(heartbeat, deadline).await {
            Ok(reply) => {
                pace = (Duration::from_millis(reply.lease_ms) / 4).clamp(PACE_MIN, PACE_MAX);
                node.heartbeat_answered(sent_at, reply);
                node.reported(&said);
            }
            Err(MgmtdClientError::Refused(refusal)) if refusal.ends_node() => return refusal,
            Err(error) => tracing::debug!(%error, "heartbeat"),
        }
        tokio::time::sleep(PACE_MIN).await;
        // Either way the next one is due.
        let rest = pace.saturating_sub(PACE_MIN);
        let _ = tokio::time::timeout(rest, node.shared.report_changed.notified()).await;
    }
}

/// Tells the node of every routing change, for ever.
pub(crate) async fn follow(node: Arc<Node>, mgmtd: MgmtdClient) {
    let follower = mgmtd.follow();
    let mut routing = follower.receiver();
    while routing.changed().await.is_ok() {
        let newest = Arc::clone(&routing.borrow_and_update());
        node.routing_arrived(&newest);
    }
}
