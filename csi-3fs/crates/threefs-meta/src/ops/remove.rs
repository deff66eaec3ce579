//! Removes names, empty directories and whole trees.

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, Operation, Transaction};

use super::quota;
use super::walk::{Last, Slot, slot};
use super::{
    Given, OpError, count_subdirectories, drop_link, load_named, not_found, queue, store, touch,
};
use crate::holds::Holds;
use crate::identity::Identity;
use crate::protocol::{At, EntryKind, InodeKind, MetaError, MetaReply, Nanoseconds};
use crate::rows::{self, DentryRow, InodeRow, REMOVED, RemovalRow};

/// `MetaChange::Unlink`.
pub(crate) struct Unlink<'a> {
    pub who: &'a Identity,
    pub at: &'a At,
    pub holds: &'a Holds,
    pub given: Given,
}

/// `MetaChange::RemoveDirectory`.
pub(crate) struct RemoveDirectory<'a> {
    pub who: &'a Identity,
    pub at: &'a At,
    pub given: Given,
}

/// `MetaChange::RemoveTree`.
pub(crate) struct RemoveTree<'a> {
    pub who: &'a Identity,
    pub at: &'a At,
    pub holds: &'a Holds,
    pub given: Given,
}

impl Operation for Unlink<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let (slot, entry, row) = existing(txn, self.who, self.at).await?;
        if entry.kind == EntryKind::Directory {
            return Err(MetaError::IsADirectory { path: self.at.path.clone() }.into());
        }
        drop_link(txn, row, &slot.name, self.given.now, self.holds).await?;
        remove_name(txn, &slot, self.given.now);
        Ok(MetaReply::Done)
    }
}

impl Operation for RemoveDirectory<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let (slot, entry, row) = existing(txn, self.who, self.at).await?;
        if entry.kind != EntryKind::Directory {
            return Err(MetaError::NotADirectory { path: self.at.path.clone() }.into());
        }
        remove_empty(txn, &row, &self.at.path).await?;
        count_subdirectories(txn, slot.parent.inode.id, -1);
        remove_name(txn, &slot, self.given.now);
        Ok(MetaReply::Done)
    }
}

impl Operation for RemoveTree<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let (slot, entry, row) = existing(txn, self.who, self.at).await?;
        match entry.kind {
            EntryKind::Directory => {
                // What is below it is not asked one by one, so only root may.
                if !self.who.is_root() {
                    let reason = "only root removes a tree in one instant".into();
                    let path = self.at.path.clone();
                    return Err(MetaError::NotPermitted { path, reason }.into());
                }
                detach_tree(txn, row, self.given.now).await?;
                count_subdirectories(txn, slot.parent.inode.id, -1);
            }
            _ => {
                drop_link(txn, row, &slot.name, self.given.now, self.holds).await?;
            }
        }
        remove_name(txn, &slot, self.given.now);
        Ok(MetaReply::Done)
    }
}

/// A directory that has lost its name goes to the collector with everything in it.
pub(super) async fn detach_tree(
    txn: &mut Transaction,
    mut row: InodeRow,
    now: Nanoseconds,
) -> Result<(), OpError> {
    quota::detach(txn, &row).await?;
    row.charged = false;
    if let InodeKind::Directory { parent, .. } = &mut row.inode.kind {
        *parent = REMOVED;
    }
    row.inode.links = 0;
    row.name.clear();
    let (inode, kind, holders) = (row.inode.id, EntryKind::Directory, Vec::new());
    row.inode.changed = now;
    queue(txn, rows::REMOVALS, &RemovalRow { inode, kind, life: 0, holders })?;
    Ok(store(txn, &mut row)?)
}

/// Clears the inode of a directory without names. Having read that it has none, this conflicts
/// with whoever adds one.
pub(super) async fn remove_empty(
    txn: &mut Transaction,
    row: &InodeRow,
    path: &str,
) -> Result<(), OpError> {
    let names = KeyRange::prefix(&rows::dentries(row.inode.id));
    if !txn.range(&names, 1).await?.is_empty() {
        return Err(MetaError::NotEmpty { path: path.into() }.into());
    }
    quota::detach(txn, row).await?;
    clear_directory(txn, row.inode.id);
    Ok(())
}

pub(super) fn clear_directory(txn: &mut Transaction, directory: InodeId) {
    txn.clear(&rows::inode(directory));
    txn.clear(&rows::directory_time(directory));
    txn.clear(&rows::subdirectories(directory));
    txn.clear_range(KeyRange::prefix(&rows::attributes(directory)));
    quota::clear(txn, directory);
}

/// A name that is there and that the caller may remove, with what it names.
async fn existing(
    txn: &mut Transaction,
    who: &Identity,
    at: &At,
) -> Result<(Slot, DentryRow, InodeRow), OpError> {
    let slot = slot(txn, who, at, Last::Keep).await?;
    let entry = slot.found.ok_or_else(|| not_found(&at.path, at.directory))?;
    slot.check(who, at)?;
    let row = load_named(txn, entry, &at.path).await?;
    who.check_sticky(&slot.parent.inode, &row.inode, &at.path)?;
    Ok((slot, entry, row))
}

fn remove_name(txn: &mut Transaction, slot: &Slot, now: Nanoseconds) {
    txn.clear(&rows::dentry(slot.parent.inode.id, &slot.name));
    touch(txn, slot.parent.inode.id, now);
}
