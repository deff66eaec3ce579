//! History of a volume: what its snapshots show of rows that have changed since.
//!
//! Each volume counts epochs, and a snapshot is the end of one. A row has the epoch of its state.
//! Its first change in a later epoch writes the former state into the history, unless no snapshot
//! shows it. Each change requires that its volume is still in the epoch that its transaction has
//! read, so it is before a snapshot or after it; see `docs/decisions`, 0167.
//!
//! An inode with a history is not collected: when it has lost its last name, it is parked until
//! its last former state is dropped.

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, KvError, Transaction};

use crate::ops::epoch::newest;
use crate::ops::quota::{self, Charge};
use crate::ops::{OpError, epoch, view, visible};
use crate::protocol::{MetaError, Nanoseconds};
use crate::rows::history::{self as keys, FormerInode, FormerValue};
use crate::rows::{self, DentryRow, InodeRow};

/// Whether snapshots of a volume may show a state of epoch `since`, which changes now.
async fn shows(txn: &mut Transaction, volume: InodeId, since: u32) -> Result<bool, KvError> {
    Ok(newest(txn, volume).await?.is_some_and(|newest| since <= newest))
}

/// Prepares a change of an inode: keeps its former state if a snapshot shows it. Sets the epoch of
/// the new one.
pub(crate) async fn keep_inode(txn: &mut Transaction, row: &mut InodeRow) -> Result<(), OpError> {
    let id = row.inode.id;
    refuse_snapshot(id, "")?;
    let epoch = epoch::epoch(txn, row.inode.quota).await?;
    let (Some(volume), true) = (row.inode.quota, row.since != epoch.count) else { return Ok(()) };
    row.since = epoch.count;
    // As it is now: this transaction may have changed it, or moved it into the volume.
    let Some(former) = rows::read_inode(txn, id).await? else { return Ok(()) };
    let since = former.since;
    let unchanged = since < epoch.count && former.inode.quota == Some(volume);
    // No name of a snapshot leads to an inode without a name.
    if !unchanged || former.inode.links == 0 || !shows(txn, volume, since).await? {
        return Ok(());
    }
    let truncating = txn.get(&rows::trim(id)).await?.is_some();
    let inode = visible(txn, former.clone()).await?;
    let former = FormerInode { row: InodeRow { inode, ..former }, since, truncating };
    let key = keys::former_inode(id, epoch.count);
    let value = postcard::to_allocvec(&former)
        .map_err(|error| KvError::bad_row(&key, error.to_string()))?;
    add(txn, volume, epoch.count, key, value).await
}

/// Prepares a change of a directory's times and links, which are not in its row.
pub(crate) async fn keep_directory(txn: &mut Transaction, id: InodeId) -> Result<(), OpError> {
    refuse_snapshot(id, "")?;
    let Some(mut row) = rows::read_inode(txn, id).await? else { return Ok(()) };
    let before = row.since;
    keep_inode(txn, &mut row).await?;
    if row.since != before {
        row.write(txn)?;
    }
    Ok(())
}

/// Prepares a change of a name: keeps the former entry if a snapshot shows it. Returns the epoch of
/// the new one.
pub(crate) async fn keep_name(
    txn: &mut Transaction,
    directory: InodeId,
    name: &[u8],
) -> Result<u32, OpError> {
    refuse_snapshot(directory, &String::from_utf8_lossy(name))?;
    let volume = rows::read_inode(txn, directory).await?.and_then(|row| row.inode.quota);
    let epoch = epoch::epoch(txn, volume).await?.count;
    let (Some(volume), true) = (volume, epoch > 0) else { return Ok(epoch) };
    let key = rows::dentry(directory, name);
    let Some(value) = txn.get(&key).await? else { return Ok(epoch) };
    let entry = DentryRow::decode(&key, &value)?;
    if entry.since < epoch && shows(txn, volume, entry.since).await? {
        let key = keys::ended(&keys::former_entries(directory, name), epoch);
        add(txn, volume, epoch, key, value).await?;
    }
    Ok(epoch)
}

/// Notes that a file came into a volume. Its writers may have handles of its former volume, which the
/// fence of this one does not stop, until they expire.
pub(crate) fn note_joined(txn: &mut Transaction, volume: InodeId, now: Nanoseconds) {
    txn.set(&keys::joined(volume), now.0.to_le_bytes());
}

/// Refuses a snapshot while handles of former volumes may be in use.
pub(crate) async fn check_joined(
    txn: &mut Transaction,
    volume: InodeId,
    now: Nanoseconds,
    wait_ms: u64,
) -> Result<(), OpError> {
    let key = keys::joined(volume);
    let Some(bytes) = txn.get(&key).await? else { return Ok(()) };
    let bytes = bytes.try_into().map_err(|_| KvError::bad_row(&key, "not a time"))?;
    let since_ms = now.0.saturating_sub(i64::from_le_bytes(bytes)) / 1_000_000;
    // Also if the clock was set back.
    if u64::try_from(since_ms).is_ok_and(|since_ms| since_ms >= wait_ms) {
        return Ok(());
    }
    let detail = format!(
        "a file was moved into the volume, or its quota was set, less than {} s ago; snapshots are \
         possible then",
        wait_ms / 1000
    );
    Err(MetaError::Unavailable { detail }.into())
}

/// An inode to which rows belong.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    pub id: InodeId,
    pub volume: Option<InodeId>,
    /// The epoch of its state, before this change.
    pub since: u32,
}

impl Owner {
    pub(crate) fn of(row: &InodeRow) -> Self {
        Self { id: row.inode.id, volume: row.inode.quota, since: row.since }
    }
}

/// Prepares a change of a row that belongs to an inode, an attribute or a page of written chunks:
/// keeps its former value if a snapshot shows it. `prefix`: of its rows in the history.
pub(crate) async fn keep_value(
    txn: &mut Transaction,
    owner: Owner,
    key: &[u8],
    prefix: Vec<u8>,
) -> Result<(), OpError> {
    let epoch = epoch::epoch(txn, owner.volume).await?.count;
    let (Some(volume), true) = (owner.volume, epoch > 0) else { return Ok(()) };
    let Some(newest) = newest(txn, volume).await? else { return Ok(()) };
    let formers = txn.range(&KeyRange::prefix(&prefix), usize::MAX).await?;
    let since = match formers.last() {
        Some((key, _)) => keys::end_of_key(key)?,
        None => 0,
    };
    if since > newest || !is_shown(txn, owner, newest).await? {
        return Ok(());
    }
    let value = FormerValue { since, value: txn.get(key).await? };
    let key = keys::ended(&prefix, epoch);
    let value =
        postcard::to_allocvec(&value).map_err(|error| KvError::bad_row(&key, error.to_string()))?;
    add(txn, volume, epoch, key, value).await
}

/// Whether the newest snapshot may show an inode.
async fn is_shown(txn: &mut Transaction, owner: Owner, newest: u32) -> Result<bool, OpError> {
    if owner.since <= newest {
        return Ok(true);
    }
    let later = KeyRange {
        start: keys::former_inode(owner.id, newest.saturating_add(1)),
        ..KeyRange::prefix(&keys::former_inodes(owner.id))
    };
    Ok(!txn.range(&later, 1).await?.is_empty())
}

/// Whether snapshots may show former states of an inode.
pub(crate) async fn has_formers(txn: &mut Transaction, id: InodeId) -> Result<bool, KvError> {
    let formers = KeyRange::prefix(&keys::former_inodes(id));
    Ok(!txn.range(&formers, 1).await?.is_empty())
}

/// Adds a row to the history, and charges the volume. Limits are not checked: a removal must not be
/// refused because a snapshot shows what it removes.
async fn add(
    txn: &mut Transaction,
    volume: InodeId,
    end: u32,
    key: Vec<u8>,
    value: Vec<u8>,
) -> Result<(), OpError> {
    let metadata = keys::former_bytes(&key, &value);
    txn.set(&keys::end(volume, end, &key), []);
    txn.set(&key, value);
    let charge = Charge { metadata, ..Charge::default() };
    quota::charge_unbounded(txn, Some(volume), charge).await
}

fn read_only(path: &str) -> OpError {
    MetaError::ReadOnly { path: path.into() }.into()
}

/// Refuses a change of an inode of a snapshot.
pub(crate) fn refuse_snapshot(id: InodeId, path: &str) -> Result<(), OpError> {
    match view::split(id) {
        Some(_) => Err(read_only(path)),
        None => Ok(()),
    }
}
