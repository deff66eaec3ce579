//! The end of write sessions.

use threefs_core::ids::InodeId;
use threefs_kv::{KvError, Operation, Transaction};

use crate::ops::file::length::{end_session, grow};
use crate::ops::{Inputs, OpError, RecountContext, load};
use crate::protocol::{LengthReport, MetaError, MetaReply, SessionId};
use crate::rows;

/// `MetaChange::Close`. A session that does not exist is not an error: it may have been pruned.
pub(crate) struct Close<'a> {
    pub inode: InodeId,
    pub session: SessionId,
    pub report: Option<&'a LengthReport>,
    pub inputs: Inputs,
}

impl Operation for Close<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let row = match self.report {
            None => load(txn, self.inode, "").await?,
            Some(report) if report.inode == self.inode => grow(txn, report, &self.inputs).await?,
            Some(report) => {
                return Err(MetaError::Invalid {
                    field: "report.inode".into(),
                    value: report.inode.to_string(),
                    reason: format!("the session belongs to {}", self.inode),
                }
                .into());
            }
        };
        end_session(txn, self.inode, self.session, &self.inputs.recount_context()).await?;
        Ok(MetaReply::Inode(row.inode))
    }
}

/// Ends a session of a client that has expired.
pub(crate) struct EndSession<'a> {
    /// Key of the session's row.
    pub key: &'a [u8],
    pub context: RecountContext,
}

impl Operation for EndSession<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        let inode = rows::inode_of_key(self.key)?;
        let id = self.key.get(12..28).and_then(|bytes| <[u8; 16]>::try_from(bytes).ok());
        let id = id.ok_or_else(|| KvError::bad_row(self.key, "the key holds no session"))?;
        end_session(txn, inode, SessionId(u128::from_be_bytes(id)), &self.context).await
    }
}
