//! Rows of snapshots and of the history that they show.
//!
//! | key | value | content |
//! |---|---|---|
//! | `SNEP` volume | i64 | the epoch: number of the volume and count, see [`epoch_of_counter`]; written by bounded additions only |
//! | `SNVN` | u32 | the last number that a volume was given |
//! | `SNVO` volume | `VolumeRow` | the snapshot that is being created; the newest epoch that a snapshot shows |
//! | `SNJO` volume | i64 | when files with open handles last came into the volume; written without a read |
//! | `SNAP` volume number | `SnapshotRow` | a snapshot |
//! | `SNRE` volume number | – | a removed snapshot whose history is not dropped yet |
//! | `SNNM` volume name | u8 | number of a snapshot |
//! | `HINO` inode end | `FormerInode` | an inode as it was until epoch `end` |
//! | `HDEN` parent name 0 end | `DentryRow` | a name as it was until `end` |
//! | `HXAT` inode name 0 end | `FormerValue` | an extended attribute until `end` |
//! | `HWRI` inode level page end | `FormerValue` | a page of written chunks until `end` |
//! | `HEND` volume end key | – | index of these rows, for their removal |

use serde::{Deserialize, Serialize};
use threefs_core::ids::{Epoch, InodeId};
use threefs_kv::KvError;

use crate::protocol::{Nanoseconds, RequestId};
use crate::rows::{InodeRow, decode};

pub(crate) const EPOCHS: &[u8] = b"SNEP";
pub(crate) const VOLUME_NUMBER: &[u8] = b"SNVN";
pub(crate) const VOLUMES: &[u8] = b"SNVO";
pub(crate) const SNAPSHOTS: &[u8] = b"SNAP";
pub(crate) const REMOVED_SNAPSHOTS: &[u8] = b"SNRE";
pub(crate) const FORMER_INODES: &[u8] = b"HINO";
pub(crate) const FORMER_NAMES: &[u8] = b"HDEN";
pub(crate) const FORMER_ATTRIBUTES: &[u8] = b"HXAT";
pub(crate) const FORMER_PAGES: &[u8] = b"HWRI";
pub(crate) const ENDS: &[u8] = b"HEND";

/// Snapshots of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VolumeRow {
    /// The newest epoch that a snapshot shows.
    pub newest: Option<u32>,
    pub last_number: u8,
    pub creating: Option<Creation>,
}

/// A snapshot that is being created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Creation {
    /// The request: its retries continue the creation.
    pub request: RequestId,
    /// The epoch that follows the snapshot.
    pub next: Epoch,
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotRow {
    pub name: String,
    /// It shows the state at the end of this epoch.
    pub epoch: u32,
    pub created: Nanoseconds,
    /// Bytes and inodes of the volume at that time.
    pub bytes: u64,
    pub inodes: u64,
    /// Its name is gone, its rows are being dropped.
    pub removed: bool,
}

/// An inode as it was until the end of an epoch, with the times and the links of a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FormerInode {
    pub row: InodeRow,
    /// The epoch in which it got this state.
    pub since: u32,
    /// A truncation was pending: chunks beyond the length may exist.
    pub truncating: bool,
}

/// An attribute or page as it was until the end of an epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FormerValue {
    /// The first epoch in which it may have had this value.
    pub since: u32,
    /// `None`: it did not exist.
    pub value: Option<Vec<u8>>,
}

/// Epoch of a volume from its counter.
pub(crate) fn epoch_of_counter(counter: i64) -> Epoch {
    let counter = counter.unsigned_abs();
    Epoch::new((counter >> 32) as u32, counter as u32)
}

/// The counter of a volume. Numbers of volumes are below 2^31.
pub(crate) fn counter_of_epoch(epoch: Epoch) -> i64 {
    i64::from(epoch.volume) << 32 | i64::from(epoch.count)
}

fn key_of(prefix: &[u8], inode: InodeId, rest: &[&[u8]]) -> Vec<u8> {
    let mut key = [prefix, &inode.0.to_be_bytes()].concat();
    rest.iter().for_each(|part| key.extend_from_slice(part));
    key
}

pub(crate) fn epoch(volume: InodeId) -> Vec<u8> {
    key_of(EPOCHS, volume, &[])
}

pub(crate) fn volume_snapshots(volume: InodeId) -> Vec<u8> {
    key_of(VOLUMES, volume, &[])
}

pub(crate) fn joined(volume: InodeId) -> Vec<u8> {
    key_of(b"SNJO", volume, &[])
}

pub(crate) fn snapshot(volume: InodeId, number: u8) -> Vec<u8> {
    key_of(SNAPSHOTS, volume, &[&[number]])
}

/// Marks a removed snapshot.
pub(crate) fn removed_snapshot(volume: InodeId, number: u8) -> Vec<u8> {
    key_of(REMOVED_SNAPSHOTS, volume, &[&[number]])
}

/// Prefix of all snapshots of a volume.
pub(crate) fn snapshots(volume: InodeId) -> Vec<u8> {
    key_of(SNAPSHOTS, volume, &[])
}

pub(crate) fn snapshot_name(volume: InodeId, name: &str) -> Vec<u8> {
    key_of(b"SNNM", volume, &[name.as_bytes()])
}

/// Prefix of the names of a volume's snapshots.
pub(crate) fn snapshot_names(volume: InodeId) -> Vec<u8> {
    key_of(b"SNNM", volume, &[])
}

pub(crate) fn former_inode(id: InodeId, end: u32) -> Vec<u8> {
    key_of(FORMER_INODES, id, &[&end.to_be_bytes()])
}

/// Prefix of all former states of an inode.
pub(crate) fn former_inodes(id: InodeId) -> Vec<u8> {
    key_of(FORMER_INODES, id, &[])
}

/// Prefix of the former names of a directory.
pub(crate) fn former_names(directory: InodeId) -> Vec<u8> {
    key_of(FORMER_NAMES, directory, &[])
}

/// Prefix of the former entries with one name.
pub(crate) fn former_entries(directory: InodeId, name: impl AsRef<[u8]>) -> Vec<u8> {
    key_of(FORMER_NAMES, directory, &[name.as_ref(), &[0]])
}

/// Prefix of the former attributes of an inode.
pub(crate) fn former_attributes(id: InodeId) -> Vec<u8> {
    key_of(FORMER_ATTRIBUTES, id, &[])
}

/// Prefix of the former values of an attribute.
pub(crate) fn former_attribute(id: InodeId, name: &str) -> Vec<u8> {
    key_of(FORMER_ATTRIBUTES, id, &[name.as_bytes(), &[0]])
}

/// Prefix of the former values of a page of written chunks, from its key.
pub(crate) fn former_page(key: &[u8]) -> Vec<u8> {
    [FORMER_PAGES, key.get(4..).unwrap_or_default()].concat()
}

/// A row of the history, by a prefix of its rows.
pub(crate) fn ended(prefix: &[u8], end: u32) -> Vec<u8> {
    [prefix, &end.to_be_bytes()].concat()
}

/// The epoch in which a row of the history ended, from its key.
pub(crate) fn end_of_key(key: &[u8]) -> Result<u32, KvError> {
    let bytes = key.len().checked_sub(4).and_then(|at| <[u8; 4]>::try_from(&key[at..]).ok());
    let bytes = bytes.ok_or_else(|| KvError::bad_row(key, "the key has no epoch"))?;
    Ok(u32::from_be_bytes(bytes))
}

/// Index entry of a row of the history.
pub(crate) fn end(volume: InodeId, end: u32, key: &[u8]) -> Vec<u8> {
    key_of(ENDS, volume, &[&end.to_be_bytes(), key])
}

/// Index entries of a volume that ended in an epoch or later.
pub(crate) fn ends_from(volume: InodeId, end: u32) -> Vec<u8> {
    key_of(ENDS, volume, &[&end.to_be_bytes()])
}

/// The key of the row from its index entry.
pub(crate) fn key_of_end(key: &[u8]) -> Result<&[u8], KvError> {
    key.get(16..).ok_or_else(|| KvError::bad_row(key, "not an index entry of the history"))
}

/// The number of a snapshot, from its key.
pub(crate) fn number_of_key(key: &[u8]) -> Result<u8, KvError> {
    key.get(12).copied().ok_or_else(|| KvError::bad_row(key, "not the key of a snapshot"))
}

/// Charge of a row of the history, in bytes of metadata.
pub(crate) fn former_bytes(key: &[u8], value: &[u8]) -> i64 {
    // Both are bounded by the store.
    (key.len() + value.len()) as i64
}

/// Decodes a former inode.
pub(crate) fn decode_former(key: &[u8], value: &[u8]) -> Result<FormerInode, KvError> {
    decode(key, value)
}
