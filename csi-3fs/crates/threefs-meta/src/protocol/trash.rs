//! The trash of a volume: removed files and directories that can be restored for a time.
//!
//! A volume is a directory with a quota. Added after version 3 of the protocol was in use: a service
//! of an earlier release refuses these requests as ones that it cannot decode.

use serde::{Deserialize, Serialize};
use threefs_core::ids::InodeId;

use crate::protocol::inode::{At, EntryKind};

/// Maximum number of entries in one page of a trash, and of one purge.
pub const TRASH_PAGE_MAX: usize = 128;
/// The longest retention: ten years.
pub const TRASH_SECONDS_MAX: u64 = 3650 * 86_400;

/// Id of an entry in the trash of a volume. Older entries have lower ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TrashId {
    /// Time of the removal by the clock of the metadata service, in milliseconds since 1970.
    pub removed_ms: u64,
    /// The removed inode.
    pub inode: InodeId,
}

/// An entry in the trash of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrashEntry {
    /// Its id.
    pub id: TrashId,
    /// Its path below the volume; `None` if a directory on it is gone.
    pub path: Option<String>,
    /// Its last name.
    pub name: String,
    /// Its kind. A directory that was removed with its contents is one entry.
    pub kind: EntryKind,
    /// Whether it is a directory without contents.
    pub empty: bool,
    /// Length of a file.
    pub length: u64,
    /// The user who removed it.
    pub removed_by: u32,
}

/// Changes of the trash of a volume. Only root makes them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TrashChange {
    /// Sets how long removed files are kept; 0 removes those that are kept, too. Answered with
    /// [`MetaReply::Done`](crate::MetaReply::Done).
    Keep {
        /// The volume.
        at: At,
        /// At most [`TRASH_SECONDS_MAX`].
        seconds: u64,
    },
    /// Gives an entry its name back; removed directories above it are restored without their other
    /// contents. Answered with [`MetaReply::Inode`](crate::MetaReply::Inode).
    Restore {
        /// The volume.
        at: At,
        /// The entry.
        id: TrashId,
        /// Another name for it, in the same volume.
        to: Option<At>,
    },
    /// Removes entries for good; those that do not exist are ignored. Answered with
    /// [`MetaReply::Done`](crate::MetaReply::Done).
    Purge {
        /// The volume.
        at: At,
        /// At most [`TRASH_PAGE_MAX`].
        ids: Vec<TrashId>,
    },
}

/// Queries of a trash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TrashQuery {
    /// One page of the trash of a volume, oldest first. Answered with [`TrashAnswer::Page`].
    List {
        /// The volume.
        at: At,
        /// The last entry of the previous page.
        after: Option<TrashId>,
    },
    /// Number of entries in all volumes. Answered with [`TrashAnswer::Count`].
    Count,
}

/// Answers of a trash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TrashAnswer {
    /// One page.
    Page {
        /// How long removed files are kept; 0 = not.
        seconds: u64,
        /// At most [`TRASH_PAGE_MAX`], oldest first.
        entries: Vec<TrashEntry>,
        /// Whether more entries follow.
        more: bool,
    },
    /// Entries, counted up to 100,000.
    Count(u64),
}
