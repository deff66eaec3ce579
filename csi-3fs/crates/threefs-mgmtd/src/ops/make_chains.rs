//! Creation of the initial chains and their table.

use threefs_core::ids::{NodeId, RoutingVersion, TableVersion};
use threefs_core::routing::{Chain, ChainTable};
use threefs_kv::{KeyRange, Operation, Transaction};

use super::{Fence, OpError, fence, next_routing_version};
use crate::config::{Bootstrap, FIRST_TABLE};
use crate::placement::first_chains;
use crate::rows::{self, CHAINS};

/// Creates the chains over `nodes`; `None` if chains exist.
pub(crate) struct MakeChains<'a> {
    pub fence: Fence,
    pub nodes: &'a [NodeId],
    pub bootstrap: Bootstrap,
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
        let chains =
            first_chains(self.nodes, self.bootstrap.replicas, self.bootstrap.chains_per_node);
        for chain in &chains {
            rows::write(txn, &rows::chain(chain.id), chain)?;
        }
        let table = ChainTable {
            id: FIRST_TABLE,
            version: TableVersion(1),
            chains: chains.iter().map(|chain| chain.id).collect(),
        };
        rows::write(txn, &rows::table(table.id, table.version), &table)?;
        let version = next_routing_version(txn).await?;
        Ok(Some((version, chains, table)))
    }
}
