//! Replies of the metadata service.

use fabric::auth::capability::Capability;
use serde::{Deserialize, Serialize};
use threefs_core::fence::VolumeEpoch;
use threefs_core::ids::InodeId;

use crate::error::MetaError;
use crate::protocol::change::SessionId;
use crate::protocol::inode::{Entry, Inode};
use crate::protocol::{AuditAnswer, LockAnswer, SnapshotAnswer, TrashAnswer};

/// A quota and its usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaUse {
    /// The directory with the quota.
    pub directory: InodeId,
    /// Limit of `bytes_used`; `None` = unlimited.
    pub bytes_max: Option<u64>,
    /// Lengths of all files below it, or their reservations if greater.
    pub bytes_used: u64,
    /// Limit of `inodes_used`; `None` = unlimited.
    pub inodes_max: Option<u64>,
    /// Files, directories, symbolic links and special files below it.
    pub inodes_used: u64,
    /// Limit of `metadata_used`, derived from `inodes_max`.
    pub metadata_max: Option<u64>,
    /// Bytes of names, extended attributes, symbolic links' targets and write sessions below it.
    pub metadata_used: u64,
}

/// The reply to a successful call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaReply {
    /// The current inode.
    Inode(Inode),
    /// Inodes in the order of the request.
    Inodes(Vec<Result<Inode, MetaError>>),
    /// As `Inodes`, for a ticket holder, with capabilities for the bytes that may be written.
    Reserved {
        /// In the order of the request.
        inodes: Vec<Result<Inode, MetaError>>,
        /// In the same order; `None` for a file that was refused.
        capabilities: Vec<Option<Capability>>,
    },
    /// A file, with the write session if one was requested.
    Opened {
        /// The file.
        inode: Inode,
        /// The session; end it with `Close`.
        session: Option<SessionId>,
        /// Whether this call created the file.
        created: bool,
    },
    /// One page of a directory.
    Page {
        /// Entries in byte order of their names.
        entries: Vec<Entry>,
        /// Whether more entries follow.
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
    /// Reply to a report of open files.
    OpenFilesReported {
        /// Whether the service knows all open files of the client; otherwise it must report them
        /// all.
        complete: bool,
    },
    /// Success without a value.
    Done,
    /// Status of the service.
    Status(MetaStatus),
    /// In the order of the request; `None` for a file that does not exist.
    Capabilities(Vec<Option<Capability>>),
    /// The role of the service.
    Role(ServiceRole),
    /// Answer about locks.
    Lock(LockAnswer),
    /// Answer about a trash.
    Trash(TrashAnswer),
    /// Answer to an audit.
    Audit(AuditAnswer),
    /// In the order of the request; `None` for a file that does not exist.
    Epochs(Vec<Option<VolumeEpoch>>),
    /// Answer about snapshots.
    Snapshot(SnapshotAnswer),
}

/// Role of a service among those over one store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceRole {
    /// Whether it collected garbage when it last looked; one service does.
    pub collects_garbage: bool,
}

/// Status for operators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaStatus {
    /// Removals whose space has not been freed yet.
    pub removals_pending: u64,
    /// Write sessions.
    pub sessions: u64,
    /// Bytes of metadata in the store, if it is bounded.
    pub store_used_bytes: Option<u64>,
    /// Maximum size of the store.
    pub store_max_bytes: Option<u64>,
}

/// Result of a call.
pub type MetaResult = Result<MetaReply, MetaError>;
