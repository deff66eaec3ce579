//! Hard links.

use threefs_kv::{Operation, Transaction};

use crate::identity::Identity;
use crate::ops::lookup::{FinalSymlink, NameInDirectory, find, lookup_name};
use crate::ops::quota;
use crate::ops::{Inputs, OpError, names, not_found, store, touch};
use crate::protocol::{At, MetaError, MetaReply};
use crate::rows::DentryRow;

/// `MetaChange::Link`.
pub(crate) struct Link<'a> {
    pub caller: &'a Identity,
    pub from: &'a At,
    pub to: &'a At,
    pub inputs: Inputs,
}

impl Operation for Link<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut row = find(txn, self.caller, self.from, FinalSymlink::Keep).await?;
        if row.inode.is_directory() {
            let reason = "directories cannot have several names".into();
            return Err(MetaError::NotPermitted { path: self.from.path.clone(), reason }.into());
        }
        if row.inode.links == 0 {
            return Err(not_found(&self.from.path, row.inode.id));
        }
        let name_in = lookup_name(txn, self.caller, self.to, FinalSymlink::Keep).await?;
        if name_in.entry.is_some() {
            return Err(MetaError::Exists { path: self.to.path.clone() }.into());
        }
        name_in.check(self.caller, self.to)?;
        let NameInDirectory { parent, name, .. } = name_in;
        if row.inode.quota != parent.inode.quota {
            let reason = "all names of a file must be in one quota".into();
            return Err(MetaError::CrossQuota { path: self.to.path.clone(), reason }.into());
        }
        quota::charge_metadata(txn, &mut row, quota::name_bytes(&name)).await?;
        row.inode.links += 1;
        row.inode.changed = self.inputs.now;
        let entry = DentryRow::new(row.inode.id, row.kind());
        names::set(txn, parent.inode.id, &name, Some(&entry)).await?;
        store(txn, &mut row).await?;
        touch(txn, parent.inode.id, self.inputs.now).await?;
        Ok(MetaReply::Inode(row.inode))
    }
}
