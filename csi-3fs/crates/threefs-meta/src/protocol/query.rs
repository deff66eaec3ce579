//! Reads of the metadata service.

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ClientId, InodeId};

use crate::protocol::inode::At;

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
    ReportOpenFiles {
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
