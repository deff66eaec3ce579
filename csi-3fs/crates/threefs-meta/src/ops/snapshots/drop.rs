//! Rows of the history that no snapshot shows any more, after the removal of a snapshot.

use std::collections::BTreeSet;

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, KvError, Operation, Transaction};

use crate::clients::open_files::OpenFiles;
use crate::ops::detach::queue_directory;
use crate::ops::quota::{self, Charge};
use crate::ops::snapshots::read_snapshots;
use crate::ops::{OpError, history, queue_removed, store};
use crate::protocol::{EntryKind, Nanoseconds};
use crate::rows::history::{self as keys, FormerValue, REMOVED_SNAPSHOTS};
use crate::rows::{self, DentryRow};

/// Rows of the history that one transaction looks at.
const PAGE: usize = 128;

/// The next removed snapshot whose rows are not dropped yet: volume and number.
pub(crate) struct NextRemoved {
    pub after: (InodeId, u8),
}

impl Operation for NextRemoved {
    type Output = Option<(InodeId, u8)>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let (volume, number) = self.after;
        let range = KeyRange::prefix(REMOVED_SNAPSHOTS);
        let range = range.after(&keys::removed_snapshot(volume, number));
        let first = txn.snapshot_range(&range, 1).await?;
        let Some((key, _)) = first.first() else { return Ok(None) };
        Ok(Some((rows::inode_of_key(key)?, keys::number_of_key(key)?)))
    }
}

/// Drops some rows that only a removed snapshot showed, those that ended after it and not after the
/// next one. Returns where to continue; then the number of the snapshot is free.
pub(crate) struct DropHistory<'a> {
    pub volume: InodeId,
    pub number: u8,
    pub after: &'a [u8],
    pub open_files: &'a OpenFiles,
    pub now: Nanoseconds,
}

impl Operation for DropHistory<'_> {
    type Output = Option<Vec<u8>>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let volume = self.volume;
        let snapshots = read_snapshots(txn, volume).await?;
        let removed = snapshots.iter().find(|(number, row)| *number == self.number && row.removed);
        let Some((_, removed)) = removed else { return Ok(None) };
        let shown: BTreeSet<u32> =
            snapshots.iter().filter(|(_, it)| !it.removed).map(|(_, it)| it.epoch).collect();
        let next = shown.range(removed.epoch..).next().copied();
        let end = next.map_or_else(
            || KeyRange::prefix(&[keys::ENDS, &volume.0.to_be_bytes()].concat()).end,
            |next| keys::ends_from(volume, next.saturating_add(1)),
        );
        let mut range =
            KeyRange::new(keys::ends_from(volume, removed.epoch.saturating_add(1)), end);
        if !self.after.is_empty() {
            range = range.after(self.after);
        }
        let page = txn.range(&range, PAGE).await?;
        for (index, _) in &page {
            let key = keys::key_of_end(index)?.to_vec();
            if let Some(value) = txn.get(&key).await?
                && !is_shown(&key, &value, &shown)?
            {
                self.drop_row(txn, index, &key, &value).await?;
            }
        }
        match page.last() {
            Some((last, _)) if page.len() == PAGE => Ok(Some(last.clone())),
            _ => {
                txn.clear(&keys::snapshot(volume, self.number));
                txn.clear(&keys::removed_snapshot(volume, self.number));
                Ok(None)
            }
        }
    }
}

/// Whether a snapshot shows a row of the history.
fn is_shown(key: &[u8], value: &[u8], shown: &BTreeSet<u32>) -> Result<bool, KvError> {
    let since = match key.get(..4).unwrap_or_default() {
        keys::FORMER_INODES => keys::decode_former(key, value)?.since,
        keys::FORMER_NAMES => DentryRow::decode(key, value)?.since,
        _ => rows::decode::<FormerValue>(key, value)?.since,
    };
    let end = keys::end_of_key(key)?;
    Ok(since < end && shown.range(since..end).next().is_some())
}

impl DropHistory<'_> {
    async fn drop_row(
        &self,
        txn: &mut Transaction,
        index: &[u8],
        key: &[u8],
        value: &[u8],
    ) -> Result<(), OpError> {
        txn.clear(index);
        txn.clear(key);
        let metadata = -keys::former_bytes(key, value);
        let charge = Charge { metadata, ..Charge::default() };
        quota::charge(txn, Some(self.volume), charge).await?;
        match key.starts_with(keys::FORMER_INODES) {
            true => self.release(txn, rows::inode_of_key(key)?).await,
            false => Ok(()),
        }
    }

    /// Gives an inode without a name to garbage collection once no snapshot shows it.
    async fn release(&self, txn: &mut Transaction, id: InodeId) -> Result<(), OpError> {
        if history::has_formers(txn, id).await? {
            return Ok(());
        }
        let row = rows::read_inode(txn, id).await?.filter(|row| row.parked);
        let Some(mut row) = row else { return Ok(()) };
        row.parked = false;
        match row.kind() {
            EntryKind::Directory => queue_directory(txn, &mut row, self.now).await,
            _ => {
                queue_removed(txn, &mut row, self.open_files).await?;
                store(txn, &mut row).await
            }
        }
    }
}
