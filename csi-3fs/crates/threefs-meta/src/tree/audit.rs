//! Execution of the queries of an audit.

use fabric::deadline::Deadline;

use crate::ops::{self, OpError};
use crate::protocol::{AuditQuery, MetaReply};
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
        }
    }
}
