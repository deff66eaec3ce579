//! Ends write sessions.

use threefs_core::ids::InodeId;
use threefs_kv::{Operation, Transaction};

use super::length::grow;
use super::{Given, OpError, load};
use crate::protocol::{LengthReport, MetaError, MetaReply, SessionId};
use crate::rows;

/// `MetaChange::Close`. A session that is gone already is no error: it may have been pruned.
pub(crate) struct Close<'a> {
    pub inode: InodeId,
    pub session: SessionId,
    pub report: Option<&'a LengthReport>,
    pub given: Given,
}

impl Operation for Close<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        txn.clear(&rows::session(self.inode, self.session));
        let row = match self.report {
            None => load(txn, self.inode, "").await?,
            Some(report) if report.inode == self.inode => grow(txn, report, &self.given).await?,
            Some(report) => {
                return Err(MetaError::Invalid {
                    field: "report.inode".into(),
                    value: report.inode.to_string(),
                    reason: format!("the session is of {}", self.inode),
                }
                .into());
            }
        };
        Ok(MetaReply::Inode(row.inode))
    }
}
