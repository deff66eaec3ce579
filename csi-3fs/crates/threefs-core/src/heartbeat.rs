//! Heartbeats of storage nodes to mgmtd, and the serving lease in the replies.
//!
//! The lease makes reads linearizable although any replica answers them: mgmtd declares a node dead
//! after `T` without a heartbeat, and the node stops serving `3/4 T` after it *sent* the last
//! answered heartbeat, so it has stopped before the chain continues without it. Both measure
//! elapsed time with their own monotonic clocks; their rates may differ by less than a third.

use serde::{Deserialize, Serialize};

use crate::ids::{
    ChainId, ChainVersion, ClusterId, FencesVersion, Incarnation, NodeId, RoutingVersion, StoreId,
    TargetId,
};
use crate::membership::MembershipRecord;
use crate::time::Millis;

/// State of a target according to its service; only in heartbeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum LocalState {
    /// Has all committed updates of its chain, according to this incarnation.
    UpToDate,
    /// Alive, but may lack updates (a restart, an unfinished sync, a disagreement).
    Online,
    /// Unusable: disk lost, store stalled, or not hosted here.
    Offline,
}

/// A target's local state, with the newest chain version that it knew. mgmtd needs the version: an
/// old "up to date" must not end a newer sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalReport {
    /// The state.
    pub state: LocalState,
    /// The chain version that the state refers to; 0 if the target has seen none yet.
    pub chain_version: ChainVersion,
}

/// Entry of one target in a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetReport {
    /// The target.
    pub target: TargetId,
    /// Its chain.
    pub chain: ChainId,
    /// Its local state.
    pub report: LocalReport,
    /// Bytes in use on the target.
    pub used_bytes: u64,
    /// Id of its store; `None` if it cannot be opened.
    pub store: Option<StoreId>,
    /// Chunks in the store, including removed ones.
    pub chunks: u64,
}

impl TargetReport {
    /// Whether the target has the `expected` store; true if none is expected.
    #[must_use]
    pub fn is_of(&self, expected: Option<StoreId>) -> bool {
        expected.is_none_or(|expected| self.store == Some(expected))
    }
}

/// The cluster that a node's data folder belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DataFolder {
    /// It holds no target.
    #[default]
    Empty,
    /// It has targets of a release that did not mark the folder.
    Unmarked,
    /// It is marked with its cluster.
    Of(ClusterId),
}

/// What a node knows of the routing, sent with each heartbeat: an mgmtd whose store was restored
/// from a backup recognizes by it that others have seen newer state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenRouting {
    /// The newest version that this process has received.
    pub version: RoutingVersion,
    /// The membership records of its disk.
    pub records: Vec<MembershipRecord>,
}

/// Liveness report of a node and its targets. mgmtd ignores a heartbeat whose (incarnation,
/// sequence) is not newer than the last accepted one: the sequence increases within one
/// incarnation, and a replaced incarnation never returns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The node.
    pub node: NodeId,
    /// host:port of its storage service.
    pub address: String,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// Counts the heartbeats of this incarnation.
    pub sequence: u64,
    /// All targets of this service. A missing one counts as offline.
    pub targets: Vec<TargetReport>,
    /// Capacity of all its targets together, which share a disk. 0 = unknown.
    pub capacity_bytes: u64,
    /// The cluster of its data.
    pub data: DataFolder,
}

/// Reply of mgmtd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatReply {
    /// The newest routing version when mgmtd received the heartbeat. The lease counts only once the
    /// node has this version.
    pub routing_version: RoutingVersion,
    /// Time from *sending* the heartbeat during which the node may serve: 3/4 of mgmtd's T.
    pub lease_ms: u64,
}

/// What a node knows of the fences of volumes, sent with each heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FenceReport {
    /// All replicas of this node have these fences.
    pub known: FencesVersion,
    /// The newest version that each serving replica confirms, in the chain version of its report
    /// (`crate::replica::Replica::drained_fences`).
    pub drained: Vec<(TargetId, FencesVersion)>,
}

/// The serving lease of a node. Pure; the driver feeds it heartbeat replies, routing and fences.
#[derive(Clone, Debug, Default)]
pub struct ServingLease {
    known: Known,
    valid_until: Option<Millis>,
    // The newest lease whose routing or fences this node does not have yet.
    waiting: Option<(Known, Millis)>,
}

/// Versions that all replicas of a node have received, or that a lease requires.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Known {
    routing: RoutingVersion,
    fences: FencesVersion,
}

impl Known {
    fn has(self, needed: Self) -> bool {
        self.routing >= needed.routing && self.fences >= needed.fences
    }
}

impl ServingLease {
    /// Handles the reply to the heartbeat that was sent at `sent_at`. `fences`: as named by the
    /// reply.
    pub fn heartbeat_answered(
        &mut self,
        sent_at: Millis,
        reply: HeartbeatReply,
        fences: FencesVersion,
    ) {
        let until = sent_at.after(reply.lease_ms);
        let needed = Known { routing: reply.routing_version, fences };
        if self.known.has(needed) {
            self.valid_until = self.valid_until.max(Some(until));
        } else if self.waiting.is_none_or(|(_, waiting_until)| until >= waiting_until) {
            self.waiting = Some((needed, until));
        }
    }

    /// Handles routing `version`, after all replicas of this node have received it.
    pub fn routing_known(&mut self, version: RoutingVersion) {
        self.known.routing = self.known.routing.max(version);
        self.check_waiting();
    }

    /// Handles fences, after all replicas of this node have received them.
    pub fn fences_known(&mut self, version: FencesVersion) {
        self.known.fences = self.known.fences.max(version);
        self.check_waiting();
    }

    fn check_waiting(&mut self) {
        if let Some((needed, until)) = self.waiting
            && self.known.has(needed)
        {
            self.valid_until = self.valid_until.max(Some(until));
            self.waiting = None;
        }
    }

    /// The newest routing version that a reply has named and that this node does not have yet.
    #[must_use]
    pub fn routing_needed(&self) -> Option<RoutingVersion> {
        let needed = self.waiting.map(|(needed, _)| needed.routing);
        needed.filter(|version| *version > self.known.routing)
    }

    /// The same for fences.
    #[must_use]
    pub fn fences_needed(&self) -> Option<FencesVersion> {
        let needed = self.waiting.map(|(needed, _)| needed.fences);
        needed.filter(|version| *version > self.known.fences)
    }

    /// End of the lease; `None` before the first one of this incarnation.
    #[must_use]
    pub fn valid_until(&self) -> Option<Millis> {
        self.valid_until
    }

    /// Whether this node may serve at `now`.
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
    fn a_lease_counts_from_sending_and_only_with_the_routing_it_names() {
        let mut lease = ServingLease::default();
        assert!(!lease.is_valid(Millis(0)));
        lease.heartbeat_answered(Millis(1000), reply(7), FencesVersion(0));
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
        lease.heartbeat_answered(Millis(2000), reply(7), FencesVersion(0));
        lease.heartbeat_answered(Millis(1000), reply(7), FencesVersion(0));
        assert_eq!(lease.valid_until(), Some(Millis(2500)));
    }

    #[test]
    fn a_lease_counts_only_with_the_fences_that_the_reply_names() {
        let mut lease = ServingLease::default();
        lease.heartbeat_answered(Millis(1000), reply(7), FencesVersion(3));
        lease.routing_known(RoutingVersion(7));
        assert!(!lease.is_valid(Millis(1001)), "fences 3 are not known yet");
        assert_eq!((lease.routing_needed(), lease.fences_needed()), (None, Some(FencesVersion(3))));
        lease.fences_known(FencesVersion(2));
        assert!(!lease.is_valid(Millis(1001)));
        lease.fences_known(FencesVersion(3));
        assert!(lease.is_valid(Millis(1499)));
        // A later fence does not end a lease that was given before it.
        lease.heartbeat_answered(Millis(1400), reply(7), FencesVersion(4));
        assert!(lease.is_valid(Millis(1499)) && !lease.is_valid(Millis(1500)));
    }
}
