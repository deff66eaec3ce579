//! Loading of the state of a new primary.

use std::collections::BTreeMap;

use threefs_core::ids::{ChainId, InodeId, NodeId, StoreId, TargetId};
use threefs_core::routing::Move;
use threefs_core::routing::{Chain, ChainTable, RoutingInfo};
use threefs_kv::{KeyRange, KvError, Transaction};

use crate::rows::{
    self, CAPACITIES, CHAINS, CLUSTER, FENCES, FenceRow, HELD, MOVE_RATE, MOVES, NODES, NodeRow,
    PlacementGoal, REBALANCE, RESTORED, RETIRED, ROUTING, SNAPSHOTS, STORES, TABLES, UNPUBLISHED,
};

/// Upper bound, above the size of any cluster.
const ROWS_MAX: usize = 1_000_000;

/// Stored state.
#[derive(Clone, Debug, Default)]
pub(crate) struct Loaded {
    pub routing: RoutingInfo,
    pub nodes: BTreeMap<NodeId, NodeRow>,
    pub goal: PlacementGoal,
    pub stores: BTreeMap<TargetId, StoreId>,
    /// The last known capacity of each node.
    pub capacities: BTreeMap<NodeId, u64>,
    /// Rate limit of moves.
    pub move_rate: u64,
    /// The newest known state of each held chain.
    pub held: BTreeMap<ChainId, Chain>,
    /// The fence of each volume that has one.
    pub fences: BTreeMap<InodeId, FenceRow>,
    /// The cluster has snapshots.
    pub snapshots: bool,
    /// Fences may be missing until a metadata service has published them.
    pub unpublished: bool,
    /// Whether chains remain to be held.
    pub restored: bool,
}

/// Loads all nodes, chains and tables from one snapshot.
pub(crate) async fn load(txn: &mut Transaction) -> Result<Loaded, KvError> {
    let mut loaded = Loaded::default();
    loaded.routing.cluster = rows::read(txn, CLUSTER).await?.unwrap_or_default();
    loaded.routing.version = rows::read(txn, ROUTING).await?.unwrap_or_default();
    for (key, value) in txn.range(&KeyRange::prefix(NODES), ROWS_MAX).await? {
        let row: NodeRow = rows::decode(&key, &value)?;
        loaded.routing.nodes.insert(row.info.id, row.info.clone());
        loaded.nodes.insert(row.info.id, row);
    }
    for (key, value) in txn.range(&KeyRange::prefix(CHAINS), ROWS_MAX).await? {
        let chain: Chain = rows::decode(&key, &value)?;
        loaded.routing.chains.insert(chain.id, chain);
    }
    for (key, value) in txn.range(&KeyRange::prefix(TABLES), ROWS_MAX).await? {
        loaded.routing.tables.push(rows::decode::<ChainTable>(&key, &value)?);
    }
    for (key, value) in txn.range(&KeyRange::prefix(MOVES), ROWS_MAX).await? {
        let this: Move = rows::decode(&key, &value)?;
        loaded.routing.moves.insert(this.chain, this);
    }
    for (key, _) in txn.range(&KeyRange::prefix(RETIRED), ROWS_MAX).await? {
        loaded.routing.retired.insert(target_in(&key, RETIRED)?);
    }
    for (key, value) in txn.range(&KeyRange::prefix(STORES), ROWS_MAX).await? {
        loaded.stores.insert(target_in(&key, STORES)?, rows::decode(&key, &value)?);
    }
    for (key, value) in txn.range(&KeyRange::prefix(CAPACITIES), ROWS_MAX).await? {
        if key == SNAPSHOTS {
            loaded.snapshots = true;
            continue;
        }
        let id = key.get(CAPACITIES.len()..).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok());
        let id = id.ok_or_else(|| KvError::bad_row(&key, "the key has no node"))?;
        loaded.capacities.insert(NodeId(u32::from_be_bytes(id)), rows::decode(&key, &value)?);
    }
    for (key, value) in txn.range(&KeyRange::prefix(HELD), ROWS_MAX).await? {
        let chain: Chain = rows::decode(&key, &value)?;
        loaded.held.insert(chain.id, chain);
    }
    for (key, value) in txn.range(&KeyRange::prefix(FENCES), ROWS_MAX).await? {
        let row: FenceRow = rows::decode(&key, &value)?;
        loaded.fences.insert(row.fence.volume, row);
    }
    loaded.unpublished = rows::read(txn, UNPUBLISHED).await?.unwrap_or_default();
    loaded.restored = rows::read(txn, RESTORED).await?.unwrap_or_default();
    loaded.move_rate = rows::read(txn, MOVE_RATE).await?.unwrap_or_default();
    loaded.goal = rows::read(txn, REBALANCE).await?.unwrap_or_default();
    Ok(loaded)
}

/// The target id in a key, after its prefix.
fn target_in(key: &[u8], prefix: &[u8]) -> Result<TargetId, KvError> {
    let id = key.get(prefix.len()..).and_then(|bytes| <[u8; 8]>::try_from(bytes).ok());
    let id = id.ok_or_else(|| KvError::bad_row(key, "the key has no target"))?;
    Ok(TargetId(u64::from_be_bytes(id)))
}
