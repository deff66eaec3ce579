//! Reads through a snapshot: inodes, names, attributes and pages of written chunks of its epoch.
//!
//! `threefs_core::snapshot_inode` has the numbers of their inodes. Snapshot number 0 is the directory
//! `.snapshots` of a volume, 255 an empty directory in place of a volume inside the volume.

use std::collections::BTreeMap;

use threefs_core::ids::InodeId;
pub(crate) use threefs_core::snapshot_inode::{INODES_MAX, join, raw, split};
use threefs_kv::{KeyRange, KvError, Transaction};

use crate::ops::{OpError, visible};
use crate::protocol::{EntryKind, Inode, InodeKind, LayoutDefaults, Nanoseconds, SNAPSHOTS_NAME};
use crate::rows::history::{self as keys, FormerValue, SnapshotRow};
use crate::rows::{self, DentryRow, InodeRow, REMOVED};

/// Number of the directory `.snapshots` of a volume.
const ALL: u8 = 0;
/// Number of an empty directory in place of a volume inside the volume.
const EMPTY: u8 = u8::MAX;
/// Rows of the history that are read at once: more than one name has.
const PAGE: usize = if cfg!(test) { 8 } else { 1024 };

/// The directory `.snapshots` of a volume.
pub(crate) fn snapshots_of(volume: InodeId) -> InodeId {
    join(ALL, volume)
}

/// An inode, which may be one of a snapshot: then with the times and links of a directory.
pub(crate) async fn inode(txn: &mut Transaction, id: InodeId) -> Result<Option<InodeRow>, OpError> {
    match split(id) {
        None => Ok(rows::read_inode(txn, id).await?),
        Some((ALL, volume)) => {
            let row = rows::read_inode(txn, volume).await?;
            let row = row.filter(|row| row.inode.quota == Some(volume) && row.inode.links > 0);
            let named = |mut row: InodeRow| {
                row.name = SNAPSHOTS_NAME.into();
                row
            };
            Ok(row.map(|_| named(directory(id, volume, Some(volume)))))
        }
        Some((EMPTY, _)) => Ok(Some(directory(id, REMOVED, None))),
        Some((number, raw)) => {
            let Some((volume, snapshot)) = snapshot_of(txn, number, raw).await? else {
                return Ok(None);
            };
            let row = state(txn, raw, snapshot.epoch).await?;
            let row = row.filter(|row| row.inode.links > 0);
            Ok(row.map(|row| shown(row, number, volume, &snapshot.name)))
        }
    }
}

/// A directory that is not stored.
fn directory(id: InodeId, parent: InodeId, quota: Option<InodeId>) -> InodeRow {
    let time = Nanoseconds(0);
    InodeRow::new(Inode {
        id,
        version: 1,
        kind: InodeKind::Directory { parent, defaults: LayoutDefaults::default() },
        mode: 0o555,
        uid: 0,
        gid: 0,
        links: 2,
        accessed: time,
        modified: time,
        changed: time,
        quota,
    })
}

/// The volume of an inode, and its snapshot with a number.
async fn snapshot_of(
    txn: &mut Transaction,
    number: u8,
    raw: InodeId,
) -> Result<Option<(InodeId, SnapshotRow)>, KvError> {
    // An inode that a snapshot shows keeps its row.
    let volume = rows::read_inode(txn, raw).await?.and_then(|row| row.inode.quota);
    let Some(volume) = volume else { return Ok(None) };
    let snapshot: Option<SnapshotRow> = rows::read(txn, &keys::snapshot(volume, number)).await?;
    Ok(snapshot.filter(|snapshot| !snapshot.removed).map(|snapshot| (volume, snapshot)))
}

/// The epoch that a snapshot of the volume of an inode shows.
pub(crate) async fn epoch_of(
    txn: &mut Transaction,
    number: u8,
    raw: InodeId,
) -> Result<Option<u32>, KvError> {
    Ok(snapshot_of(txn, number, raw).await?.map(|(_, snapshot)| snapshot.epoch))
}

/// An inode at the end of an epoch.
async fn state(
    txn: &mut Transaction,
    raw: InodeId,
    epoch: u32,
) -> Result<Option<InodeRow>, OpError> {
    let current = rows::read_inode(txn, raw).await?;
    if let Some(row) = current.filter(|row| row.since <= epoch) {
        let inode = visible(txn, row.clone()).await?;
        return Ok(Some(InodeRow { inode, ..row }));
    }
    let prefix = keys::former_inodes(raw);
    let Some((key, value)) = first_after(txn, &prefix, epoch).await? else { return Ok(None) };
    let former = keys::decode_former(&key, &value)?;
    Ok((former.since <= epoch).then_some(former.row))
}

/// The first row of the history that ended after an epoch.
async fn first_after(
    txn: &mut Transaction,
    prefix: &[u8],
    epoch: u32,
) -> Result<Option<threefs_kv::Row>, KvError> {
    let start = keys::ended(prefix, epoch.saturating_add(1));
    let range = KeyRange { start, ..KeyRange::prefix(prefix) };
    Ok(txn.range(&range, 1).await?.into_iter().next())
}

/// The inode with its number in the snapshot, and that of its parent.
fn shown(mut row: InodeRow, number: u8, volume: InodeId, snapshot: &str) -> InodeRow {
    let is_root = row.inode.id == volume;
    if is_root {
        row.name = snapshot.into();
    }
    row.inode.id = join(number, row.inode.id);
    if let InodeKind::Directory { parent, .. } = &mut row.inode.kind {
        *parent = if is_root { snapshots_of(volume) } else { join(number, *parent) };
    }
    row
}

/// The entry with a name in a directory, which may be one of a snapshot.
pub(crate) async fn name(
    txn: &mut Transaction,
    directory: InodeId,
    name: &str,
) -> Result<Option<DentryRow>, OpError> {
    let (number, raw) = match split(directory) {
        None => return live_name(txn, directory, name).await,
        Some((EMPTY, _)) => return Ok(None),
        Some((ALL, volume)) => {
            let number: Option<u8> = rows::read(txn, &keys::snapshot_name(volume, name)).await?;
            let root = |number| DentryRow::new(join(number, volume), EntryKind::Directory);
            return Ok(number.map(root));
        }
        Some(split) => split,
    };
    let Some((_, snapshot)) = snapshot_of(txn, number, raw).await? else { return Ok(None) };
    let key = rows::dentry(raw, name);
    let current = txn.get(&key).await?.map(|value| DentryRow::decode(&key, &value)).transpose()?;
    let entry = match current.filter(|entry| entry.since <= snapshot.epoch) {
        Some(entry) => Some(entry),
        None => {
            let prefix = keys::former_entries(raw, name);
            let former = first_after(txn, &prefix, snapshot.epoch).await?;
            let former = former.map(|(key, value)| DentryRow::decode(&key, &value)).transpose()?;
            former.filter(|entry| entry.since <= snapshot.epoch)
        }
    };
    match entry {
        Some(entry) => Ok(Some(entry_in(txn, number, entry).await?)),
        None => Ok(None),
    }
}

/// An entry of the tree. The root of each volume has a name for its snapshots, which is not listed.
async fn live_name(
    txn: &mut Transaction,
    directory: InodeId,
    name: &str,
) -> Result<Option<DentryRow>, OpError> {
    let key = rows::dentry(directory, name);
    if let Some(value) = txn.get(&key).await? {
        return Ok(Some(DentryRow::decode(&key, &value)?));
    }
    if name != SNAPSHOTS_NAME {
        return Ok(None);
    }
    let row = rows::read_inode(txn, directory).await?;
    let is_volume = row.is_some_and(|row| row.inode.quota == Some(directory));
    let all = || DentryRow::new(snapshots_of(directory), EntryKind::Directory);
    Ok(is_volume.then(all))
}

/// The entry with its number in a snapshot.
async fn entry_in(
    txn: &mut Transaction,
    number: u8,
    entry: DentryRow,
) -> Result<DentryRow, KvError> {
    let mut number = number;
    if entry.kind == EntryKind::Directory {
        let key = rows::inode(entry.inode);
        let value = txn.snapshot_get(&key).await?;
        let row = value.map(|value| InodeRow::decode(&key, &value)).transpose()?;
        if row.is_none_or(|row| row.inode.quota == Some(entry.inode)) {
            number = EMPTY;
        }
    }
    Ok(DentryRow::new(join(number, entry.inode), entry.kind))
}

/// Entries of a directory of a snapshot that follow a name, at most `limit`, in order.
pub(crate) async fn list(
    txn: &mut Transaction,
    directory: InodeId,
    after: &str,
    limit: usize,
) -> Result<Vec<(Vec<u8>, DentryRow)>, OpError> {
    let (number, raw) = match split(directory) {
        Some((ALL, volume)) => return list_snapshots(txn, volume, after, limit).await,
        Some((number, raw)) if number != EMPTY => (number, raw),
        _ => return Ok(Vec::new()),
    };
    let Some((_, snapshot)) = snapshot_of(txn, number, raw).await? else { return Ok(Vec::new()) };
    let mut entries = BTreeMap::new();
    let mut after = after.as_bytes().to_vec();
    while entries.len() < limit {
        let (page, last) = list_page(txn, raw, &after, snapshot.epoch).await?;
        entries.extend(page);
        match last {
            Some(last) => after = last,
            None => break,
        }
    }
    let mut listed = Vec::with_capacity(entries.len().min(limit));
    for (name, entry) in entries.into_iter().take(limit) {
        listed.push((name, entry_in(txn, number, entry).await?));
    }
    Ok(listed)
}

type Entries = BTreeMap<Vec<u8>, DentryRow>;

/// Merges a page of the current names with one of the former names, up to the last name that both
/// have reached. Returns it if others may follow.
async fn list_page(
    txn: &mut Transaction,
    raw: InodeId,
    after: &[u8],
    epoch: u32,
) -> Result<(Entries, Option<Vec<u8>>), OpError> {
    let (names, formers) = (rows::dentries(raw), keys::former_names(raw));
    let (mut name_range, mut former_range) = (KeyRange::prefix(&names), KeyRange::prefix(&formers));
    if !after.is_empty() {
        name_range = name_range.after(&rows::dentry(raw, after));
        // All former entries of a name are read at once.
        former_range.start = keys::ended(&keys::former_entries(raw, after), u32::MAX);
    }
    let current = txn.snapshot_range(&name_range, PAGE).await?;
    let former = txn.snapshot_range(&former_range, PAGE).await?;
    let former_name = |key: &[u8]| -> Vec<u8> {
        key.get(formers.len()..key.len().saturating_sub(5)).unwrap_or_default().to_vec()
    };
    let current_last = current.last().filter(|_| current.len() == PAGE);
    let current_last = current_last.and_then(|(key, _)| key.get(names.len()..));
    // The last name may have further rows.
    let former_last = former.last().filter(|_| former.len() == PAGE).map(|it| former_name(&it.0));
    let is_known = |name: &[u8]| {
        current_last.is_none_or(|last| name <= last)
            && former_last.as_ref().is_none_or(|last| name < last.as_slice())
    };
    let (mut entries, mut last) = (Entries::new(), Vec::new());
    let mut former_seen: Option<Vec<u8>> = None;
    for (key, value) in &former {
        let name = former_name(key);
        if !is_known(&name) {
            break;
        }
        last = last.max(name.clone());
        if former_seen.as_ref() == Some(&name) || keys::end_of_key(key)? <= epoch {
            continue;
        }
        let entry = DentryRow::decode(key, value)?;
        if entry.since <= epoch {
            entries.insert(name.clone(), entry);
        }
        former_seen = Some(name);
    }
    for (key, value) in &current {
        let name = key.get(names.len()..).unwrap_or_default();
        if !is_known(name) {
            break;
        }
        last = last.max(name.to_vec());
        let entry = DentryRow::decode(key, value)?;
        if entry.since <= epoch {
            entries.insert(name.to_vec(), entry);
        }
    }
    let complete = current_last.is_none() && former_last.is_none();
    Ok((entries, (!complete).then_some(last)))
}

async fn list_snapshots(
    txn: &mut Transaction,
    volume: InodeId,
    after: &str,
    limit: usize,
) -> Result<Vec<(Vec<u8>, DentryRow)>, OpError> {
    let prefix = keys::snapshot_names(volume);
    let mut range = KeyRange::prefix(&prefix);
    if !after.is_empty() {
        range = range.after(&keys::snapshot_name(volume, after));
    }
    let mut listed = Vec::new();
    for (key, value) in txn.snapshot_range(&range, limit).await? {
        let name = key.get(prefix.len()..).unwrap_or_default().to_vec();
        let root = join(rows::decode(&key, &value)?, volume);
        listed.push((name, DentryRow::new(root, EntryKind::Directory)));
    }
    Ok(listed)
}

/// A row that belongs to an inode of a snapshot, an attribute or a page of written chunks. `prefix`:
/// of its rows in the history.
pub(crate) async fn value(
    txn: &mut Transaction,
    number: u8,
    raw: InodeId,
    key: &[u8],
    prefix: &[u8],
) -> Result<Option<Vec<u8>>, KvError> {
    let Some((_, snapshot)) = snapshot_of(txn, number, raw).await? else { return Ok(None) };
    match first_after(txn, prefix, snapshot.epoch).await? {
        Some((key, value)) => Ok(rows::decode::<FormerValue>(&key, &value)?.value),
        None => txn.get(key).await,
    }
}

/// Names and lengths of the attributes of an inode of a snapshot.
pub(crate) async fn attributes(
    txn: &mut Transaction,
    number: u8,
    raw: InodeId,
) -> Result<BTreeMap<Vec<u8>, usize>, KvError> {
    let Some((_, snapshot)) = snapshot_of(txn, number, raw).await? else {
        return Ok(BTreeMap::new());
    };
    let (prefix, formers) = (rows::attributes(raw), keys::former_attributes(raw));
    let mut found = BTreeMap::new();
    for (key, value) in txn.range(&KeyRange::prefix(&prefix), usize::MAX).await? {
        found.insert(key.get(prefix.len()..).unwrap_or_default().to_vec(), value.len());
    }
    // Later values first, so that the one of the snapshot is the last.
    for (key, value) in txn.range(&KeyRange::prefix(&formers), usize::MAX).await?.iter().rev() {
        if keys::end_of_key(key)? <= snapshot.epoch {
            continue;
        }
        let name = key.get(formers.len()..key.len() - 5).unwrap_or_default().to_vec();
        match rows::decode::<FormerValue>(key, value)?.value {
            Some(value) => found.insert(name, value.len()),
            None => found.remove(&name),
        };
    }
    Ok(found)
}
