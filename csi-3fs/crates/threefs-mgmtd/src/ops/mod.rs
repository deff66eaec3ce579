//! Operations on mgmtd's store, one per file, each a function of one transaction. Every operation
//! that changes anything starts with [`fence`].

mod enable_snapshots;
mod grow;
mod hold_chains;
mod lease;
mod load;
mod make_chains;
mod publish_fences;
mod raise_fence;
mod register_meta;
mod register_node;
mod set_capacities;
mod update_chains;

pub(crate) use enable_snapshots::EnableSnapshots;
pub(crate) use grow::{
    AbandonMoves, AddChains, DropChains, ExtendTable, SetMoveRate, SetPlacementGoal, StartMoves,
};
pub(crate) use hold_chains::{HoldChains, MarkRestored};
pub(crate) use lease::{AcquireLease, InspectLease, LeaseRow, ReleaseLease, RenewLease};
pub(crate) use load::Loaded;
pub(crate) use make_chains::MakeChains;
pub(crate) use publish_fences::FencesPublished;
pub(crate) use raise_fence::RaiseFence;
pub(crate) use register_meta::RegisterMeta;
pub(crate) use register_node::RegisterNode;
pub(crate) use set_capacities::SetCapacities;
pub(crate) use update_chains::UpdateChains;

use threefs_core::ids::RoutingVersion;
use threefs_kv::{KvError, Retry, Transaction};

use crate::rows::{self, LEASE_HOLDER, LeaseHolder};

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OpError {
    /// Another manager holds the lease. Nothing was written.
    #[error("fenced: {holder} holds the lease")]
    Fenced { holder: String },
    #[error(transparent)]
    Kv(#[from] KvError),
}

impl OpError {
    /// Whether another manager may be the primary, or the transaction may have been committed.
    pub(crate) fn in_doubt(&self) -> bool {
        matches!(
            self,
            Self::Fenced { .. } | Self::Kv(KvError::CommitUnknown { .. } | KvError::Broken { .. })
        )
    }
}

impl Retry for OpError {
    fn retryable_conflict(&self) -> bool {
        matches!(self, Self::Kv(error) if error.retryable())
    }

    fn describe(&self) -> String {
        self.to_string()
    }
}

/// Write permission of a manager in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fence {
    pub manager: u128,
    pub epoch: u64,
}

/// Fails unless this manager still holds the lease, and conflicts with a transaction that acquires
/// it before this one commits.
pub(crate) async fn fence(txn: &mut Transaction, fence: Fence) -> Result<(), OpError> {
    let holder: Option<LeaseHolder> = rows::read(txn, LEASE_HOLDER).await?;
    match holder {
        Some(holder) if holder.manager == fence.manager && holder.epoch == fence.epoch => Ok(()),
        Some(holder) => Err(OpError::Fenced { holder: holder.address }),
        None => Err(OpError::Fenced { holder: "no mgmtd".into() }),
    }
}

/// Increments the routing version; part of every change of published state.
pub(crate) async fn next_routing_version(txn: &mut Transaction) -> Result<RoutingVersion, KvError> {
    let version =
        rows::read::<RoutingVersion>(txn, rows::ROUTING).await?.unwrap_or_default().next();
    rows::write(txn, rows::ROUTING, &version)?;
    Ok(version)
}
