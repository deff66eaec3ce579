//! Corrections of counters, as computed from one snapshot by a check; see `ops::repair`.

use serde::{Deserialize, Serialize};
use threefs_core::ids::InodeId;

/// Maximum number of corrections in one request.
pub const CORRECTIONS_PER_STEP: usize = 64;

/// The correction of a counter. It is valid as long as it has not been applied, whatever other
/// changes are made meanwhile, or states what must be unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Correction {
    /// Adds to the usage of a quota and of all quotas above it.
    Quota {
        /// The directory with the quota.
        directory: InodeId,
        /// Bytes, bytes of excess, inodes, bytes of names and attributes.
        more: [i64; 4],
    },
    /// Adds to the number of subdirectories.
    Subdirectories {
        /// The directory.
        directory: InodeId,
        /// What to add.
        more: i64,
    },
    /// Adds to the bytes of the answers kept for a volume.
    Answers {
        /// The volume; 0 for all together.
        volume: InodeId,
        /// What to add.
        more: i64,
    },
    /// Sets counters of an inode that has not changed since the snapshot.
    Inode {
        /// The inode.
        inode: InodeId,
        /// Its version in the snapshot.
        version: u64,
        /// Number of its names.
        links: u32,
        /// Bytes of its names, attributes, link target and write sessions.
        metadata_bytes: u64,
    },
}
