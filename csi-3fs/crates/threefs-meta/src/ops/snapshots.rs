//! Snapshots of a volume: creation in steps that may be repeated, removal, and the rows that only
//! removed snapshots show. The history is in `history`, reads are in `view`.

mod create;
mod drop;
mod publish;
mod raise;

pub(crate) use create::{
    AbortSnapshot, CurrentFence, ListCreations, MakeSnapshot, StartSnapshot, Started,
};
pub(crate) use drop::{DropHistory, NextRemoved};
pub(crate) use publish::ListFences;
pub(crate) use raise::RaiseEpochs;

use std::collections::BTreeSet;

use threefs_core::fence::VolumeFence;
use threefs_core::ids::InodeId;
use threefs_core::shown::ShownEpochs;
use threefs_kv::{KeyRange, KvError, Operation, Transaction};

use crate::identity::Identity;
use crate::ops::trash::volume_at;
use crate::ops::{OpError, epoch, not_found};
use crate::protocol::{At, MetaError, MetaReply, SnapshotAnswer, SnapshotEntry};
use crate::rows::history::{self as keys, SnapshotRow, VolumeRow};
use crate::rows::{self, InodeRow};

const WHAT: &str = "snapshots";

async fn read_volume(txn: &mut Transaction, volume: InodeId) -> Result<VolumeRow, KvError> {
    let row = rows::read(txn, &keys::volume_snapshots(volume)).await?;
    Ok(row.unwrap_or_default())
}

/// All snapshots of a volume with their numbers, also those that are being removed.
pub(crate) async fn read_snapshots(
    txn: &mut Transaction,
    volume: InodeId,
) -> Result<Vec<(u8, SnapshotRow)>, KvError> {
    let page = txn.range(&KeyRange::prefix(&keys::snapshots(volume)), usize::MAX).await?;
    let decode = |(key, value): &(Vec<u8>, Vec<u8>)| -> Result<_, KvError> {
        Ok((keys::number_of_key(key)?, rows::decode(key, value)?))
    };
    page.iter().map(decode).collect()
}

/// Refuses to remove a volume that has snapshots.
pub(crate) async fn refuse_snapshots(
    txn: &mut Transaction,
    row: &InodeRow,
    path: &str,
) -> Result<(), OpError> {
    let id = row.inode.id;
    if row.inode.quota == Some(id) && !read_snapshots(txn, id).await?.is_empty() {
        return Err(MetaError::NotEmpty { path: path.into() }.into());
    }
    Ok(())
}

/// The current fence of a volume.
async fn fence_of(txn: &mut Transaction, volume: InodeId) -> Result<VolumeFence, KvError> {
    let epoch = epoch::epoch(txn, Some(volume)).await?;
    let mut counts = BTreeSet::new();
    for (_, snapshot) in read_snapshots(txn, volume).await? {
        if !snapshot.removed {
            counts.insert(snapshot.epoch);
        }
    }
    let shown = ShownEpochs { volume: epoch.volume, below: epoch.count, counts };
    Ok(VolumeFence { volume, epoch, shown })
}

/// Hides a snapshot: its name is gone, and its rows are dropped in the background.
async fn hide(
    txn: &mut Transaction,
    volume: InodeId,
    number: u8,
    mut snapshot: SnapshotRow,
) -> Result<(), KvError> {
    txn.clear(&keys::snapshot_name(volume, &snapshot.name));
    snapshot.removed = true;
    txn.set(&keys::removed_snapshot(volume, number), []);
    rows::write(txn, &keys::snapshot(volume, number), &snapshot)?;
    let mut row = read_volume(txn, volume).await?;
    let others = read_snapshots(txn, volume).await?.into_iter();
    row.newest = others.filter(|(_, it)| !it.removed).map(|(_, it)| it.epoch).max();
    rows::write(txn, &keys::volume_snapshots(volume), &row)
}

/// Hides all snapshots of a volume that is removed with a directory above it. Returns whether it has
/// any.
pub(crate) async fn hide_all(txn: &mut Transaction, volume: InodeId) -> Result<bool, KvError> {
    let snapshots = read_snapshots(txn, volume).await?;
    let any = !snapshots.is_empty();
    for (number, snapshot) in snapshots {
        if !snapshot.removed {
            hide(txn, volume, number, snapshot).await?;
        }
    }
    Ok(any)
}

/// `SnapshotChange::Remove`.
pub(crate) struct RemoveSnapshot<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub name: &'a str,
}

impl Operation for RemoveSnapshot<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let volume = volume_at(txn, self.caller, self.at, WHAT).await?.inode.id;
        let number: Option<u8> = rows::read(txn, &keys::snapshot_name(volume, self.name)).await?;
        let absent = || not_found(&format!("snapshot {}", self.name), volume);
        let number = number.ok_or_else(absent)?;
        let snapshot = rows::read(txn, &keys::snapshot(volume, number)).await?;
        hide(txn, volume, number, snapshot.ok_or_else(absent)?).await?;
        Ok(MetaReply::Done)
    }
}

/// `SnapshotQuery::List`.
pub(crate) struct ListSnapshots<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
}

impl Operation for ListSnapshots<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let volume = volume_at(txn, self.caller, self.at, WHAT).await?.inode.id;
        let mut entries = Vec::new();
        for (_, snapshot) in read_snapshots(txn, volume).await? {
            let SnapshotRow { name, epoch, created, bytes, inodes, removed } = snapshot;
            if !removed {
                entries.push((epoch, SnapshotEntry { name, created, bytes, inodes }));
            }
        }
        entries.sort_by_key(|(epoch, _)| *epoch);
        let entries = entries.into_iter().map(|(_, entry)| entry).collect();
        Ok(MetaReply::Snapshot(SnapshotAnswer::List(entries)))
    }
}
