//! Rows of mgmtd's store.
//!
//! | key | value |
//! |---|---|
//! | `OWNR` | the cluster's keys; see `threefs_kv::Owner` |
//! | `MSNG` holder | `LeaseHolder`: the primary, with its fencing epoch |
//! | `MSNG` cluster | `ClusterId`, written once |
//! | `MSNG` meta | `MetaRow`: the store of the metadata service |
//! | `MSNG` renewal | u64, written by each renewal |
//! | `MSNG` routing | u64, the routing version |
//! | `MNOD` node (u32) | `NodeRow` |
//! | `MCHN` chain (u32) | `Chain` |
//! | `MTBL` table (u32) version (u32) | `ChainTable` |
//! | `MMOV` chain (u32) | `Move`: a move of one of its replicas |
//! | `MRET` target (u64) | its former chain; the target was moved away |
//! | `MSTO` target (u64) | `StoreId`: the store with which the target has served |
//! | `MCAP` node (u32) | u64: the last known capacity of the node, in bytes |
//! | `MSNG` moverate | u64: bytes per second that moves may copy, 0 = no limit |
//! | `MHLD` chain (u32) | `Chain`: the newest known state of a chain that is held after a restore |
//! | `MSNG` restored | `true`: the store was restored from a backup, and its chains are not held yet |
//! | `MFEN` volume (u64) | `FenceRow`: the fence of a volume that has, or had, a snapshot |
//! | `MSNG` fences | `FencesVersion`: the version of the newest of them |
//! | `MSNG` unpublished | `true`: fences may be missing since a restore, until a metadata service has published them |
//! | `MCAP` snapshots | empty: the cluster has snapshots. Earlier releases cannot read this key of `MCAP`, so none of them becomes the primary and ignores the fences |
//! | `MSNG` rebalance | `PlacementGoal`: the operator's request |
//!
//! Numbers in keys are big endian. Values are postcard; fields are added under new prefixes only.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use threefs_core::fence::VolumeFence;
use threefs_core::ids::{
    ChainId, FencesVersion, Incarnation, InodeId, NodeId, TableId, TableVersion, TargetId,
};
use threefs_core::routing::NodeInfo;
pub(crate) use threefs_kv::rows::{decode, read, write};

pub(crate) const LEASE_HOLDER: &[u8] = b"MSNGholder";
/// The id of the cluster.
pub const CLUSTER: &[u8] = b"MSNGcluster";
pub(crate) const META: &[u8] = b"MSNGmeta";
pub(crate) const RENEWAL: &[u8] = b"MSNGrenewal";
pub(crate) const ROUTING: &[u8] = b"MSNGrouting";
pub(crate) const NODES: &[u8] = b"MNOD";
pub(crate) const CHAINS: &[u8] = b"MCHN";
pub(crate) const TABLES: &[u8] = b"MTBL";

pub(crate) const MOVES: &[u8] = b"MMOV";
pub(crate) const RETIRED: &[u8] = b"MRET";
pub(crate) const STORES: &[u8] = b"MSTO";
pub(crate) const CAPACITIES: &[u8] = b"MCAP";
pub(crate) const HELD: &[u8] = b"MHLD";
pub(crate) const FENCES: &[u8] = b"MFEN";
pub(crate) const FENCES_VERSION: &[u8] = b"MSNGfences";
pub(crate) const UNPUBLISHED: &[u8] = b"MSNGunpublished";
pub(crate) const SNAPSHOTS: &[u8] = b"MCAPsnapshots";
pub(crate) const RESTORED: &[u8] = b"MSNGrestored";
pub(crate) const REBALANCE: &[u8] = b"MSNGrebalance";
pub(crate) const MOVE_RATE: &[u8] = b"MSNGmoverate";

/// Former incarnations of a node that are kept, to distinguish a late heartbeat from a restart.
pub(crate) const FORMER_INCARNATIONS_MAX: usize = 16;

/// The primary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeaseHolder {
    /// Increases with every change of the primary; fences former primaries.
    pub epoch: u64,
    /// Random id of the mgmtd, drawn at its start.
    pub manager: u128,
    /// The address that it listens on.
    pub address: String,
    /// The opening of an exclusive store through which it wrote this; see
    /// `threefs_kv::Store::exclusive_opening`.
    pub opening: Option<u128>,
}

impl LeaseHolder {
    /// The row after a primary has given up its lease. Earlier releases wait for the lease to end.
    pub(crate) fn released(epoch: u64) -> Self {
        Self { epoch, manager: 0, address: String::new(), opening: None }
    }

    /// Whether no mgmtd holds the lease.
    pub(crate) fn is_released(&self) -> bool {
        self.manager == 0
    }
}

/// Persistent state of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeRow {
    pub info: NodeInfo,
    pub incarnation: Incarnation,
    pub former_incarnations: Vec<Incarnation>,
}

impl NodeRow {
    /// The row of a node with a new incarnation; the previous one joins the former ones.
    pub(crate) fn next(before: Option<Self>, info: NodeInfo, incarnation: Incarnation) -> Self {
        let mut former_incarnations = Vec::new();
        if let Some(before) = before {
            former_incarnations = before.former_incarnations;
            if before.incarnation != incarnation {
                former_incarnations.push(before.incarnation);
            }
            let surplus = former_incarnations.len().saturating_sub(FORMER_INCARNATIONS_MAX);
            former_incarnations.drain(..surplus);
        }
        Self { info, incarnation, former_incarnations }
    }
}

/// A stored fence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FenceRow {
    /// The version in which it was last changed.
    pub version: FencesVersion,
    pub fence: VolumeFence,
}

pub(crate) fn fence(volume: InodeId) -> Vec<u8> {
    [FENCES, &volume.0.to_be_bytes()].concat()
}

pub(crate) fn node(id: NodeId) -> Vec<u8> {
    [NODES, &id.0.to_be_bytes()].concat()
}

pub(crate) fn capacity(id: NodeId) -> Vec<u8> {
    [CAPACITIES, &id.0.to_be_bytes()].concat()
}

pub(crate) fn chain(id: ChainId) -> Vec<u8> {
    [CHAINS, &id.0.to_be_bytes()].concat()
}

pub(crate) fn held(id: ChainId) -> Vec<u8> {
    [HELD, &id.0.to_be_bytes()].concat()
}

pub(crate) fn table(id: TableId, version: TableVersion) -> Vec<u8> {
    [TABLES, &id.0.to_be_bytes(), &version.0.to_be_bytes()].concat()
}

/// Placement requested by an operator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PlacementGoal {
    /// Rebalance once, if it is not automatic.
    pub once: bool,
    /// Nodes to drain.
    pub leaving: BTreeSet<NodeId>,
}

pub(crate) fn moving(id: ChainId) -> Vec<u8> {
    [MOVES, &id.0.to_be_bytes()].concat()
}

pub(crate) fn store(id: TargetId) -> Vec<u8> {
    [STORES, &id.0.to_be_bytes()].concat()
}

pub(crate) fn retired(id: TargetId) -> Vec<u8> {
    [RETIRED, &id.0.to_be_bytes()].concat()
}
