//! Context shared by the targets of a node, which is one disk: clock, peers and routing.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError, RwLock};

use fabric::boot_instant::BootInstant;
use threefs_core::routing::RoutingInfo;
use threefs_core::time::Millis;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::flushes::Flushes;
use crate::membership::Memberships;
use crate::peers::Peers;

/// Context shared by the targets of a node.
pub(crate) struct NodeContext {
    pub(crate) clock: Clock,
    pub(crate) peers: Arc<Peers>,
    /// Notified when a target's report has changed, so that mgmtd learns of it before the next
    /// heartbeat is due.
    pub(crate) report_changed: Notify,
    /// Requests of clients and of replicas for them, since the start.
    pub(crate) requests: AtomicU64,
    pub(crate) routing: RwLock<Arc<RoutingInfo>>,
    pub(crate) memberships: Memberships,
    pub(crate) flushes: Flushes,
    /// Runtime for calls of the targets' threads.
    pub(crate) runtime: Handle,
}

impl NodeContext {
    /// Must be called in the runtime that makes the calls.
    pub(crate) fn new(peers: Arc<Peers>) -> Self {
        Self {
            clock: Clock::start(),
            peers,
            report_changed: Notify::new(),
            requests: AtomicU64::new(0),
            routing: RwLock::default(),
            memberships: Memberships::default(),
            flushes: Flushes::default(),
            runtime: Handle::current(),
        }
    }

    /// Current routing known to this node.
    pub(crate) fn routing(&self) -> Arc<RoutingInfo> {
        Arc::clone(&self.routing.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Clock of this process, in the core's unit. It continues while the node is suspended, because
/// the serving lease must expire then.
pub(crate) struct Clock(BootInstant);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(BootInstant::now())
    }

    pub(crate) fn now(&self) -> Millis {
        self.at(BootInstant::now())
    }

    pub(crate) fn at(&self, moment: BootInstant) -> Millis {
        Millis(moment.since(self.0).as_millis() as u64)
    }
}
