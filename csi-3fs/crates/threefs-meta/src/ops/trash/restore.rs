//! Restoring an entry of a trash: it gets its former name back, or another one.

use threefs_core::ids::InodeId;
use threefs_kv::{Operation, Transaction};

use crate::identity::Identity;
use crate::ops::lookup::{FinalSymlink, lookup_name, not_a_directory};
use crate::ops::quota;
use crate::ops::trash::list::{DEPTH_MAX, removed_from};
use crate::ops::trash::volume_at;
use crate::ops::{
    Inputs, OpError, count_subdirectories, load, load_named, names, not_found, store, touch,
    visible,
};
use crate::protocol::{At, EntryKind, InodeKind, MetaError, MetaReply, ROOT, TrashId};
use crate::rows::{self, DentryRow, InodeRow, REMOVED, TrashRow};

/// `TrashChange::Restore`.
pub(crate) struct Restore<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub id: TrashId,
    pub to: Option<&'a At>,
    pub inputs: Inputs,
}

impl Operation for Restore<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let volume = volume_at(txn, self.caller, self.at, "trash").await?.inode.id;
        let entry: Option<TrashRow> = rows::read(txn, &rows::trashed(volume, self.id)).await?;
        let Some(entry) = entry else {
            let TrashId { removed_ms, inode } = self.id;
            return Err(not_found(&format!("entry {removed_ms}-{} of the trash", inode.0), inode));
        };
        let place = match self.to {
            Some(to) => {
                let name_in = lookup_name(txn, self.caller, to, FinalSymlink::Keep).await?;
                if name_in.entry.is_some() {
                    return Err(MetaError::Exists { path: to.path.clone() }.into());
                }
                self.check_attached(txn, name_in.parent.inode.id, to).await?;
                Place { parent: name_in.parent, name: name_in.name }
            }
            None => {
                let parent = self.former_directory(txn, volume, entry.parent).await?;
                Place { parent, name: entry.name.clone() }
            }
        };
        let row = self.attach(txn, volume, self.id, &entry, &place).await?;
        Ok(MetaReply::Inode(visible(txn, row).await?))
    }
}

/// A name in a directory.
struct Place {
    parent: InodeRow,
    name: String,
}

impl Restore<'_> {
    /// The directory that an entry was in. If it is in the trash itself, it is restored, as those
    /// above it; a directory that has its name now takes its place.
    async fn former_directory(
        &self,
        txn: &mut Transaction,
        volume: InodeId,
        directory: InodeId,
    ) -> Result<InodeRow, OpError> {
        let mut removed = Vec::new();
        let mut at = directory;
        for depth in 0.. {
            let row = rows::read_inode(txn, at).await?.filter(|_| depth < DEPTH_MAX);
            let row = row.ok_or_else(directory_is_gone)?;
            at = match row.parent() {
                None => return Err(directory_is_gone()),
                Some(REMOVED) => {
                    let location = removed_from(txn, volume, at).await?;
                    let (id, entry) = location.ok_or_else(directory_is_gone)?;
                    let parent = entry.parent;
                    removed.push((id, entry));
                    parent
                }
                Some(_) if at == ROOT => break,
                Some(parent) => parent,
            };
        }
        // The directory that has the name of a removed one.
        let mut substitute: Option<(InodeId, InodeRow)> = None;
        for (id, entry) in removed.into_iter().rev() {
            let parent = match substitute.take() {
                None => load(txn, entry.parent, &entry.name).await?,
                Some((of, row)) if of == entry.parent => row,
                Some(_) => return Err(MetaError::Exists { path: entry.name }.into()),
            };
            match names::get(txn, parent.inode.id, &entry.name).await? {
                Some(there) if there.kind == EntryKind::Directory => {
                    let row = load_named(txn, there, &entry.name).await?;
                    substitute = Some((id.inode, row));
                }
                Some(_) => return Err(MetaError::Exists { path: entry.name }.into()),
                None => {
                    let place = Place { parent, name: entry.name.clone() };
                    self.attach(txn, volume, id, &entry, &place).await?;
                }
            }
        }
        match substitute {
            Some((of, row)) if of == directory => Ok(row),
            Some((_, row)) => Err(MetaError::Exists { path: row.name }.into()),
            None => load(txn, directory, "").await,
        }
    }

    /// Refuses a directory that has been removed, or that is below a removed one. Reads every
    /// directory up to the root, so a concurrent move or removal of one of them conflicts.
    async fn check_attached(
        &self,
        txn: &mut Transaction,
        directory: InodeId,
        to: &At,
    ) -> Result<(), OpError> {
        let mut at = directory;
        while at != ROOT {
            at = match load(txn, at, &to.path).await?.parent() {
                None => return Err(not_a_directory(to)),
                Some(REMOVED) => return Err(not_found(&to.path, at)),
                Some(parent) => parent,
            };
        }
        Ok(())
    }

    /// Gives an entry a name, and removes it from the trash.
    async fn attach(
        &self,
        txn: &mut Transaction,
        volume: InodeId,
        id: TrashId,
        entry: &TrashRow,
        Place { parent, name }: &Place,
    ) -> Result<InodeRow, OpError> {
        if names::get(txn, parent.inode.id, name).await?.is_some() {
            return Err(MetaError::Exists { path: name.clone() }.into());
        }
        let named = DentryRow::new(id.inode, entry.kind);
        let mut row = load_named(txn, named, name).await?;
        if parent.inode.quota != row.inode.quota {
            let reason = "the directory is not in the volume of the trash".into();
            return Err(MetaError::CrossQuota { path: name.clone(), reason }.into());
        }
        row.inode.links = 1;
        if let InodeKind::Directory { parent: above, .. } = &mut row.inode.kind {
            *above = parent.inode.id;
            row.inode.links = 2;
            row.name.clone_from(name);
            count_subdirectories(txn, parent.inode.id, 1).await?;
            txn.clear(&rows::trashed_directory(id.inode));
        }
        row.inode.changed = self.inputs.now;
        let longer = quota::name_bytes(name) - quota::name_bytes(&entry.name);
        if longer != 0 {
            quota::charge_metadata(txn, &mut row, longer).await?;
        }
        store(txn, &mut row).await?;
        names::set(txn, parent.inode.id, name, Some(&named)).await?;
        touch(txn, parent.inode.id, self.inputs.now).await?;
        txn.clear(&rows::trashed(volume, id));
        Ok(row)
    }
}

fn directory_is_gone() -> OpError {
    let reason = "the directory that it was in is gone; restore it to another path".into();
    MetaError::Invalid { field: "to".into(), value: "(former path)".into(), reason }.into()
}
