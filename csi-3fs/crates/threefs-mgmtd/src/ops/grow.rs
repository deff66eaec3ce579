//! Additional chains, and moves of replicas.

use threefs_core::ids::{ChainId, NodeId, RoutingVersion, TableVersion, TargetId};
use threefs_core::moves::{abandon, start};
use threefs_core::routing::Move;
use threefs_core::routing::{Chain, ChainTable};
use threefs_kv::{KvError, Operation, Transaction};

use super::load::load;
use super::{Fence, Loaded, OpError, fence, next_routing_version};
use crate::config::FIRST_TABLE;
use crate::placement::{PlannedMove, TARGETS_PER_NODE};
use crate::rows::{self, MOVE_RATE, PlacementGoal, REBALANCE};

/// Adds empty chains over the given nodes. Files use them only once they are in a version of the
/// table.
pub(crate) struct AddChains<'a> {
    pub fence: Fence,
    pub nodes: &'a [Vec<NodeId>],
}

impl Operation for AddChains<'_> {
    type Output = (RoutingVersion, Vec<Chain>);
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(RoutingVersion, Vec<Chain>), OpError> {
        fence(txn, self.fence).await?;
        let mut loaded = load(txn).await?;
        let mut new_chains = Vec::with_capacity(self.nodes.len());
        for nodes in self.nodes {
            let last = loaded.routing.chains.last_key_value().map_or(0, |(id, _)| id.0);
            let last = last.max(ids_before(loaded.routing.version));
            let targets: Vec<(TargetId, NodeId)> =
                nodes.iter().map(|node| (next_target_id(&loaded, *node), *node)).collect();
            let chain = Chain::create(ChainId(last + 1), &targets);
            rows::write(txn, &rows::chain(chain.id), &chain)?;
            loaded.routing.chains.insert(chain.id, chain.clone());
            new_chains.push(chain);
        }
        Ok((next_routing_version(txn).await?, new_chains))
    }
}

/// Creates a version of the table with additional chains, for new files. Existing files keep
/// theirs.
pub(crate) struct ExtendTable<'a> {
    pub fence: Fence,
    pub chains: &'a [ChainId],
}

impl Operation for ExtendTable<'_> {
    type Output = (RoutingVersion, ChainTable);
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(RoutingVersion, ChainTable), OpError> {
        fence(txn, self.fence).await?;
        let loaded = load(txn).await?;
        let before = loaded.routing.newest_table(FIRST_TABLE);
        let version =
            before.map_or(0, |table| table.version.0).max(ids_before(loaded.routing.version)) + 1;
        let mut chains = before.map_or_else(Vec::new, |table| table.chains.clone());
        chains.extend_from_slice(self.chains);
        let table = ChainTable { id: FIRST_TABLE, version: TableVersion(version), chains };
        rows::write(txn, &rows::table(table.id, table.version), &table)?;
        Ok((next_routing_version(txn).await?, table))
    }
}

/// Drops chains that are in no table and thus hold no data. The ids of their targets are not
/// reused.
pub(crate) struct DropChains<'a> {
    pub fence: Fence,
    pub chains: &'a [Chain],
}

impl Operation for DropChains<'_> {
    type Output = RoutingVersion;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<RoutingVersion, OpError> {
        fence(txn, self.fence).await?;
        for chain in self.chains {
            txn.clear(&rows::chain(chain.id));
            for place in &chain.targets {
                rows::write(txn, &rows::retired(place.target), &chain.id)?;
            }
        }
        Ok(next_routing_version(txn).await?)
    }
}

/// Moves that were started or abandoned, with their chains, and the routing version of the change.
type ChangedMoves = (RoutingVersion, Vec<(Move, Chain)>);

/// Starts moves. Skips chains without the source target, and those that are moving already.
pub(crate) struct StartMoves<'a> {
    pub fence: Fence,
    pub moves: &'a [PlannedMove],
}

impl Operation for StartMoves<'_> {
    type Output = ChangedMoves;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<ChangedMoves, OpError> {
        fence(txn, self.fence).await?;
        let mut loaded = load(txn).await?;
        let mut started_moves = Vec::with_capacity(self.moves.len());
        for planned in self.moves {
            let Some(chain) = loaded.routing.chains.get(&planned.chain) else { continue };
            let on = |node| chain.targets.iter().find(|place| place.node == node);
            let (Some(source), None) = (on(planned.from), on(planned.to)) else { continue };
            if loaded.routing.moves.contains_key(&chain.id) {
                continue;
            }
            let destination = next_target_id(&loaded, planned.to);
            let this = Move { chain: chain.id, source: source.target, destination };
            let chain = start(chain, destination, planned.to);
            rows::write(txn, &rows::chain(chain.id), &chain)?;
            rows::write(txn, &rows::moving(chain.id), &this)?;
            loaded.routing.chains.insert(chain.id, chain.clone());
            loaded.routing.moves.insert(chain.id, this);
            started_moves.push((this, chain));
        }
        Ok((next_routing_version(txn).await?, started_moves))
    }
}

/// Abandons moves with an offline destination. The destinations' ids are not reused: if the node
/// comes back, it removes their data.
pub(crate) struct AbandonMoves<'a> {
    pub fence: Fence,
    pub moves: &'a [Move],
}

impl Operation for AbandonMoves<'_> {
    type Output = ChangedMoves;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<ChangedMoves, OpError> {
        fence(txn, self.fence).await?;
        let loaded = load(txn).await?;
        let mut given_up = Vec::with_capacity(self.moves.len());
        for this in self.moves {
            let chain = loaded.routing.chains.get(&this.chain);
            let under_way = loaded.routing.moves.get(&this.chain) == Some(this);
            let next = chain.filter(|_| under_way).and_then(|chain| abandon(chain, this));
            let Some(chain) = next else { continue };
            rows::write(txn, &rows::chain(chain.id), &chain)?;
            txn.clear(&rows::moving(chain.id));
            rows::write(txn, &rows::retired(this.destination), &this.chain)?;
            given_up.push((*this, chain));
        }
        Ok((next_routing_version(txn).await?, given_up))
    }
}

/// Stores the operator's placement goal.
pub(crate) struct SetPlacementGoal<'a> {
    pub fence: Fence,
    pub goal: &'a PlacementGoal,
}

impl Operation for SetPlacementGoal<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        fence(txn, self.fence).await?;
        rows::write(txn, REBALANCE, self.goal)?;
        Ok(())
    }
}

/// Stores the rate limit of moves.
pub(crate) struct SetMoveRate {
    pub fence: Fence,
    pub bytes_per_second: u64,
}

impl Operation for SetMoveRate {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        fence(txn, self.fence).await?;
        rows::write(txn, MOVE_RATE, &self.bytes_per_second)?;
        Ok(())
    }
}

/// Ends moves in the transaction that removes their sources from the chains.
pub(super) fn end_moves(txn: &mut Transaction, moves: &[Move]) -> Result<(), KvError> {
    for this in moves {
        txn.clear(&rows::moving(this.chain));
        txn.clear(&rows::store(this.source));
        rows::write(txn, &rows::retired(this.source), &this.chain)?;
    }
    Ok(())
}

/// The next target id on a node. Retired targets count: ids are never reused.
fn next_target_id(loaded: &Loaded, node: NodeId) -> TargetId {
    let first = u64::from(node.0) * TARGETS_PER_NODE;
    let in_chains = loaded.routing.chains.values().flat_map(|chain| &chain.targets);
    let used_ids =
        in_chains.map(|place| place.target).chain(loaded.routing.retired.iter().copied());
    let of_node = used_ids.filter(|id| (first..first + TARGETS_PER_NODE).contains(&id.0));
    let last = of_node.map(|id| id.0).max().unwrap_or(first);
    let before = first + targets_before(loaded.routing.version);
    TargetId(last.max(before) + 1)
}

/// Ids of chains and versions of tables up to this one may have been used by lost stores of
/// earlier eras.
pub(super) fn ids_before(version: RoutingVersion) -> u32 {
    version.era().saturating_mul(1 << 16)
}

/// As [`ids_before`], for the targets of each node.
pub(super) fn targets_before(version: RoutingVersion) -> u64 {
    u64::from(version.era().min(255)) << 12
}
