//! Inodes, directory entries and their addresses.

use serde::{Deserialize, Serialize};
use threefs_core::ids::InodeId;
use threefs_core::layout::Layout;

use crate::protocol::limits::ROOT;
use crate::written::Written;

/// A location in the tree, as in `openat`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct At {
    /// The directory in which the path starts.
    pub directory: InodeId,
    /// Names separated by `/`, relative to `directory`; a leading `/` starts at [`ROOT`]. Empty
    /// names and `.` are ignored, `..` is the parent. Empty = `directory` itself.
    pub path: String,
}

impl At {
    /// A path from the root.
    pub fn path(path: impl Into<String>) -> Self {
        Self { directory: ROOT, path: path.into() }
    }

    /// The inode itself, with an empty path. Also for files.
    pub fn inode(inode: InodeId) -> Self {
        Self { directory: inode, path: String::new() }
    }

    /// A name in a directory.
    pub fn entry(directory: InodeId, name: impl Into<String>) -> Self {
        Self { directory, path: name.into() }
    }
}

/// Nanoseconds since 1970 by the metadata service's clock.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Nanoseconds(pub i64);

/// A file, directory, symbolic link or special file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inode {
    /// Its id; never used again.
    pub id: InodeId,
    /// Counts the changes of this inode: of two replies, the one with the higher version is newer,
    /// independent of clocks.
    pub version: u64,
    /// Its kind, with kind-specific fields.
    pub kind: InodeKind,
    /// Permission bits (07777).
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Hard links of a file; of a directory 2 and one for each subdirectory; 0 once it is removed.
    pub links: u32,
    /// Last access, as far as a client has reported it with `SetAttributes`.
    pub accessed: Nanoseconds,
    /// Last change of the content: of a file by a length report or `SetAttributes`, of a directory
    /// by a change of its entries.
    pub modified: Nanoseconds,
    /// Last change of the inode.
    pub changed: Nanoseconds,
    /// The directory with the quota that it counts for, if any. For a directory, the one that its
    /// entries count for: itself, if it has a quota.
    pub quota: Option<InodeId>,
}

/// Kind of an inode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InodeKind {
    /// A file: bytes in chunks.
    File {
        /// Where its chunks are.
        layout: Layout,
        /// Its length as last reported or set.
        length: u64,
        /// Writers may write up to here; counts for the quota if greater than the length.
        reserved: u64,
        /// Increases with every truncation; a length report counts only with the current value.
        truncate_version: u64,
        /// Counts the changes of the content: length reports and truncations. Equal values mean
        /// equal bytes, even if the times have been set back.
        content: u64,
        /// Chunks that must exist. Any other absent chunk is a hole, unless there are more ranges
        /// in rows: then query [`MetaQuery::StatChunks`].
        written: Written,
    },
    /// A directory.
    Directory {
        /// Its parent directory; the root is its own parent.
        parent: InodeId,
        /// Layout defaults of files created in it.
        defaults: LayoutDefaults,
    },
    /// A symbolic link.
    Symlink {
        /// Its target.
        target: String,
    },
    /// A FIFO, socket or device. 3FS stores the inode; the node's kernel does the rest.
    Special {
        /// Its kind.
        kind: SpecialKind,
        /// Device number in the kernel's encoding; 0 for others.
        device: u32,
    },
}

/// Kind of a special file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SpecialKind {
    /// A named pipe.
    Fifo,
    /// A UNIX socket.
    Socket,
    /// A character device.
    CharacterDevice,
    /// A block device.
    BlockDevice,
}

impl Inode {
    /// Length of a file or of a symbolic link's target; 0 for a directory.
    pub fn length(&self) -> u64 {
        match &self.kind {
            InodeKind::File { length, .. } => *length,
            InodeKind::Symlink { target } => target.len() as u64,
            InodeKind::Directory { .. } | InodeKind::Special { .. } => 0,
        }
    }

    /// True for a directory.
    pub fn is_directory(&self) -> bool {
        matches!(self.kind, InodeKind::Directory { .. })
    }
}

/// Layout defaults of new files; 0 = the configuration of the service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayoutDefaults {
    /// Bytes of a chunk, a power of two.
    pub chunk_bytes: u32,
    /// Number of chains that the chunks are striped over; a value above the number of chains means
    /// all.
    pub stripe: u32,
}

/// Kind of a directory entry's inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EntryKind {
    /// A file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A FIFO, socket or device.
    Special(SpecialKind),
}

/// One directory entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// Its inode.
    pub inode: InodeId,
    /// Kind of the inode.
    pub kind: EntryKind,
}
