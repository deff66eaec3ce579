//! Replies of the metadata service.

use fabric::auth::capability::Capability;
use serde::{Deserialize, Serialize};
use threefs_core::ids::InodeId;

use crate::error::MetaError;
use crate::protocol::change::SessionId;
use crate::protocol::inode::{Entry, Inode};

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
    OpenFilesReported {
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
