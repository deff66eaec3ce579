//! Names in directories.

use serde::{Deserialize, Serialize};
use threefs_core::ids::InodeId;
use threefs_kv::KvError;

use crate::protocol::EntryKind;
use crate::rows::{decode, encode, take};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DentryRow {
    pub inode: InodeId,
    pub kind: EntryKind,
    /// The epoch of the volume in which the name got this entry.
    #[serde(skip)]
    pub since: u32,
}

impl DentryRow {
    pub(crate) fn new(inode: InodeId, kind: EntryKind) -> Self {
        Self { inode, kind, since: 0 }
    }

    /// Encodes a row. Without an epoch it is as in releases without snapshots.
    pub(crate) fn encode(&self, key: &[u8]) -> Result<Vec<u8>, KvError> {
        match self.since {
            0 => encode(key, self),
            since => encode(key, &(self, since)),
        }
    }

    pub(crate) fn decode(key: &[u8], value: &[u8]) -> Result<Self, KvError> {
        let (row, rest) = take::<Self>(key, value)?;
        let since = if rest.is_empty() { 0 } else { decode(key, rest)? };
        Ok(Self { since, ..row })
    }
}
