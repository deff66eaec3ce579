//! Moves a name, replacing what is at the new place in the same instant.

use threefs_core::ids::InodeId;
use threefs_kv::{Operation, Transaction};

use super::remove::remove_empty;
use super::walk::{Last, slot};
use super::{Given, OpError, drop_link, load, load_named, not_found, store, touch, visible};
use crate::protocol::{At, EntryKind, InodeKind, MetaError, MetaReply, ROOT};
use crate::rows::{self, DentryRow, REMOVED};

/// `MetaChange::Rename`.
pub(crate) struct Rename<'a> {
    pub from: &'a At,
    pub to: &'a At,
    pub no_replace: bool,
    pub given: Given,
}

impl Operation for Rename<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let from = slot(txn, self.from, Last::Keep).await?;
        let to = slot(txn, self.to, Last::Keep).await?;
        let entry = from.found.ok_or_else(|| not_found(&self.from.path, self.from.directory))?;
        let mut row = load_named(txn, entry, &self.from.path).await?;
        if let Some(there) = to.found {
            if self.no_replace {
                return Err(MetaError::Exists { path: self.to.path.clone() }.into());
            }
            if there.inode == entry.inode {
                // The same name, or two names of one file: POSIX says that nothing happens.
                return Ok(MetaReply::Inode(visible(txn, row).await?));
            }
        }
        if entry.kind == EntryKind::Directory {
            self.refuse_circle(txn, entry.inode, to.parent.inode.id).await?;
        }
        if let Some(there) = to.found {
            self.replace(txn, entry, there).await?;
        }
        txn.clear(&rows::dentry(from.parent.inode.id, &from.name));
        rows::write(txn, &rows::dentry(to.parent.inode.id, &to.name), &entry)?;
        if let InodeKind::Directory { parent, .. } = &mut row.inode.kind {
            *parent = to.parent.inode.id;
            row.name = to.name;
        }
        row.inode.changed = self.given.now;
        store(txn, &row)?;
        touch(txn, from.parent.inode.id, self.given.now);
        touch(txn, to.parent.inode.id, self.given.now);
        Ok(MetaReply::Inode(visible(txn, row).await?))
    }
}

impl Rename<'_> {
    /// A directory cannot move below itself. Every directory from the new place up to the root is
    /// read, so a move of one of them meanwhile conflicts.
    async fn refuse_circle(
        &self,
        txn: &mut Transaction,
        moved: InodeId,
        new_parent: InodeId,
    ) -> Result<(), OpError> {
        let mut above = new_parent;
        while above != ROOT {
            if above == moved {
                return Err(MetaError::Invalid {
                    field: "to".into(),
                    value: self.to.path.clone(),
                    reason: "a directory cannot be moved below itself".into(),
                }
                .into());
            }
            let row = load(txn, above, &self.to.path).await?;
            above = match row.parent() {
                Some(parent) if parent != REMOVED => parent,
                _ => return Err(not_found(&self.to.path, above)),
            };
        }
        Ok(())
    }

    async fn replace(
        &self,
        txn: &mut Transaction,
        entry: DentryRow,
        there: DentryRow,
    ) -> Result<(), OpError> {
        let path = || self.to.path.clone();
        match (entry.kind, there.kind) {
            (EntryKind::Directory, EntryKind::Directory) => {
                remove_empty(txn, there.inode, &self.to.path).await
            }
            (EntryKind::Directory, _) => Err(MetaError::NotADirectory { path: path() }.into()),
            (_, EntryKind::Directory) => Err(MetaError::IsADirectory { path: path() }.into()),
            _ => {
                let replaced = load_named(txn, there, &self.to.path).await?;
                drop_link(txn, replaced, self.given.now).await
            }
        }
    }
}
