//! Persisting the result of a scan or a promotion.

use threefs_core::ids::RoutingVersion;
use threefs_core::routing::Chain;
use threefs_kv::{KvError, Operation, Transaction};

use super::grow::end_moves;
use super::{Fence, OpError, fence, next_routing_version};
use crate::changes::Changes;
use crate::rows;

/// Writes changed chains. Each must be the direct successor of the stored version: a primary that
/// has decided from outdated state must not write it.
pub(crate) struct UpdateChains<'a> {
    pub fence: Fence,
    pub changes: &'a Changes,
}

impl Operation for UpdateChains<'_> {
    type Output = RoutingVersion;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<RoutingVersion, OpError> {
        fence(txn, self.fence).await?;
        let changes = self.changes;
        for chain in &changes.chains {
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
        for (target, store) in &changes.stores {
            rows::write(txn, &rows::store(*target), store)?;
        }
        for chain in &changes.learned {
            rows::write(txn, &rows::held(chain.id), chain)?;
        }
        for chain in &changes.released {
            txn.clear(&rows::held(*chain));
        }
        for chain in &changes.dropped_moves {
            txn.clear(&rows::moving(*chain));
        }
        end_moves(txn, &changes.ended_moves)?;
        Ok(next_routing_version(txn).await?)
    }
}
