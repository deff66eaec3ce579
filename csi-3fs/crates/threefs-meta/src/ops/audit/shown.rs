//! The states of files that snapshots show, with the chunks that must exist.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use threefs_core::ids::{Epoch, InodeId};
use threefs_kv::{KeyRange, KvError, Operation, Transaction};

use crate::ops::{OpError, epoch, snapshots, view};
use crate::protocol::{
    AuditAnswer, AuditedFile, BATCH_MAX, EntryKind, InodeKind, MetaReply, SHOWN_FILES_MAX,
    ShownFile,
};
use crate::rows::history as keys;
use crate::rows::{self, InodeRow};

/// `AuditQuery::Shown`.
pub(crate) struct AuditShown {
    pub after: InodeId,
    pub until: InodeId,
}

impl Operation for AuditShown {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let range = KeyRange::prefix(rows::INODES).after(&rows::inode(self.after));
        let page = txn.snapshot_range(&range, BATCH_MAX).await?;
        let (mut files, mut volumes) = (Vec::new(), BTreeMap::new());
        let mut done = self.after;
        for (key, value) in &page {
            let row = InodeRow::decode(key, value)?;
            let id = row.inode.id;
            if id > self.until {
                break;
            }
            let more = states(txn, row, &mut volumes).await?;
            if files.len() + more.len() > SHOWN_FILES_MAX {
                return Ok(MetaReply::Audit(AuditAnswer::Shown { files, until: done }));
            }
            files.extend(more);
            done = id;
        }
        let until = if page.len() < BATCH_MAX { self.until } else { done };
        Ok(MetaReply::Audit(AuditAnswer::Shown { files, until }))
    }
}

/// The snapshots of a volume, by epoch.
struct Snapshots {
    /// Number of the volume in its epochs.
    volume: u32,
    numbers: BTreeMap<u32, u8>,
}

async fn snapshots_of(txn: &mut Transaction, volume: InodeId) -> Result<Snapshots, KvError> {
    let mut numbers = BTreeMap::new();
    for (number, snapshot) in snapshots::read_snapshots(txn, volume).await? {
        if !snapshot.removed {
            numbers.insert(snapshot.epoch, number);
        }
    }
    let volume = match numbers.is_empty() {
        true => 0,
        false => epoch::epoch(txn, Some(volume)).await?.volume,
    };
    Ok(Snapshots { volume, numbers })
}

/// The states of a file that snapshots show.
async fn states(
    txn: &mut Transaction,
    row: InodeRow,
    volumes: &mut BTreeMap<InodeId, Snapshots>,
) -> Result<Vec<ShownFile>, KvError> {
    let (Some(volume), EntryKind::File) = (row.inode.quota, row.kind()) else {
        return Ok(Vec::new());
    };
    let snapshots = match volumes.entry(volume) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(unknown) => unknown.insert(snapshots_of(txn, volume).await?),
    };
    if snapshots.numbers.is_empty() {
        return Ok(Vec::new());
    }
    let mut files = Vec::new();
    let formers = KeyRange::prefix(&keys::former_inodes(row.inode.id));
    for (key, value) in txn.snapshot_range(&formers, usize::MAX).await? {
        let former = keys::decode_former(&key, &value)?;
        let (since, end) = (former.since, keys::end_of_key(&key)?);
        files.extend(shown(former.row, since, end, volume, snapshots));
    }
    if row.inode.links > 0 && !row.dead {
        let since = row.since;
        files.extend(shown(row, since, u32::MAX, volume, snapshots));
    }
    Ok(files)
}

/// A state of a file from an epoch until another, with the snapshots that show it: the first one, as
/// its chunks exist in the others too. With rows of written chunks all of them, as these rows have
/// their own history.
fn shown(
    row: InodeRow,
    since: u32,
    end: u32,
    volume: InodeId,
    snapshots: &Snapshots,
) -> Vec<ShownFile> {
    let InodeKind::File { layout, written, .. } = row.inode.kind else { return Vec::new() };
    let has_chunks = !written.is_empty() || written.has_more();
    if since >= end || !has_chunks {
        return Vec::new();
    }
    let count = if written.has_more() { usize::MAX } else { 1 };
    let numbers = snapshots.numbers.range(since..end).take(count);
    let file = |(count, number): (&u32, &u8)| ShownFile {
        file: AuditedFile {
            inode: view::join(*number, row.inode.id),
            layout: layout.clone(),
            written: written.clone(),
        },
        stored: row.inode.id,
        epoch: Epoch::new(snapshots.volume, *count),
        snapshot: view::join(*number, volume),
    };
    numbers.map(file).collect()
}
