//! Gives a file one more name.

use threefs_kv::{Operation, Transaction};

use super::quota;
use super::walk::{Last, Slot, find, slot};
use super::{Given, OpError, not_found, store, touch};
use crate::identity::Identity;
use crate::protocol::{At, MetaError, MetaReply};
use crate::rows::{self, DentryRow};

/// `MetaChange::Link`.
pub(crate) struct Link<'a> {
    pub who: &'a Identity,
    pub from: &'a At,
    pub to: &'a At,
    pub given: Given,
}

impl Operation for Link<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut row = find(txn, self.who, self.from, Last::Keep).await?;
        if row.inode.is_directory() {
            let reason = "a directory has one name".into();
            return Err(MetaError::NotPermitted { path: self.from.path.clone(), reason }.into());
        }
        if row.inode.links == 0 {
            return Err(not_found(&self.from.path, row.inode.id));
        }
        let slot = slot(txn, self.who, self.to, Last::Keep).await?;
        if slot.found.is_some() {
            return Err(MetaError::Exists { path: self.to.path.clone() }.into());
        }
        slot.check(self.who, self.to)?;
        let Slot { parent, name, .. } = slot;
        if row.inode.quota != parent.inode.quota {
            let reason = "a file with several names counts for one quota".into();
            return Err(MetaError::CrossQuota { path: self.to.path.clone(), reason }.into());
        }
        quota::charge_metadata(txn, &mut row, quota::name_bytes(&name)).await?;
        row.inode.links += 1;
        row.inode.changed = self.given.now;
        let entry = DentryRow { inode: row.inode.id, kind: row.kind() };
        rows::write(txn, &rows::dentry(parent.inode.id, &name), &entry)?;
        store(txn, &mut row)?;
        touch(txn, parent.inode.id, self.given.now);
        Ok(MetaReply::Inode(row.inode))
    }
}
