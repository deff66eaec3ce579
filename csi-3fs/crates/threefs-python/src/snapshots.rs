//! Snapshots of a volume as tuples.

use threefs_meta::SnapshotEntry;

/// name, time of the creation in nanoseconds since 1970, bytes, inodes.
pub(crate) type RawSnapshot = (String, i64, u64, u64);

pub(crate) fn raw_snapshot(entry: SnapshotEntry) -> RawSnapshot {
    let SnapshotEntry { name, created, bytes, inodes } = entry;
    (name, created.0, bytes, inodes)
}
