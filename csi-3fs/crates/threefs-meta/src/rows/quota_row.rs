//! Quotas of directories.

use serde::{Deserialize, Serialize};
use threefs_core::ids::InodeId;
use threefs_kv::{KvError, Transaction};

use crate::rows::{decode, quota};

/// Byte limit of a quota without one that lies inside another quota: a thousand such directories
/// fit into the counters above them, whatever the lengths of their sparse files.
const UNLIMITED_BYTES_MAX: u64 = 1 << 53;

/// Quota limits of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct QuotaRow {
    pub bytes_max: Option<u64>,
    pub inodes_max: Option<u64>,
    /// The next directory with a quota above it.
    pub above: Option<InodeId>,
    /// How long removed files are kept in the trash; 0 = not.
    pub trash_seconds: u64,
}

impl QuotaRow {
    /// Decodes a row of this release or of an earlier one, which ends after `above`.
    pub(crate) fn decode(key: &[u8], value: &[u8]) -> Result<Self, KvError> {
        decode(key, value).or_else(|_| {
            let (bytes_max, inodes_max, above) = decode(key, value)?;
            Ok(Self { bytes_max, inodes_max, above, trash_seconds: 0 })
        })
    }

    /// The effective limit of bytes.
    pub(crate) fn bytes(&self) -> Option<u64> {
        self.bytes_max.or(self.above.map(|_| UNLIMITED_BYTES_MAX))
    }
}

/// The quota of a directory, if it has one.
pub(crate) async fn read_quota(
    txn: &mut Transaction,
    directory: InodeId,
) -> Result<Option<QuotaRow>, KvError> {
    let key = quota(directory);
    let value = txn.get(&key).await?;
    value.map(|value| QuotaRow::decode(&key, &value)).transpose()
}
