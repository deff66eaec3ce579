//! Execution of the requests of checks.

use fabric::deadline::Deadline;

use crate::ops::{self, OpError};
use crate::protocol::{AuditQuery, CORRECTIONS_PER_STEP, MetaError, MetaReply};
use crate::tree::{Tree, check_batch};

impl Tree {
    pub(super) async fn query_audit(
        &self,
        query: &AuditQuery,
        deadline: Deadline,
    ) -> Result<MetaReply, OpError> {
        match query {
            AuditQuery::Files { after, limit } => {
                let files = ops::AuditFiles { after: *after, limit: *limit };
                self.store.transact(deadline, &files).await
            }
            AuditQuery::Written { inode, after } => {
                let written = ops::AuditWritten { inode: *inode, after: *after };
                self.store.transact(deadline, &written).await
            }
            AuditQuery::Names { inodes, after } => {
                check_batch("inodes", inodes.len())?;
                let names = ops::AuditNames { inodes, after: after.as_ref() };
                self.store.transact(deadline, &names).await
            }
            AuditQuery::Unknown { inodes } => {
                check_batch("inodes", inodes.len())?;
                self.store.transact(deadline, &ops::AuditUnknown(inodes)).await
            }
            AuditQuery::Shown { after, until } => {
                let shown = ops::AuditShown { after: *after, until: *until };
                self.store.transact(deadline, &shown).await
            }
            AuditQuery::StartRepair { repair } => {
                self.store.transact(deadline, &ops::StartRepair(*repair)).await
            }
            AuditQuery::Repair { repair, step, corrections } => {
                check_corrections(corrections.len())?;
                let repair = ops::Repair { repair: *repair, step: *step, corrections };
                self.store.transact(deadline, &repair).await
            }
        }
    }
}

fn check_corrections(count: usize) -> Result<(), MetaError> {
    if count <= CORRECTIONS_PER_STEP {
        return Ok(());
    }
    Err(MetaError::Invalid {
        field: "corrections".into(),
        value: format!("{count} corrections"),
        reason: format!("must be at most {CORRECTIONS_PER_STEP}; send several steps"),
    })
}
