//! Acquiring, renewing and inspecting the primary's lease.
//!
//! Two rows: the holder, which every writing transaction reads, and a renewal count, which only
//! contenders read, so that renewals do not conflict with the primary's other transactions. Clocks
//! are not compared: a contender waits until the count is unchanged for a while by its own clock
//! (`crate::takeover`).

use threefs_core::ids::{ClusterId, RoutingVersion};
use threefs_kv::{Operation, Owner, Transaction};

use super::load::{Loaded, load};
use super::{Fence, OpError, fence};
use crate::rows::{self, CLUSTER, LEASE_HOLDER, LeaseHolder, RENEWAL, ROUTING};

/// State of the lease as seen by a contender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeaseRow {
    pub holder: Option<LeaseHolder>,
    pub renewal: u64,
    pub routing: RoutingVersion,
}

/// Reads the lease without causing conflicts.
pub(crate) struct InspectLease;

impl Operation for InspectLease {
    type Output = LeaseRow;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<LeaseRow, OpError> {
        let holder = rows::read(txn, LEASE_HOLDER).await?;
        let renewal = rows::read(txn, RENEWAL).await?.unwrap_or(0);
        let routing = rows::read(txn, ROUTING).await?.unwrap_or_default();
        Ok(LeaseRow { holder, renewal, routing })
    }
}

/// Acquires the lease if it still equals `observed_lease`, and loads the state of a primary.
pub(crate) struct AcquireLease<'a> {
    pub observed_lease: &'a LeaseRow,
    pub manager: u128,
    pub address: &'a str,
    pub opening: Option<u128>,
    pub owner: Option<&'a Owner>,
}

impl Operation for AcquireLease<'_> {
    type Output = (Fence, Loaded);
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(Fence, Loaded), OpError> {
        let now = InspectLease.run(txn).await?;
        if now != *self.observed_lease {
            let holder = now.holder.map_or_else(|| "no mgmtd".into(), |holder| holder.address);
            return Err(OpError::Fenced { holder });
        }
        let Self { manager, address, opening, owner, .. } = *self;
        if let Some(owner) = owner {
            owner.check(txn).await?;
        }
        let epoch = now.holder.map_or(0, |holder| holder.epoch) + 1;
        rows::write(
            txn,
            LEASE_HOLDER,
            &LeaseHolder { epoch, manager, address: address.into(), opening },
        )?;
        rows::write(txn, RENEWAL, &(now.renewal + 1))?;
        if rows::read::<ClusterId>(txn, CLUSTER).await?.is_none() {
            // Drawn once by the first primary of this store: the id of the cluster.
            rows::write(txn, CLUSTER, &ClusterId(manager))?;
        }
        Ok((Fence { manager, epoch }, load(txn).await?))
    }
}

/// Renews the lease.
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

/// Gives up the lease. The row keeps the epoch of the released term.
pub(crate) struct ReleaseLease(pub Fence);

impl Operation for ReleaseLease {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        fence(txn, self.0).await?;
        Ok(rows::write(txn, LEASE_HOLDER, &LeaseHolder::released(self.0.epoch))?)
    }
}
