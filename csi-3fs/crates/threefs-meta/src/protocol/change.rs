//! Changes of the tree, and their request ids.

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ClientId, InodeId};

use crate::protocol::inode::{At, LayoutDefaults, Nanoseconds, SpecialKind};
use crate::protocol::{LockChange, SnapshotChange, TrashChange};
use crate::written::Written;

/// Id of one change, the same for all its retries.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct RequestId {
    /// One incarnation of a client.
    pub client: ClientId,
    /// Unique for each change of the client.
    pub sequence: u64,
    /// All changes with a lower sequence are finished and will never be retried: their answers may
    /// be dropped.
    pub finished_below: u64,
}

/// A write session: while it exists, the chunks of its file are not collected, even if the file is
/// removed.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct SessionId(pub u128);

/// A change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaChange {
    /// Creates a file, or opens an existing one unless `exclusive` is set. Answered with
    /// [`MetaReply::Opened`].
    Create {
        /// Location in the tree.
        at: At,
        /// Permission bits.
        mode: u32,
        /// Fail with `Exists` if the name exists.
        exclusive: bool,
        /// Layout; unset fields are taken from the directory.
        layout: LayoutDefaults,
        /// Whether to start a write session.
        write: bool,
        /// Whether the client has the file open from now on, as with [`MetaQuery::Open`].
        track_open: bool,
    },
    /// Opens a file, following symbolic links. Answered with [`MetaReply::Opened`].
    Open {
        /// Location in the tree.
        at: At,
        /// Whether to start a write session.
        write: bool,
    },
    /// Ends a write session, with a last length report. Answered with [`MetaReply::Inode`].
    Close {
        /// The file.
        inode: InodeId,
        /// The session.
        session: SessionId,
        /// The last length report, if anything was written.
        report: Option<LengthReport>,
    },
    /// Reports written bytes; lengths only grow. Answered with [`MetaReply::Inodes`], in order. The
    /// lengths are durable when this returns: it is the metadata half of an fsync.
    ReportLengths {
        /// At most [`BATCH_MAX`].
        reports: Vec<LengthReport>,
        /// Sessions to end.
        ends: Vec<(InodeId, SessionId)>,
    },
    /// Reserves bytes up to an end for writing, and charges the quotas. The reservation lasts until
    /// the session ends or the file is truncated. Answered with [`MetaReply::Inodes`], in order, or
    /// for a ticket with [`MetaReply::Reserved`]. A file that was truncated in the meantime (see
    /// its `truncate_version`) is left unchanged.
    Reserve {
        /// At most [`BATCH_MAX`].
        reservations: Vec<Reservation>,
    },
    /// Truncates or extends a file. When this returns, no chunk holds bytes at or beyond the
    /// length, so a later extension reads as zeros. Answered with [`MetaReply::Inode`].
    SetLength {
        /// Location in the tree; symbolic links are followed.
        at: At,
        /// The new length.
        length: u64,
    },
    /// Creates a directory. Answered with [`MetaReply::Inode`].
    MakeDirectory {
        /// Location in the tree.
        at: At,
        /// Permission bits.
        mode: u32,
        /// Create missing parents, and accept an existing directory.
        parents: bool,
        /// Layout defaults of files created in it.
        defaults: LayoutDefaults,
    },
    /// Creates a symbolic link. Answered with [`MetaReply::Inode`].
    MakeSymlink {
        /// Location in the tree.
        at: At,
        /// Its target; need not exist.
        target: String,
    },
    /// Creates a FIFO, socket or device. Answered with [`MetaReply::Inode`].
    MakeSpecial {
        /// Location in the tree.
        at: At,
        /// Permission bits.
        mode: u32,
        /// Its kind.
        kind: SpecialKind,
        /// Device number; only root creates devices.
        device: u32,
    },
    /// Creates a hard link. Answered with [`MetaReply::Inode`].
    Link {
        /// The file.
        from: At,
        /// The new name.
        to: At,
    },
    /// Renames a file, directory or symbolic link and replaces an existing target atomically: a
    /// file by a file, an empty directory by a directory. Answered with [`MetaReply::Inode`] of the
    /// source.
    Rename {
        /// The source.
        from: At,
        /// The target.
        to: At,
        /// What to do with an existing target.
        mode: RenameMode,
    },
    /// Removes a name of anything but a directory. Answered with [`MetaReply::Done`].
    Unlink {
        /// Location in the tree.
        at: At,
    },
    /// Removes an empty directory. Answered with [`MetaReply::Done`].
    RemoveDirectory {
        /// Location in the tree.
        at: At,
    },
    /// Removes the entry and everything below it atomically; the space is freed later. Answered
    /// with [`MetaReply::Done`].
    RemoveTree {
        /// Location in the tree.
        at: At,
    },
    /// Changes attributes; `None` leaves them unchanged. Answered with [`MetaReply::Inode`].
    SetAttributes {
        /// Location in the tree.
        at: At,
        /// Whether a final symbolic link is followed.
        follow: bool,
        /// Permission bits.
        mode: Option<u32>,
        /// Owner.
        uid: Option<u32>,
        /// Group.
        gid: Option<u32>,
        /// Last read.
        accessed: Option<SetTime>,
        /// Last change of the content.
        modified: Option<SetTime>,
    },
    /// Sets or removes an extended attribute. Answered with [`MetaReply::Done`].
    SetAttribute {
        /// Location in the tree; symbolic links are not followed.
        at: At,
        /// Its name, with the prefix `user.`. Names with the prefix [`RESERVED_ATTRIBUTES`] are
        /// reserved for the control plane.
        name: String,
        /// At most [`ATTRIBUTE_BYTES_MAX`]; `None` removes it.
        value: Option<Vec<u8>>,
        /// Precondition on the current value.
        mode: SetMode,
    },
    /// Sets the limits of a directory; `None` means unlimited. Answered with [`MetaReply::Quotas`].
    SetQuota {
        /// The directory.
        at: At,
        /// Limit of the lengths of all files below it.
        bytes_max: Option<u64>,
        /// Limit of files, directories and symbolic links below it.
        inodes_max: Option<u64>,
    },
    /// Changes locks. Answered with [`MetaReply::Lock`].
    Lock(LockChange),
    /// Changes the trash of a volume.
    Trash(TrashChange),
    /// Changes the snapshots of a volume.
    Snapshot(SnapshotChange),
}

/// What a rename does with an existing target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RenameMode {
    /// Replace it: a file by a file, an empty directory by a directory.
    #[default]
    Replace,
    /// Fail with `Exists`.
    NoReplace,
    /// Exchange the two; the target must exist.
    Exchange,
}

/// Precondition of setting an attribute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SetMode {
    /// None.
    #[default]
    Any,
    /// It must not exist.
    Create,
    /// It must exist.
    Replace,
    /// It must have this value; fails with `Exists` otherwise.
    Was(Vec<u8>),
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SetTime {
    /// The current time of the metadata service; requires write permission.
    Now,
    /// This time; requires ownership.
    At(Nanoseconds),
}

/// A reservation of bytes for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    /// The file.
    pub inode: InodeId,
    /// The session that it belongs to; started if it does not exist.
    pub session: SessionId,
    /// The end of the bytes to be written.
    pub end: u64,
    /// As in [`LengthReport`].
    pub truncate_version: u64,
}

/// A report of bytes that are durable in the chunks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LengthReport {
    /// The file.
    pub inode: InodeId,
    /// The end of the written bytes. Ignored if the file is longer.
    pub length: u64,
    /// The file's `truncate_version` at the time of the write: a report from before a truncation is
    /// ignored.
    pub truncate_version: u64,
    /// The chunks written since the last report; all reports of a change together have at most
    /// [`REPORT_RANGES_MAX`] ranges.
    pub written: Written,
}
