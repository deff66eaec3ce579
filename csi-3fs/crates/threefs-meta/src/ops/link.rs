//! Gives a file one more name.

use threefs_kv::{Operation, Transaction};

use super::walk::{Last, Slot, find, slot};
use super::{Given, OpError, not_found, store, touch};
use crate::protocol::{At, MetaError, MetaReply};
use crate::rows::{self, DentryRow};

/// `MetaChange::Link`.
pub(crate) struct Link<'a> {
    pub from: &'a At,
    pub to: &'a At,
    pub given: Given,
}

impl Operation for Link<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut row = find(txn, self.from, Last::Keep).await?;
        if row.inode.is_directory() {
            return Err(MetaError::IsADirectory { path: self.from.path.clone() }.into());
        }
        if row.inode.links == 0 {
            return Err(not_found(&self.from.path, row.inode.id));
        }
        let Slot { parent, name, found } = slot(txn, self.to, Last::Keep).await?;
        if found.is_some() {
            return Err(MetaError::Exists { path: self.to.path.clone() }.into());
        }
        row.inode.links += 1;
        row.inode.changed = self.given.now;
        let entry = DentryRow { inode: row.inode.id, kind: row.kind() };
        rows::write(txn, &rows::dentry(parent.inode.id, &name), &entry)?;
        store(txn, &row)?;
        touch(txn, parent.inode.id, self.given.now);
        Ok(MetaReply::Inode(row.inode))
    }
}
