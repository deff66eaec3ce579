//! Taking, keeping and looking at the primary's lease.
//!
//! Two rows: who holds it, which every writing transaction reads, and a renewal count, which only
//! contenders read, so that renewals do not conflict with the primary's own work. Nobody compares
//! clocks: a contender watches the count stand still for a whole lease by its own clock.

use threefs_core::ids::ClusterId;
use threefs_kv::{Operation, Transaction};

use super::load::{Loaded, load};
use super::{Fence, OpError, fence};
use crate::rows::{self, CLUSTER, LEASE_HOLDER, LeaseHolder, RENEWAL};

/// What a contender sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeaseRow {
    pub holder: Option<LeaseHolder>,
    pub renewal: u64,
}

/// Looks, without disturbing anybody.
pub(crate) struct InspectLease;

impl Operation for InspectLease {
    type Output = LeaseRow;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<LeaseRow, OpError> {
        let holder = rows::read(txn, LEASE_HOLDER).await?;
        let renewal = rows::read(txn, RENEWAL).await?.unwrap_or(0);
        Ok(LeaseRow { holder, renewal })
    }
}

/// Takes the lease if it is still exactly as it was `seen`, and reads what a primary must know.
pub(crate) struct AcquireLease<'a> {
    pub seen: &'a LeaseRow,
    pub manager: u128,
    pub address: &'a str,
    pub opening: Option<u128>,
}

impl Operation for AcquireLease<'_> {
    type Output = (Fence, Loaded);
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(Fence, Loaded), OpError> {
        let now = InspectLease.run(txn).await?;
        if now != *self.seen {
            let holder = now.holder.map_or_else(|| "nobody".into(), |holder| holder.address);
            return Err(OpError::Fenced { holder });
        }
        let Self { manager, address, opening, .. } = *self;
        let epoch = now.holder.map_or(0, |holder| holder.epoch) + 1;
        rows::write(
            txn,
            LEASE_HOLDER,
            &LeaseHolder { epoch, manager, address: address.into(), opening },
        )?;
        rows::write(txn, RENEWAL, &(now.renewal + 1))?;
        if rows::read::<ClusterId>(txn, CLUSTER).await?.is_none() {
            // Random and drawn once by the first primary of this store: it names the cluster.
            rows::write(txn, CLUSTER, &ClusterId(manager))?;
        }
        Ok((Fence { manager, epoch }, load(txn).await?))
    }
}

/// Keeps the lease.
pub(crate) struct RenewLease(pub Fence);

impl Operation for RenewLease {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        fence(txn, self.0).await?;
        let renewal: u64 = rows::read(txn, RENEWAL).await?.unwrap_or(0);
        rows::write(txn, RENEWAL, &(renewal + 1))?;
        Ok(())
    }
}
