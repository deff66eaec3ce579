//! Persisting the result of a scan.

use threefs_core::ids::{RoutingVersion, StoreId, TargetId};
use threefs_core::routing::Chain;
use threefs_core::routing::Move;
use threefs_kv::{KvError, Operation, Transaction};

use super::grow::end_moves;
use super::{Fence, OpError, fence, next_routing_version};
use crate::rows;

/// Writes changed chains. Each must be the direct successor of the stored version: a primary that
/// has decided from outdated state must not write it.
pub(crate) struct UpdateChains<'a> {
    pub fence: Fence,
    pub chains: &'a [Chain],
    /// Moves that end.
    pub ended_moves: &'a [Move],
    /// Targets that serve with another store than the recorded one.
    pub stores: &'a [(TargetId, StoreId)],
}

impl Operation for UpdateChains<'_> {
    type Output = RoutingVersion;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<RoutingVersion, OpError> {
        fence(txn, self.fence).await?;
        for chain in self.chains {
            let key = rows::chain(chain.id);
            let stored_chain: Option<Chain> = rows::read(txn, &key).await?;
            let stored_version = stored_chain.map(|stored_chain| stored_chain.version);
            if stored_version.map(|version| version.next()) != Some(chain.version) {
                let detail = format!(
                    "{} is stored in version {stored_version:?}, the change is for version {}",
                    chain.id, chain.version
                );
                return Err(KvError::bad_row(&key, detail).into());
            }
            rows::write(txn, &key, chain)?;
        }
        for (target, store) in self.stores {
            rows::write(txn, &rows::store(*target), store)?;
        }
        end_moves(txn, self.ended_moves)?;
        Ok(next_routing_version(txn).await?)
    }
}
