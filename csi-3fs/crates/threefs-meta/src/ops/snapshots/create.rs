//! Creation of a snapshot: its first and last step, and giving up between them.

use std::sync::atomic::AtomicU64;

use threefs_core::fence::VolumeFence;
use threefs_core::ids::{Epoch, InodeId};
use threefs_kv::{KeyRange, KvError, Operation, Transaction};

use crate::identity::Identity;
use crate::ops::dedup::stored_reply;
use crate::ops::quota::snapshot_use;
use crate::ops::services::require_all_know_snapshots;
use crate::ops::snapshots::{WHAT, fence_of, read_snapshots, read_volume};
use crate::ops::trash::volume_at;
use crate::ops::{OpError, epoch, history, view};
use crate::protocol::{
    At, MetaError, MetaReply, NAME_BYTES_MAX, Nanoseconds, RequestId, SNAPSHOTS_MAX,
    SNAPSHOTS_NAME, SnapshotAnswer, SnapshotEntry,
};
use crate::rows::history::{self as keys, Creation, SnapshotRow};
use crate::rows::{self, NEXT_INODE, SCHEMA, SCHEMA_WITH_SNAPSHOTS};

/// Result of the first step of `SnapshotChange::Create`.
pub(crate) enum Started {
    /// The first snapshot of the tree: mgmtd must know first that there are snapshots.
    NotEnabled,
    /// The request was executed earlier.
    Answered(MetaReply),
    /// The fence that must be raised before the last step.
    Fence(VolumeFence),
}

/// The first step of `SnapshotChange::Create`. A retry of the request continues its creation.
pub(crate) struct StartSnapshot<'a> {
    pub floor: &'a AtomicU64,
    pub caller: &'a Identity,
    pub at: &'a At,
    pub name: &'a str,
    pub id: RequestId,
    pub now: Nanoseconds,
    /// How long handles of former volumes of a file may be in use.
    pub wait_ms: u64,
    /// mgmtd has stored that there are snapshots.
    pub enabled: bool,
}

impl Operation for StartSnapshot<'_> {
    type Output = Started;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Started, OpError> {
        if let Some(reply) = stored_reply(txn, self.id, self.floor).await? {
            return Ok(Started::Answered(reply));
        }
        let volume = volume_at(txn, self.caller, self.at, WHAT).await?.inode.id;
        check_name(self.name)?;
        check_free(txn, volume, self.name).await?;
        history::check_joined(txn, volume, self.now, self.wait_ms).await?;
        let mut row = read_volume(txn, volume).await?;
        let mut fence = fence_of(txn, volume).await?;
        fence.epoch = match &row.creating {
            Some(creation) if is_same(creation.request, self.id) => creation.next,
            Some(_) => {
                let detail = format!("another snapshot of `{}` is being created", self.at.path);
                return Err(MetaError::Unavailable { detail }.into());
            }
            None => {
                check_numbers(txn).await?;
                if rows::read(txn, SCHEMA).await? != Some(SCHEMA_WITH_SNAPSHOTS) {
                    // Again once mgmtd registers no service of an earlier release any more.
                    require_all_know_snapshots(txn).await?;
                    if !self.enabled {
                        return Ok(Started::NotEnabled);
                    }
                    rows::write(txn, SCHEMA, &SCHEMA_WITH_SNAPSHOTS)?;
                }
                let next = next_epoch(txn, fence.epoch).await?;
                row.creating = Some(Creation { request: self.id, next });
                rows::write(txn, &keys::volume_snapshots(volume), &row)?;
                next
            }
        };
        fence.shown.volume = fence.epoch.volume;
        Ok(Started::Fence(fence))
    }
}

fn is_same(request: RequestId, id: RequestId) -> bool {
    (request.client, request.sequence) == (id.client, id.sequence)
}

/// The epoch that follows. A volume gets its number with its first one.
async fn next_epoch(txn: &mut Transaction, epoch: Epoch) -> Result<Epoch, OpError> {
    let exhausted = || MetaError::NoSpace { detail: "no epoch is left".into() };
    if epoch.volume == 0 {
        let last: u32 = rows::read(txn, keys::VOLUME_NUMBER).await?.unwrap_or_default();
        let number = last.checked_add(1).filter(|it| i32::try_from(*it).is_ok());
        let number = number.ok_or_else(exhausted)?;
        rows::write(txn, keys::VOLUME_NUMBER, &number)?;
        return Ok(Epoch::new(number, 1));
    }
    let count = epoch.count.checked_add(1).filter(|count| *count < u32::MAX);
    Ok(Epoch::new(epoch.volume, count.ok_or_else(exhausted)?))
}

/// Refuses snapshots of a tree whose inode numbers have a bit of those in snapshots.
async fn check_numbers(txn: &mut Transaction) -> Result<(), OpError> {
    let value = txn.snapshot_get(NEXT_INODE).await?;
    let next: Option<u64> = value.map(|value| rows::decode(NEXT_INODE, &value)).transpose()?;
    if next.is_some_and(|next| next > view::INODES_MAX) {
        let detail = "inode numbers from 2^55 on have no snapshots; the store was adopted 8 times";
        return Err(MetaError::NoSpace { detail: detail.into() }.into());
    }
    Ok(())
}

fn check_name(name: &str) -> Result<(), MetaError> {
    if name.len() > NAME_BYTES_MAX {
        return Err(MetaError::NameTooLong { name: name.chars().take(40).collect() });
    }
    if name.is_empty() || [".", ".."].contains(&name) || name.contains(['/', '\0']) {
        let (field, value) = ("name".into(), name.escape_debug().to_string());
        let reason = "the name of a snapshot is a file name".into();
        return Err(MetaError::Invalid { field, value, reason });
    }
    Ok(())
}

/// Refuses a volume that has a snapshot with this name, too many, or a real entry in their place.
async fn check_free(txn: &mut Transaction, volume: InodeId, name: &str) -> Result<(), OpError> {
    if txn.get(&keys::snapshot_name(volume, name)).await?.is_some() {
        return Err(MetaError::Exists { path: name.into() }.into());
    }
    if txn.get(&rows::dentry(volume, SNAPSHOTS_NAME)).await?.is_some() {
        let reason = format!("the volume has an entry `{SNAPSHOTS_NAME}`, rename it first");
        let (field, value) = ("path".into(), SNAPSHOTS_NAME.into());
        return Err(MetaError::Invalid { field, value, reason }.into());
    }
    if read_snapshots(txn, volume).await?.len() >= SNAPSHOTS_MAX {
        let detail = format!("a volume has at most {SNAPSHOTS_MAX} snapshots, remove one first");
        return Err(MetaError::NoSpace { detail }.into());
    }
    Ok(())
}

/// The last step of `SnapshotChange::Create`, once the fence is raised: the moment of the snapshot.
pub(crate) struct MakeSnapshot<'a> {
    pub volume: InodeId,
    pub name: &'a str,
    pub id: RequestId,
    pub now: Nanoseconds,
    pub wait_ms: u64,
}

impl Operation for MakeSnapshot<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let volume = self.volume;
        let mut row = read_volume(txn, volume).await?;
        let Some(creation) = row.creating.take_if(|it| is_same(it.request, self.id)) else {
            let detail = "the creation of the snapshot took too long and was given up".into();
            return Err(MetaError::Unavailable { detail }.into());
        };
        check_free(txn, volume, self.name).await?;
        history::check_joined(txn, volume, self.now, self.wait_ms).await?;
        let number = free_number(txn, volume, row.last_number).await?;
        end_epoch(txn, volume, creation.next).await?;
        let epoch = creation.next.count - 1;
        let (bytes, inodes) = snapshot_use(txn, volume).await?;
        let snapshot = SnapshotRow {
            name: self.name.into(),
            epoch,
            created: self.now,
            bytes: u64::try_from(bytes).unwrap_or(0),
            inodes: u64::try_from(inodes).unwrap_or(0),
            removed: false,
        };
        rows::write(txn, &keys::snapshot(volume, number), &snapshot)?;
        rows::write(txn, &keys::snapshot_name(volume, self.name), &number)?;
        (row.last_number, row.newest) = (number, Some(epoch));
        rows::write(txn, &keys::volume_snapshots(volume), &row)?;
        let SnapshotRow { name, created, bytes, inodes, .. } = snapshot;
        let entry = SnapshotEntry { name, created, bytes, inodes };
        Ok(MetaReply::Snapshot(SnapshotAnswer::Created(entry)))
    }
}

/// The first free number after the one that was used last, so that a number is used again late.
async fn free_number(txn: &mut Transaction, volume: InodeId, last: u8) -> Result<u8, OpError> {
    let used = read_snapshots(txn, volume).await?;
    let mut number = last;
    for _ in 0..SNAPSHOTS_MAX {
        number = number % SNAPSHOTS_MAX as u8 + 1;
        if !used.iter().any(|(it, _)| *it == number) {
            return Ok(number);
        }
    }
    let detail = format!("a volume has at most {SNAPSHOTS_MAX} snapshots");
    Err(MetaError::NoSpace { detail }.into())
}

/// Raises the counter of a volume. Reads it, so that two raises conflict.
pub(super) async fn end_epoch(
    txn: &mut Transaction,
    volume: InodeId,
    next: Epoch,
) -> Result<(), KvError> {
    let key = keys::epoch(volume);
    let current = match txn.get(&key).await? {
        None => 0,
        Some(bytes) => i64::from_le_bytes(
            bytes.try_into().map_err(|_| KvError::bad_row(&key, "not a counter"))?,
        ),
    };
    let more = keys::counter_of_epoch(next).saturating_sub(current);
    if more > 0 {
        txn.bounded_add(&key, more, i64::MAX);
    }
    Ok(())
}

/// Gives up a creation. Services may refuse updates of the old epoch already, so it ends without a
/// snapshot. Changes nothing if the snapshot has been made.
pub(crate) struct AbortSnapshot {
    pub volume: InodeId,
    pub id: RequestId,
}

impl Operation for AbortSnapshot {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        let mut row = read_volume(txn, self.volume).await?;
        let Some(creation) = row.creating.take_if(|it| is_same(it.request, self.id)) else {
            return Ok(());
        };
        end_epoch(txn, self.volume, creation.next).await?;
        Ok(rows::write(txn, &keys::volume_snapshots(self.volume), &row)?)
    }
}

/// Creations in progress.
pub(crate) struct ListCreations;

impl Operation for ListCreations {
    type Output = Vec<(InodeId, RequestId)>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let mut creations = Vec::new();
        let range = KeyRange::prefix(keys::VOLUMES);
        for (key, value) in txn.snapshot_range(&range, usize::MAX).await? {
            let row: keys::VolumeRow = rows::decode(&key, &value)?;
            if let Some(creation) = row.creating {
                creations.push((rows::inode_of_key(&key)?, creation.request));
            }
        }
        Ok(creations)
    }
}

/// The fence of a volume, to publish it again.
pub(crate) struct CurrentFence(pub InodeId);

impl Operation for CurrentFence {
    type Output = VolumeFence;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<VolumeFence, OpError> {
        epoch::epoch(txn, Some(self.0)).await?;
        Ok(fence_of(txn, self.0).await?)
    }
}
