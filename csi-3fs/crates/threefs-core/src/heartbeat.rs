//! What a storage node tells mgmtd, and the lease to serve that the answer gives.
//!
//! The lease is what makes reads linearizable although any replica answers them: mgmtd declares a
//! node dead after `T` of silence, the node stops serving `T / 2` after it *sent* the last
//! heartbeat that was answered, so it has stopped before anybody else may go on without it. Both
//! measure elapsed time with their own monotonic clock; rates may differ by less than a factor 2.

use serde::{Deserialize, Serialize};

use crate::ids::{
    ChainId, ChainVersion, ClusterId, Incarnation, NodeId, RoutingVersion, StoreId, TargetId,
};
use crate::time::Millis;

/// State of a target as its own service knows it; lives in heartbeats only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum LocalState {
    /// Holds everything that its chain holds, and has seen no reason to doubt it in this life.
    UpToDate,
    /// Alive, but may have missed something (a restart, an unfinished sync, a found disagreement).
    Online,
    /// Cannot be used: disk gone, store stalled, not hosted here.
    Offline,
}

/// A target's local state and the newest chain version that it knew when it said so. mgmtd needs
/// the version: an old "up to date" must not end a newer sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalReport {
    /// The state.
    pub state: LocalState,
    /// Under which version of the chain it holds; 0 where the target has seen none yet.
    pub chain_version: ChainVersion,
}

/// One target's line of a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetReport {
    /// Which target.
    pub target: TargetId,
    /// Its chain.
    pub chain: ChainId,
    /// Its local state.
    pub report: LocalReport,
    /// Bytes in use on the target.
    pub used_bytes: u64,
    /// Which store it has; `None` where it cannot be opened.
    pub store: Option<StoreId>,
    /// Chunks that the store knows, removed ones too.
    pub chunks: u64,
}

impl TargetReport {
    /// Whether this is the store that `known` names for the target. Where none is known yet, any is.
    #[must_use]
    pub fn is_of(&self, known: Option<StoreId>) -> bool {
        known.is_none_or(|known| self.store == Some(known))
    }
}

/// The cluster that a node's data folder belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DataFolder {
    /// It holds no target.
    #[default]
    Empty,
    /// It holds targets, made by a version that did not mark the folder.
    Unmarked,
    /// It is marked.
    Of(ClusterId),
}

/// "I am alive, and so are these targets." mgmtd ignores one whose (incarnation, sequence) is not
/// newer than the last that it took from the node: within one incarnation the sequence grows,
/// and an incarnation that was replaced by another never comes back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Who.
    pub node: NodeId,
    /// host:port where its storage service listens now.
    pub address: String,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// Counts the heartbeats of this life.
    pub sequence: u64,
    /// All targets that this service hosts. One that is missing here counts as offline.
    pub targets: Vec<TargetReport>,
    /// Bytes that all its targets may hold together: they share a disk. 0 = unknown.
    pub capacity_bytes: u64,
    /// The cluster of its data.
    pub data: DataFolder,
}

/// mgmtd's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatReply {
    /// The newest routing version when mgmtd took the heartbeat. The lease counts only once the
    /// node knows this version.
    pub routing_version: RoutingVersion,
    /// How long after *sending* the heartbeat the node may serve: half of mgmtd's T.
    pub lease_ms: u64,
}

/// Whether this node may serve now. Pure; the driver tells it about heartbeats and routing.
#[derive(Clone, Debug, Default)]
pub struct ServingLease {
    known: RoutingVersion,
    valid_until: Option<Millis>,
    // A grant whose routing we do not know yet: newest only, an older one adds nothing.
    waiting: Option<(RoutingVersion, Millis)>,
}

impl ServingLease {
    /// An answer to the heartbeat that was sent at `sent_at` has arrived.
    pub fn heartbeat_answered(&mut self, sent_at: Millis, reply: HeartbeatReply) {
        let until = sent_at.after(reply.lease_ms);
        if reply.routing_version <= self.known {
            self.valid_until = self.valid_until.max(Some(until));
        } else if self.waiting.is_none_or(|(_, waiting_until)| until >= waiting_until) {
            self.waiting = Some((reply.routing_version, until));
        }
    }

    /// All replicas of this node have been told about routing `version`.
    pub fn routing_known(&mut self, version: RoutingVersion) {
        self.known = self.known.max(version);
        if let Some((needed, until)) = self.waiting
            && needed <= self.known
        {
            self.valid_until = self.valid_until.max(Some(until));
            self.waiting = None;
        }
    }

    /// The newest routing version that an answer has named and that this node does not know yet.
    #[must_use]
    pub fn routing_needed(&self) -> Option<RoutingVersion> {
        self.waiting.map(|(version, _)| version)
    }

    /// Until when this node may serve; `None` before the first grant of this life.
    #[must_use]
    pub fn valid_until(&self) -> Option<Millis> {
        self.valid_until
    }

    /// May this node serve at `now`?
    #[must_use]
    pub fn is_valid(&self, now: Millis) -> bool {
        self.valid_until.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(version: u64) -> HeartbeatReply {
        HeartbeatReply { routing_version: RoutingVersion(version), lease_ms: 500 }
    }

    #[test]
    fn a_lease_counts_from_the_sending_and_only_with_the_routing_it_names() {
        let mut lease = ServingLease::default();
        assert!(!lease.is_valid(Millis(0)));
        lease.heartbeat_answered(Millis(1000), reply(7));
        assert!(!lease.is_valid(Millis(1001)), "routing 7 is not known yet");
        assert_eq!(lease.routing_needed(), Some(RoutingVersion(7)));
        lease.routing_known(RoutingVersion(6));
        assert!(!lease.is_valid(Millis(1001)));
        lease.routing_known(RoutingVersion(7));
        assert!(lease.is_valid(Millis(1499)));
        assert!(!lease.is_valid(Millis(1500)));
    }

    #[test]
    fn a_late_answer_never_shortens_the_lease() {
        let mut lease = ServingLease::default();
        lease.routing_known(RoutingVersion(7));
        lease.heartbeat_answered(Millis(2000), reply(7));
        lease.heartbeat_answered(Millis(1000), reply(7));
        assert_eq!(lease.valid_until(), Some(Millis(2500)));
    }
}
