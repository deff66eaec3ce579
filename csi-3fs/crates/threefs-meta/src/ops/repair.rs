//! Corrections of counters while clients change what they count.
//!
//! A check computes the errors of all counters in one snapshot. Every change adds the same to a
//! counter and to what it counts, so an error stays constant until it is corrected, and a
//! correction adds its negative. What moves or removes a nested quota moves the value of its
//! counters, with its error, between the quotas above it. So the error of a quota is the part that
//! the quotas below it do not account for, and its correction is charged to the quotas that are
//! above it when it is applied, as every charge is.
//!
//! Each step is applied once: the `METArepair` row has the repair and its next step. The row is
//! written before the snapshot is taken, so a snapshot of another store, or one from before another
//! repair, does not have it. A repeated step changes nothing, and a repair is refused once another
//! one has started.

use threefs_kv::{Operation, Transaction};

use crate::ops::quota::{self, Charge};
use crate::ops::{OpError, store};
use crate::protocol::{Correction, EntryKind, MetaError, MetaReply};
use crate::rows::{self, REMOVED, REPAIR, RepairRow};

/// `AuditQuery::StartRepair`.
pub(crate) struct StartRepair(pub u64);

impl Operation for StartRepair {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let started: Option<RepairRow> = rows::read(txn, REPAIR).await?;
        if started.is_none_or(|started| started.repair != self.0) {
            rows::write(txn, REPAIR, &RepairRow { repair: self.0, next_step: 0 })?;
        }
        Ok(MetaReply::Done)
    }
}

/// `AuditQuery::Repair`.
pub(crate) struct Repair<'a> {
    pub repair: u64,
    pub step: u64,
    pub corrections: &'a [Correction],
}

impl Operation for Repair<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let started: Option<RepairRow> = rows::read(txn, REPAIR).await?;
        let Some(mut row) = started.filter(|row| row.repair == self.repair) else {
            return Err(self.refused("another repair has started since; repeat the command"));
        };
        if self.step < row.next_step {
            return Ok(MetaReply::Done);
        }
        if self.step > row.next_step {
            return Err(self.refused("an earlier step has not been applied"));
        }
        for correction in self.corrections {
            correct(txn, correction).await?;
        }
        row.next_step += 1;
        rows::write(txn, REPAIR, &row)?;
        Ok(MetaReply::Done)
    }
}

impl Repair<'_> {
    fn refused(&self, reason: &str) -> OpError {
        MetaError::Invalid {
            field: "repair".into(),
            value: format!("{} step {}", self.repair, self.step),
            reason: reason.into(),
        }
        .into()
    }
}

async fn correct(txn: &mut Transaction, correction: &Correction) -> Result<(), OpError> {
    match *correction {
        Correction::Quota { directory, more: [bytes, excess, inodes, metadata] } => {
            let more = Charge { bytes, excess, inodes, metadata };
            quota::charge_unbounded(txn, Some(directory), more).await
        }
        Correction::Subdirectories { directory, more } => {
            let row = rows::read_inode(txn, directory).await?;
            // Nothing reads the count of a removed directory, and its row may be gone.
            if row.and_then(|row| row.parent()).is_some_and(|parent| parent != REMOVED) {
                txn.atomic_add(&rows::subdirectories(directory), more);
            }
            Ok(())
        }
        Correction::Answers { volume, more } => {
            txn.bounded_add(&rows::answer_bytes(volume), more, i64::MAX);
            Ok(())
        }
        Correction::Inode { inode, version, links, metadata_bytes } => {
            let row = rows::read_inode(txn, inode).await?;
            // Each change of a name, an attribute or a session of an inode also changes its version.
            let Some(mut row) = row.filter(|row| row.inode.version == version) else {
                return Ok(());
            };
            let more = quota::count(metadata_bytes) - quota::count(row.metadata_bytes);
            if row.charged && more != 0 {
                let owner = quota::owner(txn, &row).await?;
                let more = Charge { metadata: more, ..Charge::default() };
                quota::charge_unbounded(txn, owner, more).await?;
            }
            row.metadata_bytes = metadata_bytes;
            if row.kind() != EntryKind::Directory {
                row.inode.links = links;
            }
            store(txn, &mut row).await
        }
    }
}
