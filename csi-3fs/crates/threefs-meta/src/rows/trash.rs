//! Rows of the trash.

use serde::{Deserialize, Serialize};
use threefs_core::ids::InodeId;
use threefs_kv::KvError;

use crate::protocol::{EntryKind, TrashId};
use crate::rows::TRASH;

/// A removed file or directory in the trash of a volume. Its inode has no link and stays charged,
/// with its last name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TrashRow {
    /// The directory that it was in, which may have been removed as well.
    pub parent: InodeId,
    pub name: String,
    pub kind: EntryKind,
    /// The user who removed it.
    pub removed_by: u32,
}

/// Where a removed directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TrashedDirectoryRow {
    pub volume: InodeId,
    pub id: TrashId,
}

/// Prefix of the trash of a volume.
pub(crate) fn trash_of(volume: InodeId) -> Vec<u8> {
    [TRASH, &volume.0.to_be_bytes()].concat()
}

/// The first key of a volume's trash that was removed at or after this time.
pub(crate) fn trash_since(volume: InodeId, removed_ms: u64) -> Vec<u8> {
    [TRASH, &volume.0.to_be_bytes(), &removed_ms.to_be_bytes()].concat()
}

pub(crate) fn trashed(volume: InodeId, id: TrashId) -> Vec<u8> {
    let mut key = trash_since(volume, id.removed_ms);
    key.extend_from_slice(&id.inode.0.to_be_bytes());
    key
}

pub(crate) fn trashed_directory(id: InodeId) -> Vec<u8> {
    [b"TRDI".as_slice(), &id.0.to_be_bytes()].concat()
}

/// The id from the key of an entry.
pub(crate) fn trash_id_of_key(key: &[u8]) -> Result<TrashId, KvError> {
    let number = |at: usize| {
        let bytes = key.get(at..at + 8).and_then(|bytes| <[u8; 8]>::try_from(bytes).ok());
        bytes.map(u64::from_be_bytes)
    };
    match (key.len(), number(12), number(20)) {
        (28, Some(removed_ms), Some(inode)) => Ok(TrashId { removed_ms, inode: InodeId(inode) }),
        _ => Err(KvError::bad_row(key, "not the key of an entry in a trash")),
    }
}
