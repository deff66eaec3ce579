//! Queries of the metadata service.

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ClientId, InodeId};

use crate::protocol::inode::At;
use crate::protocol::{AuditQuery, LockQuery, SnapshotQuery, TrashQuery};

/// A query. Linearizable: it sees every change that was answered before it was sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaQuery {
    /// The inode at a location. Answered with [`MetaReply::Inode`].
    Stat {
        /// Location in the tree.
        at: At,
        /// Whether a final symbolic link is followed.
        follow: bool,
    },
    /// The inodes at many locations, following symbolic links. Answered with [`MetaReply::Inodes`],
    /// in order, with an error for each location that cannot be resolved.
    StatMany {
        /// The locations, at most [`BATCH_MAX`].
        at: Vec<At>,
    },
    /// A file's inode. Its `written` contains those of the given chunks that must exist, from one
    /// snapshot. Answered with [`MetaReply::Inode`].
    StatChunks {
        /// Location in the tree; symbolic links are not followed.
        at: At,
        /// Indexes of chunks, at most [`BATCH_MAX`].
        chunks: Vec<u32>,
    },
    /// One page of a directory in byte order of the names. Answered with [`MetaReply::Page`].
    List {
        /// The directory.
        at: At,
        /// The last name of the previous page; empty for the first page.
        after: String,
        /// Maximum number of entries; 0 = [`LIST_LIMIT_MAX`], which is also the maximum.
        limit: u32,
    },
    /// The inode at a location, not following symbolic links, after a permission check. From now on
    /// the client has it open: it is not collected before `ReportOpenFiles` releases it. Answered
    /// with [`MetaReply::Inode`].
    Open {
        /// Location in the tree.
        at: At,
        /// [`crate::permission::READ`] | [`crate::permission::WRITE`] | [`crate::permission::EXECUTE`].
        access: u32,
        /// The client that opens it.
        client: ClientId,
    },
    /// A report of a client's open files. Answered with [`MetaReply::OpenFilesReported`].
    ReportOpenFiles {
        /// The client.
        client: ClientId,
        /// Inodes opened since the last report.
        add: Vec<InodeId>,
        /// Inodes closed since the last report.
        release: Vec<InodeId>,
        /// Whether `add` is, or completes, the list of all its open inodes.
        all: bool,
    },
    /// The quotas that a location counts for, innermost first. Answered with [`MetaReply::Quotas`].
    Quotas {
        /// Location in the tree.
        at: At,
    },
    /// An extended attribute. Answered with [`MetaReply::Attribute`].
    GetAttribute {
        /// Location in the tree; symbolic links are not followed.
        at: At,
        /// Its name.
        name: String,
    },
    /// Names of extended attributes. Answered with [`MetaReply::Names`].
    ListAttributes {
        /// Location in the tree; symbolic links are not followed.
        at: At,
    },
    /// The absolute path of a directory. Answered with [`MetaReply::Path`].
    PathOf {
        /// The directory.
        directory: InodeId,
    },
    /// Status for operators. Answered with [`MetaReply::Status`].
    Status,
    /// Capabilities that a volume's credential presents to the storage services, for files inside
    /// its directory. Answered with [`MetaReply::Capabilities`].
    Capabilities {
        /// The files, at most [`BATCH_MAX`].
        inodes: Vec<InodeId>,
    },
    /// The role of this service among those over the store. Answered with [`MetaReply::Role`].
    Role,
    /// Queries locks. Answered with [`MetaReply::Lock`].
    Lock(LockQuery),
    /// Queries a trash. Answered with [`MetaReply::Trash`].
    Trash(TrashQuery),
    /// Compares storage with the tree. Answered with [`MetaReply::Audit`].
    Audit(AuditQuery),
    /// Volume and epoch of files, which updates of them must name; for holders of the cluster's key.
    /// Answered with [`MetaReply::Epochs`].
    Epochs {
        /// The files, at most [`BATCH_MAX`].
        inodes: Vec<InodeId>,
    },
    /// Queries the snapshots of a volume. Answered with [`MetaReply::Snapshot`].
    Snapshot(SnapshotQuery),
}
