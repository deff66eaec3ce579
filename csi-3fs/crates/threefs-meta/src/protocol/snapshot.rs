//! Snapshots of a volume.
//!
//! A volume is a directory with a quota. Added after version 3 of the protocol was in use: a service
//! of an earlier release refuses these requests as ones that it cannot decode.

use serde::{Deserialize, Serialize};

use crate::protocol::inode::{At, Nanoseconds};

/// Maximum number of snapshots of a volume.
pub const SNAPSHOTS_MAX: usize = 254;
/// The directory in the root of a volume that has its snapshots. It is not listed.
pub const SNAPSHOTS_NAME: &str = ".snapshots";

/// A snapshot of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotEntry {
    /// Its name.
    pub name: String,
    /// Time of its creation by the clock of the metadata service.
    pub created: Nanoseconds,
    /// Bytes that counted for the volume's quota at that time.
    pub bytes: u64,
    /// Inodes that counted for it.
    pub inodes: u64,
}

/// Changes of the snapshots of a volume. Only root makes them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotChange {
    /// Creates a snapshot. Answered with [`SnapshotAnswer::Created`].
    Create {
        /// The volume.
        at: At,
        /// Its name, a file name.
        name: String,
    },
    /// Removes a snapshot; its space is freed later. Answered with
    /// [`MetaReply::Done`](crate::MetaReply::Done).
    Remove {
        /// The volume.
        at: At,
        /// Its name.
        name: String,
    },
}

/// Queries of snapshots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotQuery {
    /// The snapshots of a volume, oldest first. Answered with [`SnapshotAnswer::List`].
    List {
        /// The volume.
        at: At,
    },
}

/// Answers about snapshots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotAnswer {
    /// The new snapshot.
    Created(SnapshotEntry),
    /// All of a volume, oldest first.
    List(Vec<SnapshotEntry>),
}
