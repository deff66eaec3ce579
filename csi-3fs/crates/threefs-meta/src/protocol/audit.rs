//! Requests of checks: files with the chunks that must exist, inodes that do not exist, and
//! corrections of counters.
//!
//! Added after version 3 of the protocol was in use: a service of an earlier release refuses these
//! requests as ones that it cannot decode. They need the cluster's key.

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ClusterId, Epoch, InodeId};
use threefs_core::layout::Layout;

use crate::protocol::Correction;
use crate::written::Written;

/// Maximum number of ranges in an answer to [`AuditQuery::Written`].
pub const AUDIT_RANGES_MAX: usize = 4096;

/// Maximum number of files in an answer to [`AuditQuery::Shown`]. An inode has fewer states.
pub const SHOWN_FILES_MAX: usize = 1024;

/// A query of an audit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AuditQuery {
    /// One page of inodes, in their order. Answered with [`AuditAnswer::Files`].
    Files {
        /// The last inode of the previous page; 0 for the first page.
        after: InodeId,
        /// Maximum number of inodes, at most [`BATCH_MAX`](crate::protocol::BATCH_MAX).
        limit: u32,
    },
    /// Written chunks of a file that are not in its inode. Answered with [`AuditAnswer::Written`].
    Written {
        /// The file.
        inode: InodeId,
        /// Where the previous page ended; `None` for the first page.
        after: Option<WrittenCursor>,
    },
    /// Names of these inodes, from one page of all names. Answered with [`AuditAnswer::Names`].
    Names {
        /// At most [`BATCH_MAX`](crate::protocol::BATCH_MAX).
        inodes: Vec<InodeId>,
        /// The directory and name at which the previous page ended; `None` for the first page.
        after: Option<(InodeId, String)>,
    },
    /// Which of these inodes do not exist. Inodes are never used again, so an inode that had a chunk
    /// before this query, and does not exist, will never exist. Answered with
    /// [`AuditAnswer::Unknown`].
    Unknown {
        /// At most [`BATCH_MAX`](crate::protocol::BATCH_MAX).
        inodes: Vec<InodeId>,
    },
    /// Starts a repair of counters and ends an earlier one. Snapshots that are taken from now on have
    /// its row. Answered with [`MetaReply::Done`](crate::protocol::MetaReply::Done).
    StartRepair {
        /// A random number.
        repair: u64,
    },
    /// Applies corrections, once however often it is sent. Answered with
    /// [`MetaReply::Done`](crate::protocol::MetaReply::Done).
    Repair {
        /// The number of the repair, which must be the one that started last.
        repair: u64,
        /// 0, 1, 2, …: the next step of this repair, or an earlier one, which changes nothing.
        step: u64,
        /// At most [`CORRECTIONS_PER_STEP`](crate::protocol::CORRECTIONS_PER_STEP), computed from a
        /// snapshot with the row of this repair.
        corrections: Vec<Correction>,
    },
    /// The states that snapshots show of some files. Answered with [`AuditAnswer::Shown`]. Added after
    /// version 3 of the protocol had the other queries.
    Shown {
        /// Files after this inode.
        after: InodeId,
        /// The last inode.
        until: InodeId,
    },
}

/// A place among the written chunks of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenCursor {
    /// Level of the page.
    pub level: u8,
    /// Its number.
    pub page: u32,
}

/// A file that can be read, and chunks of it that must exist.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditedFile {
    /// The file.
    pub inode: InodeId,
    /// Where its chunks are.
    pub layout: Layout,
    /// Chunks that must exist; of a file with more ranges, query the others with
    /// [`AuditQuery::Written`].
    pub written: Written,
}

/// A file as snapshots show it, and chunks that must exist in versions of up to an epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownFile {
    /// The file, with its number in the snapshot, which is the first of those that show this state.
    pub file: AuditedFile,
    /// The inode of its chunks.
    pub stored: InodeId,
    /// The epoch of the snapshot.
    pub epoch: Epoch,
    /// The root of the snapshot.
    pub snapshot: InodeId,
}

/// An answer to an audit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AuditAnswer {
    /// One page of inodes.
    Files {
        /// All inodes of the page, of any kind, removed ones too.
        inodes: Vec<InodeId>,
        /// Those that are files with chunks and can be read.
        files: Vec<AuditedFile>,
        /// Whether more inodes follow.
        more: bool,
    },
    /// Written chunks of a file.
    Written {
        /// At most [`AUDIT_RANGES_MAX`] ranges.
        written: Written,
        /// Where the next page starts; `None` if this is the last one.
        next: Option<WrittenCursor>,
    },
    /// Names of the inodes of the query.
    Names {
        /// Inode, directory and name of each.
        names: Vec<(InodeId, InodeId, String)>,
        /// Where the next page starts; `None` if this is the last one.
        next: Option<(InodeId, String)>,
    },
    /// Inodes that do not exist.
    Unknown {
        /// The cluster that the tree belongs to; `None` before it is registered.
        cluster: Option<ClusterId>,
        /// In the order of the query.
        inodes: Vec<InodeId>,
    },
    /// States of files.
    Shown {
        /// In the order of their inodes, at most [`SHOWN_FILES_MAX`].
        files: Vec<ShownFile>,
        /// The inode up to which these are all.
        until: InodeId,
    },
}
