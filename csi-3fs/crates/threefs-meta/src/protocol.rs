//! What the metadata service is asked and answers.
//!
//! Places are named by a directory and a path below it ([`At`]), so the same calls serve a client
//! that thinks in whole paths (directory = [`ROOT`]) and one that thinks in inodes and names.
//!
//! Changes carry a [`RequestId`]. A change that was executed is remembered with its answer in the
//! same transaction, so a retry after a lost answer, even over a restart of the service, gets the
//! answer of the first execution and changes nothing.

use fabric::auth::capability::Capability;
use fabric::rpc::{Fault, decode};
use serde::{Deserialize, Serialize};
use threefs_core::ids::{ClientId, InodeId};
use threefs_core::layout::Layout;

pub use crate::error::MetaError;
use crate::identity::Identity;
pub use crate::written::{REPORT_RANGES_MAX, Written};

/// Name of the service; both sides of a connection sign it.
pub const CONTEXT: &str = "threefs/meta";
/// Version of the messages between clients and the service. Raise it with every change of a request,
/// a reply or anything within. Requests of releases before it had one start with 0 or 1.
pub const VERSION: u8 = 3;
/// The root directory.
pub const ROOT: InodeId = InodeId(1);
/// The longest name, as on Linux.
pub const NAME_BYTES_MAX: usize = 255;
/// The longest path, as on Linux.
pub const PATH_BYTES_MAX: usize = 4096;
/// Symbolic links that one path may go through, as on Linux.
pub const SYMLINKS_MAX: usize = 40;
/// Entries of one page of a listing at most.
pub const LIST_LIMIT_MAX: u32 = 4096;
/// The longest value of an extended attribute.
pub const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;
/// All extended attributes of an inode, names and values.
pub const ATTRIBUTES_BYTES_MAX: usize = 128 << 10;
/// Extended attributes that only the control plane sees, sets and removes.
pub const RESERVED_ATTRIBUTES: &str = "user.threefs.";
/// What one name costs beside its bytes: the row of a directory entry.
pub const NAME_ROW_BYTES: u64 = 64;
/// What a write session costs: its row.
pub const SESSION_ROW_BYTES: u64 = 64;
/// Bytes of names, attributes, link targets and write sessions that a directory with a limit of
/// inodes may have for each of them.
pub const METADATA_BYTES_PER_INODE: u64 = 1024;
/// And those that it may have anyway.
pub const METADATA_BYTES_MIN: u64 = 1 << 20;
/// Files of one batch at most.
pub const BATCH_MAX: usize = 1024;

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

/// A request as it is sent: the version comes first, in one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versioned<T> {
    version: u8,
    message: T,
}

impl<'a> Versioned<&'a MetaRequest> {
    /// A request of this release.
    pub fn of(message: &'a MetaRequest) -> Self {
        Self { version: VERSION, message }
    }
}

/// The request in a message. The version is looked at before anything else is decoded: a message of
/// another one could be read as a different request.
///
/// # Errors
/// [`Fault`] with what to upgrade.
pub fn decode_request(message: &[u8]) -> Result<MetaRequest, Fault> {
    let version = message.first().copied().unwrap_or_default();
    if version != VERSION {
        let (theirs, side) = match version {
            0 | 1 => ("no version".to_owned(), "the client"),
            older if older < VERSION => (format!("version {older}"), "the client"),
            newer => (format!("version {newer}"), "the metadata service"),
        };
        return Err(Fault::bad_request(format!(
            "the client sends {theirs}, this service takes version {VERSION} of the messages of \
             {CONTEXT}; upgrade {side} so that both are of one release"
        )));
    }
    let request: Versioned<MetaRequest> =
        decode(message).map_err(|error| Fault::bad_request(error.to_string()))?;
    Ok(request.message)
}

/// A call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaRequest {
    /// Reads; may be repeated.
    Query {
        /// For whom.
        who: Identity,
        /// What.
        query: MetaQuery,
    },
    /// Changes; executed once for each id.
    Change {
        /// Its identity.
        id: RequestId,
        /// For whom.
        who: Identity,
        /// What to do.
        change: MetaChange,
    },
}

/// A read. Linearizable: it sees every change that was answered before it was asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaQuery {
    /// The inode at a place. Answered with [`MetaReply::Inode`].
    Stat {
        /// Where.
        at: At,
        /// Whether a symbolic link at the very end is followed.
        follow: bool,
    },
    /// The inodes at many places, symbolic links followed. Answered with [`MetaReply::Inodes`], in
    /// order; a place that cannot be had gives its own error.
    StatMany {
        /// Where, at most [`BATCH_MAX`].
        at: Vec<At>,
    },
    /// A file's inode, whose `written` has those of some chunks that must exist, all of one moment,
    /// and no others. Answered with [`MetaReply::Inode`].
    StatChunks {
        /// Where; symbolic links are not followed.
        at: At,
        /// Indexes of chunks, at most [`BATCH_MAX`].
        chunks: Vec<u32>,
    },
    /// One page of a directory in the order of names' bytes. Answered with [`MetaReply::Page`].
    List {
        /// The directory.
        at: At,
        /// The last name of the page before; empty for the first page.
        after: String,
        /// Entries at most; 0 or too many = [`LIST_LIMIT_MAX`].
        limit: u32,
    },
    /// The inode at a place, symbolic links not followed, if the caller may open it so. From now on
    /// the client holds it open: it is not collected before `Hold` releases it. Answered with
    /// [`MetaReply::Inode`].
    Open {
        /// Where.
        at: At,
        /// [`crate::identity::READ`] | [`crate::identity::WRITE`] | [`crate::identity::EXECUTE`].
        access: u32,
        /// Who holds it.
        client: ClientId,
    },
    /// What a client holds open. Answered with [`MetaReply::Held`].
    Hold {
        /// Who.
        client: ClientId,
        /// What more than before.
        add: Vec<InodeId>,
        /// What less.
        release: Vec<InodeId>,
        /// Whether `add` is, or completes, all that it holds.
        all: bool,
    },
    /// The quotas that a place counts for, innermost first. Answered with [`MetaReply::Quotas`].
    Quotas {
        /// Where.
        at: At,
    },
    /// An extended attribute. Answered with [`MetaReply::Attribute`].
    GetAttribute {
        /// Where; symbolic links are not followed.
        at: At,
        /// Which.
        name: String,
    },
    /// Names of extended attributes. Answered with [`MetaReply::Names`].
    ListAttributes {
        /// Where; symbolic links are not followed.
        at: At,
    },
    /// The whole path of a directory. Answered with [`MetaReply::Path`].
    PathOf {
        /// Which directory.
        directory: InodeId,
    },
    /// For operators. Answered with [`MetaReply::Status`].
    Status,
    /// What a volume's credential shows the storage services, for files within its directory.
    /// Answered with [`MetaReply::Capabilities`].
    Capabilities {
        /// The files, at most [`BATCH_MAX`].
        inodes: Vec<InodeId>,
    },
}

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
        hold: bool,
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

/// A quota and what counts for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaUse {
    /// The directory that has it.
    pub directory: InodeId,
    /// Limit of `bytes_used`; `None` is no limit.
    pub bytes_max: Option<u64>,
    /// Lengths of all files below it, or what their writers reserved.
    pub bytes_used: u64,
    /// Limit of `inodes_used`; `None` is no limit.
    pub inodes_max: Option<u64>,
    /// Files, directories, symbolic links and special files below it.
    pub inodes_used: u64,
    /// Limit of `metadata_used`, derived from `inodes_max`.
    pub metadata_max: Option<u64>,
    /// Bytes of names, extended attributes, symbolic links' targets and write sessions below it.
    pub metadata_used: u64,
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

/// The answer to a call that went well.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaReply {
    /// An inode as it is now.
    Inode(Inode),
    /// Many of them, in the order of the question.
    Inodes(Vec<Result<Inode, MetaError>>),
    /// As `Inodes`, to the holder of a ticket, with a capability for what may be written now.
    Reserved {
        /// In the order of the question.
        inodes: Vec<Result<Inode, MetaError>>,
        /// In the same order; `None` for a file that was refused.
        capabilities: Vec<Option<Capability>>,
    },
    /// A file, and the write session if one was wanted.
    Opened {
        /// The file.
        inode: Inode,
        /// The session; end it with `Close`.
        session: Option<SessionId>,
        /// Whether this call made the file.
        created: bool,
    },
    /// One page.
    Page {
        /// Entries in the order of their names' bytes.
        entries: Vec<Entry>,
        /// Whether there are more.
        more: bool,
    },
    /// A path from the root.
    Path(String),
    /// Quotas, innermost first.
    Quotas(Vec<QuotaUse>),
    /// The value of an extended attribute.
    Attribute(Vec<u8>),
    /// Names, sorted.
    Names(Vec<String>),
    /// Whether the service knows all that the client holds; if not, it must be told.
    Held {
        /// It does.
        complete: bool,
    },
    /// Nothing to say.
    Done,
    /// How the service is.
    Status(MetaStatus),
    /// In the order of the question; `None` for a file that does not exist.
    Capabilities(Vec<Option<Capability>>),
}

/// What an operator wants to know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaStatus {
    /// Removed things whose space has not come back yet.
    pub removals_pending: u64,
    /// Write sessions.
    pub sessions: u64,
    /// Bytes of metadata in the store, if it has a bound.
    pub store_used_bytes: Option<u64>,
    /// The most that it can hold.
    pub store_max_bytes: Option<u64>,
}

/// What travels back.
pub type MetaResult = Result<MetaReply, MetaError>;
