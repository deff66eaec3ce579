//! What mgmtd is asked and answers. The heartbeat itself is `threefs_core::heartbeat`.
//!
//! How a storage service lives with mgmtd:
//! 1. It draws an [`Incarnation`](threefs_core::ids::Incarnation) and sends heartbeats at
//!    [`MgmtdReply::Heartbeat`]'s pace (a quarter of the lease or oftener). The first one registers
//!    the node and its address; it lists no target, or those that the service finds on its disks,
//!    as ONLINE.
//! 2. Once enough nodes are registered, mgmtd makes the chains and publishes them. The service
//!    finds its targets in the routing (`RoutingInfo::targets_of_node`), makes their stores and
//!    reports them from the next heartbeat on.
//! 3. **A restarted service is a new incarnation.** mgmtd takes its first heartbeat as the death of
//!    the former life: before the answer, every target of the node that was SERVING or SYNCING has
//!    left that state in persisted and published routing. So nobody is served by a replica that
//!    lost its memory, however quick the restart; the service needs no silence of its own.
//! 4. An answer carries the lease and the routing version it counts with: see
//!    `threefs_core::heartbeat::ServingLease`.
//! 5. A heartbeat of a former incarnation is refused as [`MgmtdError::Replaced`]: that process has
//!    a successor and must end.

use serde::{Deserialize, Serialize};
use threefs_core::heartbeat::{Heartbeat, HeartbeatReply};
use threefs_core::ids::{ChainId, ClusterId, NodeId, RoutingVersion, StoreId, TargetId, TreeId};
use threefs_core::routing::Move;
use threefs_core::routing::RoutingInfo;

use crate::rebalance::PlannedMove;
use crate::registration::{MetaRegistered, MetaRegistration};

/// Name of the service; both sides of a connection sign it.
pub const CONTEXT: &str = "threefs/mgmtd";

/// A call. All calls may be repeated: heartbeats carry their own order, and the newest one is
/// answered again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MgmtdRequest {
    /// "I am alive." Answered with [`MgmtdReply::Heartbeat`].
    Heartbeat(Heartbeat),
    /// The routing, if it is newer than `known`. Waits up to `wait_ms` for a newer one, so a
    /// client that asks again and again learns of every change at once. Answered with
    /// [`MgmtdReply::Routing`].
    Routing {
        /// The version that the caller has; 0 for none.
        known: RoutingVersion,
        /// How long to wait for a newer one; at most [`WAIT_MS_MAX`] is granted.
        wait_ms: u64,
    },
    /// For operators. Answered with [`MgmtdReply::Status`].
    Status,
    /// For operators: what would have to move for all nodes to hold as much as the others.
    /// Answered with [`MgmtdReply::Plan`].
    Rebalance {
        /// Whether it is to be done.
        apply: bool,
        /// Nodes that shall hold nothing; `None` = those that were named last.
        leaving: Option<Vec<NodeId>>,
    },
    /// For operators: a chain whose last targets to serve are lost shall be led by another one.
    /// Answered with [`MgmtdReply::Promotion`].
    Promote {
        /// Which one.
        target: TargetId,
        /// Whether it is to be done; otherwise only what it would mean is answered.
        apply: bool,
    },
    /// A metadata service starts with this store. Answered with [`MgmtdReply::MetaRegistered`].
    RegisterMeta(MetaRegistration),
}

/// The longest wait for a routing change that is granted.
pub const WAIT_MS_MAX: u64 = 30_000;

/// The answer to a call that was served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MgmtdReply {
    /// The heartbeat was taken.
    Heartbeat(HeartbeatReply),
    /// Newer routing, or `None` when there is none.
    Routing(Option<RoutingInfo>),
    /// How the cluster is.
    Status(ClusterStatus),
    /// What has to move.
    Plan(RebalancePlan),
    /// What the promotion means.
    Promotion(Promotion),
    /// The metadata service may serve.
    MetaRegistered(MetaRegistered),
}

/// A target that is to lead its chain although others served after it. Every update that the
/// chain acknowledged after this target had stopped serving is lost with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promotion {
    /// The target.
    pub target: TargetId,
    /// Its node.
    pub node: NodeId,
    /// Its chain.
    pub chain: ChainId,
    /// Chunks that it holds.
    pub chunks: u64,
    /// Those that served after it: each has every acknowledged update. They are synced from the
    /// promoted target if they come back.
    pub served_last: Vec<(TargetId, NodeId)>,
    /// Whether this store has ever served. One that has not may lack any chunk: its first sync was
    /// not finished.
    pub was_complete: bool,
}

/// A target of the last to serve that reports another store than the one it served with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForeignStore {
    /// The target.
    pub target: TargetId,
    /// Its node.
    pub node: NodeId,
    /// Its chain, which waits for a store that has its data.
    pub chain: ChainId,
    /// The store with which it served.
    pub served_with: StoreId,
    /// The store that it reports.
    pub reported: StoreId,
}

/// What has to move, a few replicas at a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RebalancePlan {
    /// Whether mgmtd does it without being asked.
    pub automatic: bool,
    /// Nodes that shall hold nothing.
    pub leaving: Vec<NodeId>,
    /// Chains to be added, for new files.
    pub new_chains: u32,
    /// Replicas to be moved after those that move now.
    pub moves: Vec<PlannedMove>,
    /// Replicas that move now.
    pub under_way: Vec<Move>,
    /// Replicas on nodes that shall hold nothing for which no other node has room.
    pub stuck: u32,
}

/// What an operator wants to know at a glance; chains are in the routing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// Fencing epoch of the primary that answers.
    pub epoch: u64,
    /// Its address.
    pub primary: String,
    /// Newest routing.
    pub routing_version: RoutingVersion,
    /// Nodes that must register before the first chains are made.
    pub nodes_expected: u32,
    /// All registered nodes.
    pub nodes: Vec<NodeStatus>,
    /// Chains, and how many of them have every target SERVING.
    pub chains: u32,
    /// See `chains`.
    pub chains_whole: u32,
    /// Targets of the last to serve whose disk is not the one they served with.
    pub foreign_stores: Vec<ForeignStore>,
    /// Chains without a SERVING target: their data cannot be read now.
    pub chains_down: u32,
}

/// One node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Which.
    pub node: NodeId,
    /// Its address.
    pub address: String,
    /// Whether heartbeats arrive in time.
    pub alive: bool,
    /// Since the last heartbeat; `None` when this primary has seen none.
    pub heartbeat_age_ms: Option<u64>,
    /// Bytes in use over its targets.
    pub used_bytes: u64,
    /// Bytes that its targets may hold together: they share a disk. 0 = unknown.
    pub capacity_bytes: u64,
}

/// Why a call was not served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum MgmtdError {
    /// This mgmtd does not hold the lease now. Ask another, or again in a moment.
    #[error("this mgmtd is not the primary (the lease is held by {holder})")]
    NotPrimary {
        /// Address of who holds it, as far as known, else empty.
        holder: String,
    },
    /// A primary has just begun and does not know yet who is alive. Ask again in a moment.
    #[error("mgmtd has just begun; it answers this in {remaining_ms} ms")]
    Starting {
        /// At most so long.
        remaining_ms: u64,
    },
    /// A heartbeat that is older than one already taken; harmless.
    #[error("{node}: heartbeat {sequence} is older than {newest}")]
    Stale {
        /// Whose.
        node: NodeId,
        /// Its number.
        sequence: u64,
        /// The newest taken.
        newest: u64,
    },
    /// Another life of this node has taken over. The sender must end.
    #[error("{node} is served by a newer process at {address}; this one must end")]
    Replaced {
        /// Which node.
        node: NodeId,
        /// Where its successor listens.
        address: String,
    },
    /// An operator named a node that never registered.
    #[error("{node} is not known; `threefs status` lists the nodes")]
    UnknownNode {
        /// As named.
        node: NodeId,
    },
    /// Too many nodes shall leave.
    #[error(
        "{staying} living nodes would be left for chains of {replicas} replicas; \
         add nodes first, or let fewer leave"
    )]
    TooFewNodes {
        /// Living nodes that would stay.
        staying: u32,
        /// Replicas of a chain.
        replicas: u32,
    },
    /// The store could not be written; nothing was changed. Ask again.
    #[error("the store of mgmtd failed: {detail}")]
    Store {
        /// What it said.
        detail: String,
    },
    /// The node's data belongs to another cluster. The sender must end.
    #[error(
        "{node} holds data of {theirs}, and this mgmtd serves {ours}: it takes no part. If mgmtd \
         has lost its store, stop it and restore the store from a backup (`threefs mgmtd load`); \
         if the node was given a wrong address of mgmtd or a wrong disk, correct that"
    )]
    OtherCluster {
        /// Which node.
        node: NodeId,
        /// The cluster of its data.
        theirs: ClusterId,
        /// That of this mgmtd.
        ours: ClusterId,
    },
    /// The node holds targets and this mgmtd has no chains: its store was lost. The sender must end.
    #[error(
        "{node} holds targets, and this mgmtd knows no chain: its store is lost or the wrong one. \
         Stop mgmtd and restore its store from a backup (`threefs mgmtd load`); new chains over \
         these disks would lose what they hold"
    )]
    ChainsLost {
        /// Which node.
        node: NodeId,
    },
    /// The metadata store is not the registered one: it was emptied, or belongs to another tree. The
    /// sender must end.
    #[error(
        "the metadata store holds {theirs}, and the files of this cluster are in {ours}: it is empty \
         or the wrong one. Stop the metadata service and give it the right folder, or restore a dump \
         (`threefs meta load`). Only if the old metadata is lost and its files are given up: \
         `threefs meta adopt`"
    )]
    ForeignTree {
        /// The tree in the store.
        theirs: TreeId,
        /// The registered one.
        ours: TreeId,
    },
    /// The metadata store is an old copy of the registered one. The sender must end.
    #[error(
        "the metadata store is an old copy: generation {generation} of {tree}, and generation \
         {newest} has served. Stop the metadata service and give it the newest folder, or restore a \
         dump (`threefs meta load`). To continue with this copy: `threefs meta adopt`"
    )]
    OldTree {
        /// The tree.
        tree: TreeId,
        /// That of the store, counted with this start.
        generation: u64,
        /// The newest that has served.
        newest: u64,
    },
    /// The metadata store belongs to another cluster. The sender must end.
    #[error(
        "the metadata store holds {tree} of {theirs}, and this mgmtd serves {ours}. If mgmtd has lost \
         its store, stop it and restore the store from a backup (`threefs mgmtd load`); if the \
         metadata service was given a wrong address of mgmtd or a wrong folder, correct that"
    )]
    TreeOfOtherCluster {
        /// The tree in the store.
        tree: TreeId,
        /// Its cluster.
        theirs: ClusterId,
        /// That of this mgmtd.
        ours: ClusterId,
    },
    /// A target cannot lead its chain.
    #[error("{target} cannot be promoted: {reason}")]
    CannotPromote {
        /// As named.
        target: TargetId,
        /// Why not, and what helps.
        reason: String,
    },
}

impl MgmtdError {
    /// True when the process that sent the heartbeat must end.
    pub fn ends_node(&self) -> bool {
        matches!(self, Self::Replaced { .. } | Self::OtherCluster { .. } | Self::ChainsLost { .. })
    }

    /// True when the same call may go well a moment later.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::NotPrimary { .. } | Self::Starting { .. } | Self::Store { .. })
    }
}

/// What travels back.
pub type MgmtdResult = Result<MgmtdReply, MgmtdError>;
