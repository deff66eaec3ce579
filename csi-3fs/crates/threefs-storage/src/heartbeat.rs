//! Heartbeats to mgmtd; leases, routing and fences from mgmtd.

use std::sync::Arc;
use std::time::Duration;

use threefs_core::fence::FenceTable;
use threefs_core::heartbeat::{Heartbeat, TargetReport};
use threefs_core::location::Location;
use threefs_core::routing::RoutingInfo;
use threefs_core::time::Millis;
use threefs_mgmtd::{Heartbeats, MgmtdClient, MgmtdClientError, MgmtdError, NodeReport};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::node::Node;

/// Interval before the first reply has returned the lease.
const INTERVAL_FIRST: Duration = Duration::from_millis(100);
/// Shortest interval, even if reports change constantly.
const INTERVAL_MIN: Duration = Duration::from_millis(20);
/// Longest interval.
const INTERVAL_MAX: Duration = Duration::from_secs(10);
/// Heartbeats in a lease.
const IN_A_LEASE: u32 = 6;
/// Shortest time to wait for a reply.
const TIMEOUT_MIN: Duration = Duration::from_millis(250);

/// When a heartbeat was sent, and what it reported.
type Sent = (Millis, Arc<[TargetReport]>);

/// Sends heartbeats to all mgmtds until one rejects this node permanently: another incarnation of it
/// has replaced it, or its data belongs to another cluster.
pub(crate) async fn send(
    node: Arc<Node>,
    mgmtd: MgmtdClient,
    address: String,
    location: Location,
) -> MgmtdError {
    let mut heartbeats = mgmtd.heartbeats::<Sent>();
    let (mut interval, mut sequence) = (INTERVAL_FIRST, 0);
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
        let sent: Sent = (node.context.clock.now(), heartbeat.targets.clone().into());
        let seen = node.context.memberships.seen(node.context.routing().version);
        let report = NodeReport { heartbeat, location: location.clone(), seen, fences };
        heartbeats.send(&report, &sent, (interval * IN_A_LEASE).max(TIMEOUT_MIN));
        if let Some(refusal) = receive(&node, &mut heartbeats, &mut interval).await {
            return refusal;
        }
    }
}

/// Receives replies until the next heartbeat is due: after the interval, soon if no mgmtd has accepted
/// one meanwhile, and at once if a report has changed or an mgmtd has missed one. Returns a permanent
/// refusal.
async fn receive(
    node: &Node,
    heartbeats: &mut Heartbeats<Sent>,
    interval: &mut Duration,
) -> Option<MgmtdError> {
    let start = Instant::now();
    let (mut accepted, mut missed) = (false, false);
    loop {
        let rest = match (accepted, missed) {
            (_, true) => INTERVAL_MIN,
            (true, _) => *interval,
            (false, _) => (*interval / 4).max(INTERVAL_MIN),
        };
        let changed = async {
            tokio::time::sleep_until(start + INTERVAL_MIN).await;
            node.context.report_changed.notified().await;
        };
        let reply = tokio::select! {
            reply = heartbeats.reply() => reply,
            () = changed => return None,
            () = tokio::time::sleep_until(start + rest) => return None,
        };
        let (sent_at, reports) = reply.tag;
        missed |= reply.missed;
        match reply.result {
            Ok((granted, fences)) => {
                accepted = true;
                let lease = Duration::from_millis(granted.lease_ms);
                *interval = (lease / IN_A_LEASE).clamp(INTERVAL_MIN, INTERVAL_MAX);
                node.heartbeat_answered(sent_at, granted, fences);
                node.heartbeat_accepted(&reports);
            }
            Err(MgmtdClientError::Refused(refusal)) if refusal.ends_node() => {
                return Some(refusal);
            }
            Err(error) => tracing::debug!(%error, "heartbeat"),
        }
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
