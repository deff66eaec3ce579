//! Protocol of mgmtd. Heartbeats are in `threefs_core::heartbeat`.
//!
//! Life cycle of a storage service:
//! 1. It draws an [`Incarnation`](threefs_core::ids::Incarnation) and sends heartbeats at least
//!    four times per lease of [`MgmtdReply::Heartbeat`]. The first one registers the node and its
//!    address; it lists no targets, or those found on its disks, as ONLINE.
//! 2. Once enough nodes are registered, mgmtd creates the chains and publishes them. The service
//!    finds its targets in the routing (`RoutingInfo::targets_of_node`), creates their stores and
//!    reports them from the next heartbeat on.
//! 3. **A restarted service is a new incarnation.** mgmtd treats its first heartbeat as the death
//!    of the former incarnation: before the reply, every target of the node that was SERVING or
//!    SYNCING has left that state in persisted and published routing. So no client is served by a
//!    replica that has lost its memory, however quick the restart; the service need not wait.
//! 4. A reply carries the lease and the routing version that it requires: see
//!    `threefs_core::heartbeat::ServingLease`.
//!    The same for the version of the fences.
//! 5. A heartbeat of a former incarnation is refused as [`MgmtdError::Replaced`]: that process has
//!    a successor and must exit.

mod meta;

use serde::{Deserialize, Serialize};
use threefs_core::fence::{Fences, VolumeFence};
use threefs_core::heartbeat::{FenceReport, Heartbeat, HeartbeatReply, SeenRouting};
use threefs_core::ids::{
    ChainId, ClusterId, FencesVersion, InodeId, NodeId, RoutingVersion, StoreId, TargetId, TreeId,
};
use threefs_core::location::Location;
use threefs_core::routing::Move;
use threefs_core::routing::RoutingInfo;

use crate::drain_change::DrainChange;
use crate::move_report::MoveReport;
use crate::placement::PlannedMove;
use crate::report::{DomainReport, UnconfirmedReport};

pub use meta::{Claim, MetaRegistered, MetaRegistration};

/// Name of the service; both sides of a connection authenticate it.
pub const CONTEXT: &str = "threefs/mgmtd";

/// A request. All requests may be repeated: heartbeats are ordered, and the newest one is answered
/// again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MgmtdRequest {
    /// Heartbeat of a storage node. Answered with [`MgmtdReply::Heartbeat`].
    Heartbeat(Heartbeat),
    /// The routing, if it is newer than `known_version`. Waits up to `wait_ms` for a newer version,
    /// so that repeated requests return every change at once. Answered with [`MgmtdReply::Routing`].
    Routing {
        /// The version of the caller; 0 for none.
        known_version: RoutingVersion,
        /// Time to wait for a newer version; at most [`WAIT_MS_MAX`].
        wait_ms: u64,
    },
    /// Status for operators. Answered with [`MgmtdReply::Status`].
    Status,
    /// Rebalancing plan for operators. Answered with [`MgmtdReply::Plan`].
    Rebalance {
        /// Whether to start it.
        apply: bool,
        /// Nodes to drain in place of those that are drained; `None` = unchanged. Older clients;
        /// see [`MgmtdRequest::Drain`].
        leaving: Option<Vec<NodeId>>,
    },
    /// Promotion by an operator of a target to the head of its chain, after the last serving
    /// targets are lost. Answered with [`MgmtdReply::Promotion`].
    Promote {
        /// The target.
        target: TargetId,
        /// Whether to promote it; otherwise only the consequences are reported.
        apply: bool,
    },
    /// Registration of the store of a metadata service. Answered with
    /// [`MgmtdReply::MetaRegistered`].
    RegisterMeta(MetaRegistration),
    /// Heartbeat of a storage node with its failure domains. Answered with
    /// [`MgmtdReply::Heartbeat`].
    LocatedHeartbeat {
        /// The heartbeat.
        heartbeat: Heartbeat,
        /// The node's failure domains.
        location: Location,
    },
    /// Failure domains, for operators. Answered with [`MgmtdReply::Domains`].
    Domains,
    /// The limit of the bytes per second that moves copy. Answered with [`MgmtdReply::MoveRate`].
    MoveRate {
        /// A new limit; 0 = none; `None` = unchanged.
        bytes_per_second: Option<u64>,
    },
    /// Change of the drained nodes by operators. Answered with [`MgmtdReply::Plan`].
    Drain {
        /// Whether to make it; otherwise only the plan is computed.
        apply: bool,
        /// The change.
        change: DrainChange,
    },
    /// Moves in progress, and why others wait; for operators. Answered with [`MgmtdReply::Moves`].
    Moves {
        /// Whether to plan the moves that wait. That takes up to 0.4 s in a cluster of 1,000 nodes.
        plan: bool,
    },
    /// Heartbeat of a storage node with its failure domains and what it knows of the routing.
    /// Answered with [`MgmtdReply::Heartbeat`].
    SeenHeartbeat {
        /// The heartbeat.
        heartbeat: Heartbeat,
        /// The node's failure domains.
        location: Location,
        /// The routing that it has seen.
        seen: SeenRouting,
    },
    /// Chains that wait after a restore, for operators. Answered with
    /// [`MgmtdReply::Unconfirmed`].
    Unconfirmed,
    /// As `SeenHeartbeat`, with the fences that the node knows. Answered with
    /// [`MgmtdReply::FencedHeartbeat`].
    FencedHeartbeat {
        /// The heartbeat.
        heartbeat: Heartbeat,
        /// The node's failure domains.
        location: Location,
        /// The routing that it has seen.
        seen: SeenRouting,
        /// The fences that it knows and confirms.
        fences: FenceReport,
    },
    /// The fences of volumes that have changed since a version; waits as `Routing` does. Answered
    /// with [`MgmtdReply::Fences`].
    Fences {
        /// The version of the caller; 0 for none.
        known_version: FencesVersion,
        /// Time to wait for a newer version; at most [`WAIT_MS_MAX`].
        wait_ms: u64,
    },
    /// Stores the fence of a volume, and waits until all storage services confirm it. May be
    /// repeated. Answered with [`MgmtdReply::FenceRaised`].
    RaiseFence {
        /// The fence: it is merged with the stored one, which is never lowered.
        fence: VolumeFence,
        /// Time to wait for the confirmations; at most [`WAIT_MS_MAX`].
        wait_ms: u64,
    },
    /// As `RegisterMeta`, from a service that knows snapshots. Answered with
    /// [`MgmtdReply::MetaRegistered`].
    RegisterMetaWithSnapshots(MetaRegistration),
    /// Stores that the cluster has snapshots: requires that all live storage services know fences, and
    /// refuses services of earlier releases from then on. Answered with
    /// [`MgmtdReply::SnapshotsEnabled`].
    EnableSnapshots,
    /// Some of the fences of all volumes with an epoch, from a registered metadata service. Answered
    /// with [`MgmtdReply::FencesPublished`].
    PublishFences {
        /// The era of the routing since before they were read.
        era: u32,
        /// The fences; merged as those of `RaiseFence`.
        fences: Vec<VolumeFence>,
        /// No further ones follow.
        is_last: bool,
    },
}

/// Maximum wait for a routing change.
pub const WAIT_MS_MAX: u64 = 30_000;

/// Reply to a successful request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum MgmtdReply {
    /// The heartbeat was accepted.
    Heartbeat(HeartbeatReply),
    /// Newer routing, or `None` if there is none.
    Routing(Option<RoutingInfo>),
    /// Status of the cluster.
    Status(ClusterStatus),
    /// The rebalancing plan.
    Plan(RebalancePlan),
    /// The consequences of the promotion.
    Promotion(Promotion),
    /// The metadata service may serve.
    MetaRegistered(MetaRegistered),
    /// Failure domains of the cluster.
    Domains(DomainReport),
    /// The limit of the bytes per second that moves copy; 0 = none.
    MoveRate(u64),
    /// Moves of replicas.
    Moves(MoveReport),
    /// Chains that wait after a restore.
    Unconfirmed(UnconfirmedReport),
    /// The heartbeat was accepted. The lease counts only once the node has these fences as well.
    FencedHeartbeat(HeartbeatReply, FencesVersion),
    /// Changed fences, or `None` if there are none.
    Fences(Option<Fences>),
    /// The fence is stored; it waits for this node or target. `None`: each storage service confirms it,
    /// or its lease has ended.
    FenceRaised(Option<String>),
    /// The cluster has snapshots.
    SnapshotsEnabled,
    /// The fences are stored.
    FencesPublished,
}

/// Promotion of a target although others served after it. All updates that the chain acknowledged
/// after this target had stopped serving are lost.
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
    /// The targets that served last: each has every acknowledged update. If they come back, they
    /// are synced from the promoted target.
    pub served_last: Vec<(TargetId, NodeId)>,
    /// Whether this store has ever served. Otherwise any chunk may be missing: its first sync did
    /// not complete.
    pub was_complete: bool,
}

/// A target that served last and reports another store than the one that it served with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForeignStore {
    /// The target.
    pub target: TargetId,
    /// Its node.
    pub node: NodeId,
    /// Its chain, which waits for the store with its data.
    pub chain: ChainId,
    /// The store that it served with.
    pub served_with: StoreId,
    /// The reported store.
    pub reported: StoreId,
}

/// A rebalancing plan; replicas are moved a few at a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RebalancePlan {
    /// Whether mgmtd rebalances automatically.
    pub automatic: bool,
    /// Nodes being drained.
    pub leaving: Vec<NodeId>,
    /// Chains to be added, for new files.
    pub new_chains: u32,
    /// Replicas to be moved after the current moves.
    pub moves: Vec<PlannedMove>,
    /// Replicas being moved.
    pub under_way: Vec<Move>,
    /// Replicas on draining nodes that no other node has space for.
    pub stuck: u32,
}

/// Cluster status for operators; chains are in the routing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// Fencing epoch of the primary.
    pub epoch: u64,
    /// Its address.
    pub primary: String,
    /// The newest routing version.
    pub routing_version: RoutingVersion,
    /// Storage services required before the initial chains are created.
    pub nodes_expected: u32,
    /// All registered nodes.
    pub nodes: Vec<NodeStatus>,
    /// Number of chains.
    pub chains: u32,
    /// Chains with all targets SERVING.
    pub chains_whole: u32,
    /// Targets that served last and report another disk.
    pub foreign_stores: Vec<ForeignStore>,
    /// Chains without a SERVING target: their data is unavailable.
    pub chains_down: u32,
}

/// Status of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// The node.
    pub node: NodeId,
    /// Its address.
    pub address: String,
    /// Whether heartbeats arrive in time.
    pub alive: bool,
    /// Time since the last heartbeat; `None` if this primary has received none.
    pub heartbeat_age_ms: Option<u64>,
    /// Bytes in use by its targets.
    pub used_bytes: u64,
    /// Capacity of all its targets, which share a disk. 0 = unknown.
    pub capacity_bytes: u64,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum MgmtdError {
    /// This mgmtd does not hold the lease. Retry with another one, or later.
    #[error("this mgmtd is not the primary (the lease is held by {holder})")]
    NotPrimary {
        /// Address of the holder, if known, else empty.
        holder: String,
    },
    /// A new primary does not know yet which nodes are alive. Retry later.
    #[error("mgmtd has just started; retry in {remaining_ms} ms")]
    Starting {
        /// Maximum time to wait.
        remaining_ms: u64,
    },
    /// The heartbeat is older than one already accepted; harmless.
    #[error("{node}: heartbeat {sequence} is older than {newest}")]
    Stale {
        /// The node.
        node: NodeId,
        /// Its sequence.
        sequence: u64,
        /// The newest accepted sequence.
        newest: u64,
    },
    /// Another incarnation has replaced this node. The sender must exit.
    #[error("{node} is served by a newer process at {address}; this process must exit")]
    Replaced {
        /// The node.
        node: NodeId,
        /// Address of the new incarnation.
        address: String,
    },
    /// Unknown node in an operator's request.
    #[error("unknown node {node}; `threefs status` lists the nodes")]
    UnknownNode {
        /// The node in the request.
        node: NodeId,
    },
    /// Too many nodes to drain.
    #[error(
        "{staying} live nodes would remain for chains of {replicas} replicas; \
         add nodes first, or drain fewer"
    )]
    TooFewNodes {
        /// Live nodes that would remain.
        staying: u32,
        /// Replicas per chain.
        replicas: u32,
    },
    /// The store could not be written; nothing was changed. Retry.
    #[error("the store of mgmtd failed: {detail}")]
    Store {
        /// Error of the store.
        detail: String,
    },
    /// The node's data belongs to another cluster. The sender must exit.
    #[error(
        "{node} holds data of {foreign_id}, and this mgmtd serves {own_id}: it takes no part. If \
         mgmtd has lost its store, stop it and restore the store from a backup (`threefs mgmtd load`); \
         if the node was given a wrong address of mgmtd or a wrong disk, correct that"
    )]
    OtherCluster {
        /// The node.
        node: NodeId,
        /// The cluster of its data.
        foreign_id: ClusterId,
        /// The cluster of this mgmtd.
        own_id: ClusterId,
    },
    /// The node has targets but this mgmtd has no chains: its store was lost. The sender must exit.
    #[error(
        "{node} has targets, but this mgmtd has no chains: its store is lost or the wrong one. \
         Stop mgmtd and restore its store from a backup (`threefs mgmtd load`); new chains over \
         these disks would lose what they hold"
    )]
    ChainsLost {
        /// The node.
        node: NodeId,
    },
    /// The metadata store is not the registered one: it is empty, or belongs to another tree. The
    /// sender must exit.
    #[error(
        "the metadata store holds {foreign_id}, and the files of this cluster are in {own_id}: it is \
         empty or the wrong one. Stop the metadata service and give it the right folder, or restore a dump \
         (`threefs meta load`). Only if the old metadata is lost and its files are given up: \
         `threefs meta adopt`"
    )]
    ForeignTree {
        /// The tree in the store.
        foreign_id: TreeId,
        /// The registered tree.
        own_id: TreeId,
    },
    /// The metadata store is an old copy of the registered one. The sender must exit.
    #[error(
        "the metadata store is an old copy: generation {generation} of {tree}, and generation \
         {newest} has served. Stop the metadata service and give it the newest folder, or restore a \
         dump (`threefs meta load`). To continue with this copy: `threefs meta adopt`"
    )]
    OldTree {
        /// The tree.
        tree: TreeId,
        /// Generation of the store, including this start.
        generation: u64,
        /// The newest generation that has served.
        newest: u64,
    },
    /// The metadata store belongs to another cluster. The sender must exit.
    #[error(
        "the metadata store holds {tree} of {foreign_id}, and this mgmtd serves {own_id}. If mgmtd has \
         lost its store, stop it and restore the store from a backup (`threefs mgmtd load`); if the \
         metadata service was given a wrong address of mgmtd or a wrong folder, correct that"
    )]
    TreeOfOtherCluster {
        /// The tree in the store.
        tree: TreeId,
        /// Its cluster.
        foreign_id: ClusterId,
        /// The cluster of this mgmtd.
        own_id: ClusterId,
    },
    /// The target cannot be promoted.
    #[error("{target} cannot be promoted: {reason}")]
    CannotPromote {
        /// The target in the request.
        target: TargetId,
        /// The reason, with a remedy.
        reason: String,
    },
    /// The volume cannot have this fence. (New variants go last: older versions decode by position.)
    #[error("invalid fence of volume {volume}: {reason}")]
    InvalidFence {
        /// The volume.
        volume: InodeId,
        /// The field and its value.
        reason: String,
    },
    /// Not all storage services have confirmed a fence in time. It is stored. Retry.
    #[error("the fence of volume {volume} waits for {waits_for}")]
    FenceNotConfirmed {
        /// The volume.
        volume: InodeId,
        /// The first one that has not.
        waits_for: String,
    },
    /// A service of an earlier release does not know the snapshots that the cluster has, or is to have.
    #[error("{service} is of an earlier release, which does not know snapshots: upgrade it")]
    Outdated {
        /// The service.
        service: String,
    },
    /// The fences were read in another era of the routing. Read and publish them again.
    #[error("the fences are of era {era}, mgmtd is in era {newest}")]
    OtherEra {
        /// The era in the request.
        era: u32,
        /// The current one.
        newest: u32,
    },
}

impl MgmtdError {
    /// Whether the process that sent the heartbeat must exit.
    pub fn ends_node(&self) -> bool {
        matches!(self, Self::Replaced { .. } | Self::OtherCluster { .. } | Self::ChainsLost { .. })
    }

    /// Whether a retry of the same request may succeed.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::NotPrimary { .. } | Self::Starting { .. } | Self::Store { .. })
    }
}

/// Result of a request.
pub type MgmtdResult = Result<MgmtdReply, MgmtdError>;
