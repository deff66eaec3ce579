//! Inodes, directory entries and their addresses.

use serde::{Deserialize, Serialize};
use threefs_core::ids::InodeId;
use threefs_core::layout::Layout;

use crate::protocol::limits::ROOT;
use crate::written::Written;

/// A place in the tree.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct At {
    /// Where the path starts.
    pub directory: InodeId,
    /// Names separated by `/`, relative to `directory`; a leading `/` starts at [`ROOT`]. Empty
    /// names and `.` stand for nothing, `..` for the parent. Empty = `directory` itself.
    pub path: String,
}

impl At {
    /// A path from the root.
    pub fn path(path: impl Into<String>) -> Self {
        Self { directory: ROOT, path: path.into() }
    }

    /// An inode itself. Files too: the path is empty.
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
    /// Counts the changes of this inode: of two answers the one with the higher version is newer,
    /// whatever the clocks said.
    pub version: u64,
    /// What it is, with what only such a thing has.
    pub kind: InodeKind,
    /// Permission bits (07777).
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Names of a file; 2 for a directory, 0 once the last name is gone.
    pub links: u32,
    /// Last read, as far as somebody said so with `SetAttributes`.
    pub accessed: Nanoseconds,
    /// Last change of the content: of a file by a length report or `SetAttributes`, of a directory
    /// by a change of its entries.
    pub modified: Nanoseconds,
    /// Last change of the inode.
    pub changed: Nanoseconds,
    /// The directory with a quota that it counts for, if there is one above it. Of a directory:
    /// that which its entries count for, so the directory itself if it has a quota.
    pub quota: Option<InodeId>,
}

/// What an inode is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InodeKind {
    /// Bytes in chunks.
    File {
        /// Where its chunks are.
        layout: Layout,
        /// Its length as last reported or set.
        length: u64,
        /// Its writers may write up to here; counts for its quota if it is more than the length.
        reserved: u64,
        /// Grows with every truncation; a length report counts only with the current one.
        truncate_version: u64,
        /// Counts the changes of the content: length reports, truncations. Equal numbers mean
        /// equal bytes, even if somebody has set the times back.
        content: u64,
        /// Chunks that must exist. An absent chunk elsewhere is a hole, unless there are more of
        /// them: then [`MetaQuery::StatChunks`] tells.
        written: Written,
    },
    /// Names.
    Directory {
        /// The directory that holds it; the root is its own parent.
        parent: InodeId,
        /// What files made in it get.
        defaults: LayoutDefaults,
    },
    /// A path to somewhere else.
    Symlink {
        /// The path.
        target: String,
    },
    /// A FIFO, socket or device. 3FS keeps its inode; the kernel of the node does the rest.
    Special {
        /// Which.
        kind: SpecialKind,
        /// Number of a device as the kernel encodes it; 0 for others.
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
    /// Length of a file, of a symbolic link's target, 0 of a directory.
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

/// How files get their layout; 0 = as the service is configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayoutDefaults {
    /// Bytes of a chunk, a power of two.
    pub chunk_bytes: u32,
    /// Chains that the chunks go round; more than there are means all.
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

/// One name in a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// What it names.
    pub inode: InodeId,
    /// What kind of thing that is.
    pub kind: EntryKind,
}
