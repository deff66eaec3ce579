//! Removes names, empty directories and whole trees.

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, KvError, Operation, Transaction};

use super::walk::{Last, Slot, slot};
use super::{Given, OpError, drop_link, load_named, not_found, queue_removal, store, touch};
use crate::protocol::{At, EntryKind, InodeKind, MetaError, MetaReply, Nanoseconds};
use crate::rows::{self, DentryRow, InodeRow, REMOVED};

/// `MetaChange::Unlink`.
pub(crate) struct Unlink<'a> {
    pub at: &'a At,
    pub given: Given,
}

/// `MetaChange::RemoveDirectory`.
pub(crate) struct RemoveDirectory<'a> {
    pub at: &'a At,
    pub given: Given,
}

/// `MetaChange::RemoveTree`.
pub(crate) struct RemoveTree<'a> {
    pub at: &'a At,
    pub given: Given,
}

impl Operation for Unlink<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let (slot, entry) = existing(txn, self.at).await?;
        if entry.kind == EntryKind::Directory {
            return Err(MetaError::IsADirectory { path: self.at.path.clone() }.into());
        }
        let row = load_named(txn, entry, &self.at.path).await?;
        drop_link(txn, row, self.given.now).await?;
        remove_name(txn, &slot, self.given.now);
        Ok(MetaReply::Done)
    }
}

impl Operation for RemoveDirectory<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let (slot, entry) = existing(txn, self.at).await?;
        if entry.kind != EntryKind::Directory {
            return Err(MetaError::NotADirectory { path: self.at.path.clone() }.into());
        }
        remove_empty(txn, entry.inode, &self.at.path).await?;
        remove_name(txn, &slot, self.given.now);
        Ok(MetaReply::Done)
    }
}

impl Operation for RemoveTree<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let (slot, entry) = existing(txn, self.at).await?;
        let row = load_named(txn, entry, &self.at.path).await?;
        match entry.kind {
            EntryKind::Directory => detach_tree(txn, row, self.given.now)?,
            EntryKind::File | EntryKind::Symlink => drop_link(txn, row, self.given.now).await?,
        }
        remove_name(txn, &slot, self.given.now);
        Ok(MetaReply::Done)
    }
}

/// A directory that has lost its name goes to the collector with everything in it.
pub(super) fn detach_tree(
    txn: &mut Transaction,
    mut row: InodeRow,
    now: Nanoseconds,
) -> Result<(), OpError> {
    if let InodeKind::Directory { parent, .. } = &mut row.inode.kind {
        *parent = REMOVED;
    }
    row.inode.links = 0;
    row.name.clear();
    queue_removal(txn, row.inode.id, EntryKind::Directory, now)?;
    Ok(store(txn, &row)?)
}

/// Clears the inode of a directory without names. Having read that it has none, this conflicts
/// with whoever adds one.
pub(super) async fn remove_empty(
    txn: &mut Transaction,
    directory: InodeId,
    path: &str,
) -> Result<(), OpError> {
    let names = KeyRange::prefix(&rows::dentries(directory));
    if !txn.range(&names, 1).await?.is_empty() {
        return Err(MetaError::NotEmpty { path: path.into() }.into());
    }
    clear_directory(txn, directory)?;
    Ok(())
}

pub(super) fn clear_directory(txn: &mut Transaction, directory: InodeId) -> Result<(), KvError> {
    txn.clear(&rows::inode(directory));
    txn.clear(&rows::directory_time(directory));
    Ok(())
}

async fn existing(txn: &mut Transaction, at: &At) -> Result<(Slot, DentryRow), OpError> {
    let slot = slot(txn, at, Last::Keep).await?;
    let entry = slot.found.ok_or_else(|| not_found(&at.path, at.directory))?;
    Ok((slot, entry))
}

fn remove_name(txn: &mut Transaction, slot: &Slot, now: Nanoseconds) {
    txn.clear(&rows::dentry(slot.parent.inode.id, &slot.name));
    touch(txn, slot.parent.inode.id, now);
}
