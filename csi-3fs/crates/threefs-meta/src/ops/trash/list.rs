//! One page of the trash of a volume, with the paths of its entries.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, Operation, Transaction};

use crate::identity::Identity;
use crate::ops::OpError;
use crate::ops::trash::volume_at;
use crate::protocol::{
    At, EntryKind, MetaReply, PATH_BYTES_MAX, TRASH_PAGE_MAX, TrashAnswer, TrashEntry, TrashId,
};
use crate::rows::{self, REMOVED, TrashRow, TrashedDirectoryRow};

/// Directories on one path.
pub(crate) const DEPTH_MAX: usize = PATH_BYTES_MAX / 2;

/// `TrashQuery::List`.
pub(crate) struct ListTrash<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub after: Option<TrashId>,
}

impl Operation for ListTrash<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let volume = volume_at(txn, self.caller, self.at, "trash").await?.inode.id;
        let seconds = rows::read_quota(txn, volume).await?.map_or(0, |quota| quota.trash_seconds);
        let mut range = KeyRange::prefix(&rows::trash_of(volume));
        if let Some(after) = self.after {
            range = range.after(&rows::trashed(volume, after));
        }
        let mut page = txn.snapshot_range(&range, TRASH_PAGE_MAX + 1).await?;
        let more = page.len() > TRASH_PAGE_MAX;
        page.truncate(TRASH_PAGE_MAX);
        let mut parents = HashMap::new();
        let mut entries = Vec::with_capacity(page.len());
        for (key, value) in &page {
            let id = rows::trash_id_of_key(key)?;
            let TrashRow { parent, name, kind, removed_by } = rows::decode(key, value)?;
            let above = match parents.entry(parent) {
                MapEntry::Occupied(known) => known.into_mut(),
                MapEntry::Vacant(unknown) => {
                    unknown.insert(path_in_volume(txn, volume, parent).await?)
                }
            };
            let path = above.as_ref().map(|above| match above.as_str() {
                "" => name.clone(),
                above => format!("{above}/{name}"),
            });
            let length = rows::read_inode(txn, id.inode).await?.map_or(0, |row| row.inode.length());
            let names = KeyRange::prefix(&rows::dentries(id.inode));
            let empty =
                kind == EntryKind::Directory && txn.snapshot_range(&names, 1).await?.is_empty();
            entries.push(TrashEntry { id, path, name, kind, empty, length, removed_by });
        }
        Ok(MetaReply::Trash(TrashAnswer::Page { seconds, entries, more }))
    }
}

/// The path of a directory below its volume. It, and those above it, may be in the trash.
async fn path_in_volume(
    txn: &mut Transaction,
    volume: InodeId,
    directory: InodeId,
) -> Result<Option<String>, OpError> {
    let (mut names, mut at, mut bytes) = (Vec::new(), directory, 0);
    while at != volume {
        let Some(row) = rows::read_inode(txn, at).await? else { return Ok(None) };
        let (parent, name) = match row.parent() {
            None => return Ok(None),
            Some(REMOVED) => match removed_from(txn, volume, at).await? {
                Some((_, entry)) => (entry.parent, entry.name),
                None => return Ok(None),
            },
            Some(parent) if parent == at => return Ok(None),
            Some(parent) => (parent, row.name),
        };
        bytes += name.len() + 1;
        if bytes > PATH_BYTES_MAX {
            return Ok(None);
        }
        names.push(name);
        at = parent;
    }
    names.reverse();
    Ok(Some(names.join("/")))
}

/// The entry of a removed directory in the trash of a volume.
pub(crate) async fn removed_from(
    txn: &mut Transaction,
    volume: InodeId,
    directory: InodeId,
) -> Result<Option<(TrashId, TrashRow)>, OpError> {
    let location: Option<TrashedDirectoryRow> =
        rows::read(txn, &rows::trashed_directory(directory)).await?;
    // The trash of another volume may belong to another tenant.
    let Some(location) = location.filter(|location| location.volume == volume) else {
        return Ok(None);
    };
    let entry = rows::read(txn, &rows::trashed(volume, location.id)).await?;
    Ok(entry.map(|entry| (location.id, entry)))
}
