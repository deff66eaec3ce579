//! The trash of a volume: removed files and directories keep their inode until they expire.
//!
//! A volume is a directory with a quota. An inode that loses its last name in a volume with a
//! retention gets a row in the volume's trash, in the same transaction, instead of a row in the
//! queue for garbage collection. It has no link and stays charged with its last name, so the quota
//! bounds the trash. Expiry and purge give it to garbage collection as a removal without a trash
//! does. Removed directories are kept as well: they are the paths of the files that were in them.

mod list;
mod restore;

pub(crate) use list::ListTrash;
pub(crate) use restore::Restore;

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, Operation, Transaction};

use crate::clients::open_files::OpenFiles;
use crate::identity::Identity;
use crate::ops::detach::detach_tree;
use crate::ops::lookup::{FinalSymlink, NameInDirectory, find, not_a_directory};
use crate::ops::{Inputs, OpError, drop_link, store};
use crate::protocol::{
    At, EntryKind, InodeKind, MetaError, MetaReply, Nanoseconds, TRASH_PAGE_MAX, TRASH_SECONDS_MAX,
    TrashId,
};
use crate::rows::{self, InodeRow, REMOVED, TRASH, TrashRow, TrashedDirectoryRow};

/// A name that is being removed.
pub(crate) struct RemovedName<'a> {
    pub parent: InodeId,
    pub name: &'a str,
    pub caller: &'a Identity,
    pub inputs: &'a Inputs,
    pub open_files: &'a OpenFiles,
}

impl<'a> RemovedName<'a> {
    pub(crate) fn new(
        name_in: &'a NameInDirectory,
        caller: &'a Identity,
        inputs: &'a Inputs,
        open_files: &'a OpenFiles,
    ) -> Self {
        let (parent, name) = (name_in.parent.inode.id, name_in.name.as_str());
        Self { parent, name, caller, inputs, open_files }
    }
}

/// Removes one name of anything but a directory. The last one puts it into the trash of its volume.
pub(crate) async fn remove_link(
    txn: &mut Transaction,
    mut row: InodeRow,
    from: &RemovedName<'_>,
) -> Result<(), OpError> {
    let volume = match row.inode.links {
        0 | 1 => keeper(txn, &row, from.inputs).await?,
        _ => None,
    };
    let Some(volume) = volume else {
        return drop_link(txn, row, from.name, from.inputs.now, from.open_files).await;
    };
    put(txn, volume, &row, from)?;
    row.inode.links = 0;
    row.inode.changed = from.inputs.now;
    store(txn, &mut row).await
}

/// Removes the name of a directory, which with its contents goes into the trash of its volume.
/// Returns the directory if it has no trash.
pub(crate) async fn keep_directory(
    txn: &mut Transaction,
    mut row: InodeRow,
    from: &RemovedName<'_>,
) -> Result<Option<InodeRow>, OpError> {
    let Some(volume) = keeper(txn, &row, from.inputs).await? else { return Ok(Some(row)) };
    let id = put(txn, volume, &row, from)?;
    let location = TrashedDirectoryRow { volume, id };
    rows::write(txn, &rows::trashed_directory(row.inode.id), &location)?;
    if let InodeKind::Directory { parent, .. } = &mut row.inode.kind {
        *parent = REMOVED;
    }
    row.inode.links = 0;
    row.inode.changed = from.inputs.now;
    row.name.clear();
    store(txn, &mut row).await?;
    Ok(None)
}

/// The volume that keeps an inode after its removal, if any. Volumes themselves are not kept. While
/// the store is nearly full, nothing is: removals must free space.
async fn keeper(
    txn: &mut Transaction,
    row: &InodeRow,
    inputs: &Inputs,
) -> Result<Option<InodeId>, OpError> {
    let volume = row.inode.quota.filter(|volume| *volume != row.inode.id && row.charged);
    let Some(volume) = volume.filter(|_| inputs.full.is_none()) else { return Ok(None) };
    let quota = rows::read_quota(txn, volume).await?;
    Ok(quota.filter(|quota| quota.trash_seconds > 0).map(|_| volume))
}

fn put(
    txn: &mut Transaction,
    volume: InodeId,
    row: &InodeRow,
    from: &RemovedName<'_>,
) -> Result<TrashId, OpError> {
    let id = TrashId { removed_ms: unix_ms(from.inputs.now), inode: row.inode.id };
    let entry = TrashRow {
        parent: from.parent,
        name: from.name.into(),
        kind: row.kind(),
        removed_by: from.caller.uid,
    };
    rows::write(txn, &rows::trashed(volume, id), &entry)?;
    Ok(id)
}

fn unix_ms(time: Nanoseconds) -> u64 {
    u64::try_from(time.0 / 1_000_000).unwrap_or(0)
}

/// The volume at a location, for root. A credential reaches volumes inside its directory only.
/// `what` is used there, for messages.
pub(crate) async fn volume_at(
    txn: &mut Transaction,
    caller: &Identity,
    at: &At,
    what: &str,
) -> Result<InodeRow, OpError> {
    if !caller.is_root() {
        let reason = format!("only root uses the {what} of a volume");
        return Err(MetaError::NotPermitted { path: at.path.clone(), reason }.into());
    }
    let row = find(txn, caller, at, FinalSymlink::Follow).await?;
    if !row.inode.is_directory() {
        return Err(not_a_directory(at));
    }
    if row.inode.quota != Some(row.inode.id) {
        let reason = format!(
            "it has no quota; only directories with a quota have {what}, so set one first, without \
             limits if there shall be none"
        );
        let (field, value) = ("path".into(), at.path.clone());
        return Err(MetaError::Invalid { field, value, reason }.into());
    }
    Ok(row)
}

/// `TrashChange::Keep`.
pub(crate) struct KeepRemoved<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub seconds: u64,
}

impl Operation for KeepRemoved<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        if self.seconds > TRASH_SECONDS_MAX {
            return Err(MetaError::Invalid {
                field: "seconds".into(),
                value: self.seconds.to_string(),
                reason: format!("removed files are kept for at most {TRASH_SECONDS_MAX} seconds"),
            }
            .into());
        }
        let volume = volume_at(txn, self.caller, self.at, "trash").await?.inode.id;
        if let Some(mut quota) = rows::read_quota(txn, volume).await? {
            quota.trash_seconds = self.seconds;
            rows::write(txn, &rows::quota(volume), &quota)?;
        }
        Ok(MetaReply::Done)
    }
}

/// `TrashChange::Purge`.
pub(crate) struct Purge<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub ids: &'a [TrashId],
    pub open_files: &'a OpenFiles,
    pub inputs: Inputs,
}

impl Operation for Purge<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let volume = volume_at(txn, self.caller, self.at, "trash").await?.inode.id;
        for id in self.ids {
            let key = rows::trashed(volume, *id);
            if let Some(entry) = rows::read::<TrashRow>(txn, &key).await? {
                let context = (self.open_files, self.inputs.now);
                purge(txn, &key, id.inode, &entry, context).await?;
            }
        }
        Ok(MetaReply::Done)
    }
}

/// Gives an entry to garbage collection, as a removal without a trash does.
async fn purge(
    txn: &mut Transaction,
    key: &[u8],
    inode: InodeId,
    entry: &TrashRow,
    (open_files, now): (&OpenFiles, Nanoseconds),
) -> Result<(), OpError> {
    txn.clear(key);
    let Some(row) = rows::read_inode(txn, inode).await? else { return Ok(()) };
    if entry.kind == EntryKind::Directory {
        txn.clear(&rows::trashed_directory(inode));
        return detach_tree(txn, row, now).await;
    }
    drop_link(txn, row, &entry.name, now, open_files).await
}

/// Purges some of the entries of a volume that were removed before a time; returns their number.
pub(crate) async fn purge_before(
    txn: &mut Transaction,
    volume: InodeId,
    end_ms: u64,
    context: (&OpenFiles, Nanoseconds),
) -> Result<usize, OpError> {
    let range = KeyRange::new(rows::trash_of(volume), rows::trash_since(volume, end_ms));
    let page = txn.range(&range, TRASH_PAGE_MAX).await?;
    for (key, value) in &page {
        let (id, entry) = (rows::trash_id_of_key(key)?, rows::decode(key, value)?);
        purge(txn, key, id.inode, &entry, context).await?;
    }
    Ok(page.len())
}

/// Whether a volume's trash has entries. Conflicts with additions.
pub(crate) async fn has_entries(txn: &mut Transaction, volume: InodeId) -> Result<bool, OpError> {
    let range = KeyRange::prefix(&rows::trash_of(volume));
    Ok(!txn.range(&range, 1).await?.is_empty())
}

/// Purges expired entries of a volume. Returns whether more may have expired.
pub(crate) struct Expire<'a> {
    pub volume: InodeId,
    pub open_files: &'a OpenFiles,
    pub now: Nanoseconds,
}

impl Operation for Expire<'_> {
    type Output = bool;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<bool, OpError> {
        let quota = rows::read_quota(txn, self.volume).await?;
        let seconds = quota.map_or(0, |quota| quota.trash_seconds);
        // Also what was removed in this millisecond if nothing is kept.
        let end_ms = (unix_ms(self.now) + 1).saturating_sub(seconds * 1000);
        let end_ms = if seconds == 0 { u64::MAX } else { end_ms };
        let context = (self.open_files, self.now);
        Ok(purge_before(txn, self.volume, end_ms, context).await? == TRASH_PAGE_MAX)
    }
}

/// The next volume whose trash has entries.
pub(crate) struct NextTrash {
    pub after: InodeId,
}

impl Operation for NextTrash {
    type Output = Option<InodeId>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Option<InodeId>, OpError> {
        let start = rows::trash_of(InodeId(self.after.0.saturating_add(1)));
        let range = KeyRange { start, ..KeyRange::prefix(TRASH) };
        let first = txn.snapshot_range(&range, 1).await?;
        Ok(first.first().map(|(key, _)| rows::inode_of_key(key)).transpose()?)
    }
}
