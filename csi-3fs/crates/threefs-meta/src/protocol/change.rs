//! Changes of the metadata service, and their identities.

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ClientId, InodeId};

use crate::protocol::inode::{At, LayoutDefaults, Nanoseconds, SpecialKind};
use crate::written::Written;

/// Identity of one change, the same in all its retries.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct RequestId {
    /// One life of a client.
    pub client: ClientId,
    /// Different for each change of that client.
    pub sequence: u64,
    /// Every change with a sequence below has its answer and will never be retried: what was
    /// remembered of it may go.
    pub finished_below: u64,
}

/// A write session: while it lives, the chunks of its file are not collected, even if the file is
/// removed.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct SessionId(pub u128);

/// A change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaChange {
    /// Makes a file, or opens it if it is there and `exclusive` is not set. Answered with
    /// [`MetaReply::Opened`].
    Create {
        /// Where.
        at: At,
        /// Permission bits.
        mode: u32,
        /// Fails with `Exists` when there is something already.
        exclusive: bool,
        /// Layout, where it should differ from the directory's.
        layout: LayoutDefaults,
        /// Whether a write session is wanted.
        write: bool,
        /// Whether the client holds it open from now on, as with [`MetaQuery::Open`].
        track_open: bool,
    },
    /// Opens a file, following symbolic links. Answered with [`MetaReply::Opened`].
    Open {
        /// Where.
        at: At,
        /// Whether a write session is wanted.
        write: bool,
    },
    /// Ends a write session, with a last length report. Answered with [`MetaReply::Inode`].
    Close {
        /// The file.
        inode: InodeId,
        /// The session.
        session: SessionId,
        /// As in `ReportLengths`, if anything was written.
        report: Option<LengthReport>,
    },
    /// What was written: lengths only ever grow by it. Answered with [`MetaReply::Inodes`], in
    /// order. When this returns, the lengths are durable: it is the metadata half of an fsync.
    ReportLengths {
        /// At most [`BATCH_MAX`].
        reports: Vec<LengthReport>,
        /// Sessions that end with it.
        ends: Vec<(InodeId, SessionId)>,
    },
    /// Lets writers write up to an end, and charges the quotas for it. It holds until the session
    /// ends, or the file is cut. Answered with [`MetaReply::Inodes`], in order, or for a ticket with
    /// [`MetaReply::Reserved`]; nothing happens to a file that was cut meanwhile (its
    /// `truncate_version` says so).
    Reserve {
        /// At most [`BATCH_MAX`].
        reservations: Vec<Reservation>,
    },
    /// Cuts or extends a file. When this returns, no chunk holds bytes at or beyond the length, so
    /// a later extension reads as zeros. Answered with [`MetaReply::Inode`].
    SetLength {
        /// Where; symbolic links are followed.
        at: At,
        /// The new length.
        length: u64,
    },
    /// Makes a directory. Answered with [`MetaReply::Inode`].
    MakeDirectory {
        /// Where.
        at: At,
        /// Permission bits.
        mode: u32,
        /// Also makes what is missing on the way, and accepts a directory that is there already.
        parents: bool,
        /// What files made in it get.
        defaults: LayoutDefaults,
    },
    /// Makes a symbolic link. Answered with [`MetaReply::Inode`].
    MakeSymlink {
        /// Where.
        at: At,
        /// What it says; need not exist.
        target: String,
    },
    /// Makes a FIFO, socket or device. Answered with [`MetaReply::Inode`].
    MakeSpecial {
        /// Where.
        at: At,
        /// Permission bits.
        mode: u32,
        /// Which.
        kind: SpecialKind,
        /// Number of a device; only root makes devices.
        device: u32,
    },
    /// Gives a file one more name. Answered with [`MetaReply::Inode`].
    Link {
        /// The file.
        from: At,
        /// The new name.
        to: At,
    },
    /// Moves a file, directory or symbolic link, replacing what is at the new place in the same
    /// instant: a file by a file, an empty directory by a directory. Answered with
    /// [`MetaReply::Inode`] of what was moved.
    Rename {
        /// From where.
        from: At,
        /// To where.
        to: At,
        /// What happens to something that is there.
        mode: RenameMode,
    },
    /// Removes a name that is not a directory's. Answered with [`MetaReply::Done`].
    Unlink {
        /// Where.
        at: At,
    },
    /// Removes an empty directory. Answered with [`MetaReply::Done`].
    RemoveDirectory {
        /// Where.
        at: At,
    },
    /// Removes whatever is there, with everything below it, in one instant; the space comes back
    /// later. Answered with [`MetaReply::Done`].
    RemoveTree {
        /// Where.
        at: At,
    },
    /// Changes attributes; `None` leaves them. Answered with [`MetaReply::Inode`].
    SetAttributes {
        /// Where.
        at: At,
        /// Whether a symbolic link at the very end is followed.
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
        /// Where; symbolic links are not followed.
        at: At,
        /// Which; it begins with `user.`. Names that begin with [`RESERVED_ATTRIBUTES`] are the
        /// control plane's.
        name: String,
        /// At most [`ATTRIBUTE_BYTES_MAX`]; `None` removes it.
        value: Option<Vec<u8>>,
        /// Whether it must be there, or must not.
        mode: SetMode,
    },
    /// Sets the limits of a directory; `None` is no limit. Answered with [`MetaReply::Quotas`].
    SetQuota {
        /// The directory.
        at: At,
        /// Of the lengths of all files below it.
        bytes_max: Option<u64>,
        /// Of files, directories and symbolic links below it.
        inodes_max: Option<u64>,
    },
}

/// What a move does to something that has the new name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RenameMode {
    /// Replaces it: a file by a file, an empty directory by a directory.
    #[default]
    Replace,
    /// Fails with `Exists`.
    NoReplace,
    /// Gives it the old name; it must be there.
    Exchange,
}

/// Whether something must be there before it is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SetMode {
    /// Whatever there is.
    #[default]
    Any,
    /// It must not be there.
    Create,
    /// It must be there.
    Replace,
    /// It must be exactly this; fails with `Exists` when it is something else.
    Was(Vec<u8>),
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SetTime {
    /// The metadata service's now; who may write may set it.
    Now,
    /// This; the owner may set it.
    At(Nanoseconds),
}

/// "I want to write up to `end`."
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    /// The file.
    pub inode: InodeId,
    /// The session that it belongs to; begins with it.
    pub session: SessionId,
    /// The end of what will be written.
    pub end: u64,
    /// As in [`LengthReport`].
    pub truncate_version: u64,
}

/// "Bytes up to `length` are durable in the chunks."
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LengthReport {
    /// The file.
    pub inode: InodeId,
    /// The end of what was written. Counts only if the file is shorter.
    pub length: u64,
    /// The file's `truncate_version` when it was written: a report from before a truncation must
    /// not undo it, and is passed over.
    pub truncate_version: u64,
    /// The chunks that were written since the last report; all reports of a change together have at
    /// most [`REPORT_RANGES_MAX`] ranges.
    pub written: Written,
}
