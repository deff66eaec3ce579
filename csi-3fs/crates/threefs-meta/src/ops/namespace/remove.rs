//! Removal of names, empty directories and whole trees.

use threefs_kv::{KeyRange, Operation, Transaction};

use crate::clients::open_files::OpenFiles;
use crate::identity::Identity;
use crate::ops::detach::{detach_tree, drop_directory};
use crate::ops::lookup::{FinalSymlink, NameInDirectory, lookup_name};
use crate::ops::snapshots::refuse_snapshots;
use crate::ops::trash::{self, RemovedName, keep_directory, remove_link};
use crate::ops::{
    Inputs, OpError, count_subdirectories, load_named, names, not_found, refuse_snapshot, touch,
};
use crate::protocol::{At, EntryKind, MetaError, MetaReply, Nanoseconds};
use crate::rows::{self, DentryRow, InodeRow};

/// `MetaChange::Unlink`.
pub(crate) struct Unlink<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub open_files: &'a OpenFiles,
    pub inputs: Inputs,
}

/// `MetaChange::RemoveDirectory`.
pub(crate) struct RemoveDirectory<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub open_files: &'a OpenFiles,
    pub inputs: Inputs,
}

/// `MetaChange::RemoveTree`.
pub(crate) struct RemoveTree<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub open_files: &'a OpenFiles,
    pub inputs: Inputs,
}

impl Operation for Unlink<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let (name_in, entry, row) = existing(txn, self.caller, self.at).await?;
        if entry.kind == EntryKind::Directory {
            return Err(MetaError::IsADirectory { path: self.at.path.clone() }.into());
        }
        let (caller, inputs, open_files) = (self.caller, &self.inputs, self.open_files);
        remove_link(txn, row, &RemovedName::new(&name_in, caller, inputs, open_files)).await?;
        remove_name(txn, &name_in, self.inputs.now).await?;
        Ok(MetaReply::Done)
    }
}

impl Operation for RemoveDirectory<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let (name_in, entry, row) = existing(txn, self.caller, self.at).await?;
        if entry.kind != EntryKind::Directory {
            return Err(MetaError::NotADirectory { path: self.at.path.clone() }.into());
        }
        let (caller, inputs, open_files) = (self.caller, &self.inputs, self.open_files);
        let from = RemovedName::new(&name_in, caller, inputs, open_files);
        remove_empty(txn, row, &self.at.path, &from).await?;
        count_subdirectories(txn, name_in.parent.inode.id, -1).await?;
        remove_name(txn, &name_in, self.inputs.now).await?;
        Ok(MetaReply::Done)
    }
}

impl Operation for RemoveTree<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let (name_in, entry, row) = existing(txn, self.caller, self.at).await?;
        let (caller, inputs, open_files) = (self.caller, &self.inputs, self.open_files);
        let from = RemovedName::new(&name_in, caller, inputs, open_files);
        match entry.kind {
            EntryKind::Directory => {
                // Permissions below the directory are not checked one by one, so only root may do
                // this.
                if !self.caller.is_root() {
                    let reason = "only root removes a tree at once".into();
                    let path = self.at.path.clone();
                    return Err(MetaError::NotPermitted { path, reason }.into());
                }
                refuse_snapshots(txn, &row, &self.at.path).await?;
                if let Some(row) = keep_directory(txn, row, &from).await? {
                    detach_tree(txn, row, self.inputs.now).await?;
                }
                count_subdirectories(txn, name_in.parent.inode.id, -1).await?;
            }
            _ => remove_link(txn, row, &from).await?,
        }
        remove_name(txn, &name_in, self.inputs.now).await?;
        Ok(MetaReply::Done)
    }
}

/// Removes an empty directory. The read that found it empty conflicts with transactions that add an
/// entry.
pub(crate) async fn remove_empty(
    txn: &mut Transaction,
    row: InodeRow,
    path: &str,
    from: &RemovedName<'_>,
) -> Result<(), OpError> {
    refuse_snapshots(txn, &row, path).await?;
    let names = KeyRange::prefix(&rows::dentries(row.inode.id));
    if !txn.range(&names, 1).await?.is_empty() {
        return Err(MetaError::NotEmpty { path: path.into() }.into());
    }
    let Some(row) = keep_directory(txn, row, from).await? else { return Ok(()) };
    if row.inode.quota == Some(row.inode.id) && trash::has_entries(txn, row.inode.id).await? {
        return detach_tree(txn, row, from.inputs.now).await;
    }
    drop_directory(txn, row, from.inputs.now).await
}

/// An existing name that the caller may remove, with its entry and inode.
async fn existing(
    txn: &mut Transaction,
    caller: &Identity,
    at: &At,
) -> Result<(NameInDirectory, DentryRow, InodeRow), OpError> {
    let name_in = lookup_name(txn, caller, at, FinalSymlink::Keep).await?;
    let entry = name_in.entry.ok_or_else(|| not_found(&at.path, at.directory))?;
    name_in.check(caller, at)?;
    refuse_snapshot(entry.inode, &at.path)?;
    let row = load_named(txn, entry, &at.path).await?;
    caller.check_sticky(&name_in.parent.inode, &row.inode, &at.path)?;
    Ok((name_in, entry, row))
}

async fn remove_name(
    txn: &mut Transaction,
    name_in: &NameInDirectory,
    now: Nanoseconds,
) -> Result<(), OpError> {
    names::set(txn, name_in.parent.inode.id, &name_in.name, None).await?;
    touch(txn, name_in.parent.inode.id, now).await?;
    Ok(())
}
