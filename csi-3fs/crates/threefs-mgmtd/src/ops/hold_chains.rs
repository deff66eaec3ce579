//! Holding the chains of a store that was restored from a backup.

use threefs_core::ids::RoutingVersion;
use threefs_core::membership::{hold, is_held};
use threefs_kv::{Operation, Transaction};

use super::load::load;
use super::{Fence, Loaded, OpError, fence};
use crate::rows::{self, LEASE_HOLDER, LeaseHolder, RESTORED, ROUTING, UNPUBLISHED};

/// Chains per transaction.
const BATCH_CHAINS: usize = 1_000;

/// Marks the store as restored, in a new era above `seen`. A running primary has to take over again.
pub(crate) struct MarkRestored {
    pub seen: RoutingVersion,
    /// Of the primary that marks it; `None` for a process that is not one.
    pub fence: Option<Fence>,
}

impl Operation for MarkRestored {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        if let Some(own) = self.fence {
            fence(txn, own).await?;
        }
        let version: RoutingVersion = rows::read(txn, ROUTING).await?.unwrap_or_default();
        rows::write(txn, ROUTING, &version.max(self.seen).next_era())?;
        rows::write(txn, RESTORED, &true)?;
        if let Some(holder) = rows::read::<LeaseHolder>(txn, LEASE_HOLDER).await? {
            let epoch = holder.epoch + 1;
            rows::write(txn, LEASE_HOLDER, &LeaseHolder { epoch, ..holder })?;
        }
        Ok(())
    }
}

/// Holds the next chains, until [`Loaded::restored`] is false.
pub(crate) struct HoldChains(pub Fence);

impl Operation for HoldChains {
    type Output = Loaded;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Loaded, OpError> {
        fence(txn, self.0).await?;
        let mut loaded = load(txn).await?;
        let era = loaded.routing.version.era();
        // The lost store may have had other fences.
        rows::write(txn, UNPUBLISHED, &true)?;
        loaded.unpublished = true;
        let mut changed = Vec::new();
        for chain in loaded.routing.chains.values() {
            let newest = loaded.held.get(&chain.id).unwrap_or(chain);
            let next = hold(newest, chain.version, era);
            let is_done = loaded.held.contains_key(&chain.id)
                && is_held(chain)
                && next.version == chain.version.next();
            if !is_done && changed.len() < BATCH_CHAINS {
                changed.push((newest.clone(), next));
            }
        }
        if changed.is_empty() {
            txn.clear(RESTORED);
            loaded.restored = false;
        }
        for (newest, next) in changed {
            rows::write(txn, &rows::held(next.id), &newest)?;
            rows::write(txn, &rows::chain(next.id), &next)?;
            loaded.held.insert(next.id, newest);
            loaded.routing.chains.insert(next.id, next);
        }
        Ok(loaded)
    }
}
