//! Creation of the initial chains and their table.

use std::collections::BTreeMap;

use threefs_core::ids::{ChainId, NodeId, RoutingVersion, TableVersion, TargetId};
use threefs_core::routing::{Chain, ChainTable};
use threefs_kv::{KeyRange, Operation, Transaction};

use super::grow::{ids_before, targets_before};
use super::{Fence, OpError, fence, next_routing_version};
use crate::config::FIRST_TABLE;
use crate::placement::TARGETS_PER_NODE;
use crate::rows::{self, CHAINS, ROUTING};

/// Creates chains over these nodes; `None` if chains exist.
pub(crate) struct MakeChains<'a> {
    pub fence: Fence,
    pub nodes: &'a [Vec<NodeId>],
}

impl Operation for MakeChains<'_> {
    type Output = Option<(RoutingVersion, Vec<Chain>, ChainTable)>;
    type Error = OpError;

    async fn run(
        &self,
        txn: &mut Transaction,
    ) -> Result<Option<(RoutingVersion, Vec<Chain>, ChainTable)>, OpError> {
        fence(txn, self.fence).await?;
        if !txn.range(&KeyRange::prefix(CHAINS), 1).await?.is_empty() {
            return Ok(None);
        }
        let before: RoutingVersion = rows::read(txn, ROUTING).await?.unwrap_or_default();
        let (ids, targets) = (ids_before(before), targets_before(before));
        let mut targets_made: BTreeMap<NodeId, u64> = BTreeMap::new();
        let mut target = |node: &NodeId| {
            let number = targets_made.entry(*node).or_insert(targets);
            *number += 1;
            (TargetId(u64::from(node.0) * TARGETS_PER_NODE + *number), *node)
        };
        let chain = |(nodes, id): (&Vec<NodeId>, u32)| {
            Chain::create(ChainId(id), &nodes.iter().map(&mut target).collect::<Vec<_>>())
        };
        let chains: Vec<Chain> = self.nodes.iter().zip(ids + 1..).map(chain).collect();
        for chain in &chains {
            rows::write(txn, &rows::chain(chain.id), chain)?;
        }
        let table = ChainTable {
            id: FIRST_TABLE,
            version: TableVersion(ids + 1),
            chains: chains.iter().map(|chain| chain.id).collect(),
        };
        rows::write(txn, &rows::table(table.id, table.version), &table)?;
        let version = next_routing_version(txn).await?;
        Ok(Some((version, chains, table)))
    }
}
