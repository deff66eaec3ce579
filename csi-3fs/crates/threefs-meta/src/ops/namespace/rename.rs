//! Renames: moves a name and replaces an existing target atomically.

use threefs_core::ids::InodeId;
use threefs_kv::{Operation, Transaction};

use crate::clients::open_files::OpenFiles;
use crate::identity::Identity;
use crate::ops::lookup::{FinalSymlink, NameInDirectory, lookup_name};
use crate::ops::namespace::remove::remove_empty;
use crate::ops::quota;
use crate::ops::trash::{RemovedName, remove_link};
use crate::ops::{
    Inputs, OpError, count_subdirectories, history, load, load_named, names, not_found,
    refuse_snapshot, store, touch, visible,
};
use crate::permission::WRITE;
use crate::protocol::{At, EntryKind, InodeKind, MetaError, MetaReply, ROOT, RenameMode};
use crate::rows::{DentryRow, InodeRow, REMOVED};

/// `MetaChange::Rename`.
pub(crate) struct Rename<'a> {
    pub caller: &'a Identity,
    pub from: &'a At,
    pub to: &'a At,
    pub mode: RenameMode,
    pub open_files: &'a OpenFiles,
    pub inputs: Inputs,
}

/// The source or the target of a rename.
struct End<'a> {
    name_in: &'a NameInDirectory,
    at: &'a At,
}

impl Operation for Rename<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let from = lookup_name(txn, self.caller, self.from, FinalSymlink::Keep).await?;
        let to = lookup_name(txn, self.caller, self.to, FinalSymlink::Keep).await?;
        let entry = from.entry.ok_or_else(|| not_found(&self.from.path, self.from.directory))?;
        from.check(self.caller, self.from)?;
        to.check(self.caller, self.to)?;
        refuse_snapshot(entry.inode, &self.from.path)?;
        if let Some(there) = to.entry {
            refuse_snapshot(there.inode, &self.to.path)?;
        }
        let row = load_named(txn, entry, &self.from.path).await?;
        let (source, destination) =
            (End { name_in: &from, at: self.from }, End { name_in: &to, at: self.to });
        self.check_mover(&source, &row)?;
        match (to.entry, self.mode) {
            (Some(_), RenameMode::NoReplace) => {
                return Err(MetaError::Exists { path: self.to.path.clone() }.into());
            }
            (None, RenameMode::Exchange) => {
                return Err(not_found(&self.to.path, self.to.directory));
            }
            (Some(there), _) if there.inode == entry.inode => {
                // The same name, or two names of one file: a no-op in POSIX.
                return Ok(MetaReply::Inode(visible(txn, row).await?));
            }
            (Some(there), RenameMode::Exchange) => {
                let other = load_named(txn, there, &self.to.path).await?;
                self.check_mover(&destination, &other)?;
                self.move_inode(txn, other, there, &destination, &source).await?;
            }
            (Some(there), _) => {
                if entry.kind == EntryKind::Directory {
                    self.refuse_circle(txn, entry.inode, to.parent.inode.id, self.to).await?;
                }
                self.replace(txn, entry, there, &to).await?;
                names::set(txn, from.parent.inode.id, &from.name, None).await?;
            }
            (None, _) => names::set(txn, from.parent.inode.id, &from.name, None).await?,
        }
        let row = self.move_inode(txn, row, entry, &source, &destination).await?;
        touch(txn, from.parent.inode.id, self.inputs.now).await?;
        touch(txn, to.parent.inode.id, self.inputs.now).await?;
        Ok(MetaReply::Inode(visible(txn, row).await?))
    }
}

impl Rename<'_> {
    /// Moving a directory to another parent changes its `..`, which requires write permission on
    /// it.
    fn check_mover(&self, resolved: &End<'_>, row: &InodeRow) -> Result<(), OpError> {
        self.caller.check_sticky(&resolved.name_in.parent.inode, &row.inode, &resolved.at.path)?;
        Ok(())
    }

    /// Gives an inode its new name.
    async fn move_inode(
        &self,
        txn: &mut Transaction,
        mut row: InodeRow,
        entry: DentryRow,
        source: &End<'_>,
        destination: &End<'_>,
    ) -> Result<InodeRow, OpError> {
        let (old_parent, new_parent) =
            (&source.name_in.parent.inode, &destination.name_in.parent.inode);
        if entry.kind == EntryKind::Directory && old_parent.id != new_parent.id {
            self.refuse_circle(txn, entry.inode, new_parent.id, destination.at).await?;
            if !self.caller.owns(&row.inode) {
                self.caller.check(&row.inode, WRITE, &source.at.path)?;
            }
            count_subdirectories(txn, old_parent.id, -1).await?;
            count_subdirectories(txn, new_parent.id, 1).await?;
        }
        let (path, context) = (&destination.at.path, self.inputs.recount_context());
        let old = row.inode.quota;
        quota::move_to(txn, &mut row, new_parent.quota, path, &context).await?;
        if let (EntryKind::File, Some(volume)) = (entry.kind, row.inode.quota)
            && old != row.inode.quota
        {
            history::note_joined(txn, volume, self.inputs.now);
        }
        names::set(txn, new_parent.id, &destination.name_in.name, Some(&entry)).await?;
        if let InodeKind::Directory { parent, .. } = &mut row.inode.kind {
            *parent = new_parent.id;
            row.name.clone_from(&destination.name_in.name);
        }
        row.inode.changed = self.inputs.now;
        let longer =
            quota::name_bytes(&destination.name_in.name) - quota::name_bytes(&source.name_in.name);
        quota::charge_metadata(txn, &mut row, longer).await?;
        store(txn, &mut row).await?;
        Ok(row)
    }

    /// Refuses to move a directory below itself. Reads every directory from the target up to the
    /// root, so a concurrent move of one of them conflicts.
    async fn refuse_circle(
        &self,
        txn: &mut Transaction,
        directory: InodeId,
        new_parent: InodeId,
        at: &At,
    ) -> Result<(), OpError> {
        let mut above = new_parent;
        while above != ROOT {
            if above == directory {
                return Err(MetaError::Invalid {
                    field: "to".into(),
                    value: at.path.clone(),
                    reason: "a directory cannot be moved below itself".into(),
                }
                .into());
            }
            let row = load(txn, above, &at.path).await?;
            above = match row.parent() {
                Some(parent) if parent != REMOVED => parent,
                _ => return Err(not_found(&at.path, above)),
            };
        }
        Ok(())
    }

    async fn replace(
        &self,
        txn: &mut Transaction,
        entry: DentryRow,
        there: DentryRow,
        to: &NameInDirectory,
    ) -> Result<(), OpError> {
        let path = || self.to.path.clone();
        let target = load_named(txn, there, &self.to.path).await?;
        self.caller.check_sticky(&to.parent.inode, &target.inode, &self.to.path)?;
        let from = RemovedName::new(to, self.caller, &self.inputs, self.open_files);
        match (entry.kind, there.kind) {
            (EntryKind::Directory, EntryKind::Directory) => {
                remove_empty(txn, target, &self.to.path, &from).await?;
                count_subdirectories(txn, to.parent.inode.id, -1).await?;
                Ok(())
            }
            (EntryKind::Directory, _) => Err(MetaError::NotADirectory { path: path() }.into()),
            (_, EntryKind::Directory) => Err(MetaError::IsADirectory { path: path() }.into()),
            _ => remove_link(txn, target, &from).await,
        }
    }
}
