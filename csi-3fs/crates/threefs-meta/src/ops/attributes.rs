//! Changes mode, owner and times.

use threefs_kv::{Operation, Transaction};

use super::walk::{Last, find};
use super::{Given, OpError, store, visible};
use crate::protocol::{At, MetaReply, Nanoseconds};

/// `MetaChange::SetAttributes`.
pub(crate) struct SetAttributes<'a> {
    pub at: &'a At,
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub accessed: Option<Nanoseconds>,
    pub modified: Option<Nanoseconds>,
    pub given: Given,
}

impl Operation for SetAttributes<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut row = find(txn, self.at, Last::Follow).await?;
        let inode = &mut row.inode;
        inode.mode = self.mode.map_or(inode.mode, |mode| mode & 0o7777);
        inode.uid = self.uid.unwrap_or(inode.uid);
        inode.gid = self.gid.unwrap_or(inode.gid);
        inode.accessed = self.accessed.unwrap_or(inode.accessed);
        inode.changed = self.given.now;
        if let Some(modified) = self.modified {
            inode.modified = modified;
            if inode.is_directory() {
                // The set time holds until the entries change again.
                txn.clear(&crate::rows::directory_time(inode.id));
            }
        }
        store(txn, &row)?;
        Ok(MetaReply::Inode(visible(txn, row).await?))
    }
}
