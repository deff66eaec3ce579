//! Why a call did not go well.

use serde::{Deserialize, Serialize};
use threefs_core::ids::InodeId;

use crate::protocol::limits::{NAME_BYTES_MAX, PATH_BYTES_MAX, SYMLINKS_MAX};

/// Why a call did not go well; nothing was changed by it. Paths and names are in it, so that the
/// text alone tells what happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum MetaError {
    /// ENOENT.
    #[error("`{path}`: no such file or directory")]
    NotFound {
        /// As asked, up to the missing name.
        path: String,
    },
    /// EEXIST.
    #[error("`{path}` exists already")]
    Exists {
        /// As asked.
        path: String,
    },
    /// ENOTDIR.
    #[error("`{path}` is not a directory")]
    NotADirectory {
        /// As asked, up to the name that is no directory.
        path: String,
    },
    /// EISDIR.
    #[error("`{path}` is a directory")]
    IsADirectory {
        /// As asked.
        path: String,
    },
    /// ENOTEMPTY.
    #[error("directory `{path}` is not empty")]
    NotEmpty {
        /// As asked.
        path: String,
    },
    /// EACCES: modes and owners do not allow it.
    #[error("`{path}`: permission denied: {detail}")]
    PermissionDenied {
        /// As asked, up to the name that refuses.
        path: String,
        /// Who wanted what of which inode.
        detail: String,
    },
    /// EPERM: only the owner, or root, does this.
    #[error("`{path}`: operation not permitted: {reason}")]
    NotPermitted {
        /// As asked.
        path: String,
        /// Who may.
        reason: String,
    },
    /// EDQUOT.
    #[error(
        "the quota of directory {directory} allows {max} {what}, {used} are in use and {more} more \
         were wanted; remove something below it, or raise its limit"
    )]
    QuotaExceeded {
        /// The directory with the quota.
        directory: InodeId,
        /// `bytes` or `inodes`.
        what: String,
        /// In use.
        used: i64,
        /// SessionRequest.
        more: i64,
        /// The limit.
        max: i64,
    },
    /// EXDEV: only a copy can do it.
    #[error("`{path}` cannot change from one quota to another: {reason}; copy it instead")]
    CrossQuota {
        /// As asked.
        path: String,
        /// Why not.
        reason: String,
    },
    /// EFBIG.
    #[error("the file would be too large: {detail}")]
    FileTooLarge {
        /// How large it would be, and may be.
        detail: String,
    },
    /// ENODATA.
    #[error("`{path}` has no attribute `{name}`")]
    NoAttribute {
        /// As asked.
        path: String,
        /// The attribute.
        name: String,
    },
    /// EOPNOTSUPP.
    #[error("`{path}`: not supported: {reason}")]
    NotSupported {
        /// As asked.
        path: String,
        /// What is.
        reason: String,
    },
    /// EINVAL.
    #[error("{field} `{value}`: {reason}")]
    Invalid {
        /// Which field of the call.
        field: String,
        /// What it held.
        value: String,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// ENAMETOOLONG.
    #[error(
        "name `{name}` is longer than {NAME_BYTES_MAX} bytes, or its path than {PATH_BYTES_MAX}"
    )]
    NameTooLong {
        /// The beginning of the name.
        name: String,
    },
    /// ELOOP.
    #[error("`{path}` goes through more than {SYMLINKS_MAX} symbolic links")]
    TooManySymlinks {
        /// As asked.
        path: String,
    },
    /// ELOOP: a path of the control plane leads through no symbolic link.
    #[error("`{path}`: `{name}` on it is a symbolic link, which the control plane does not follow")]
    SymlinkOnPath {
        /// As asked.
        path: String,
        /// The link.
        name: String,
    },
    /// EBUSY: the root cannot be moved or removed.
    #[error("`{path}` is the root directory")]
    IsRoot {
        /// As asked.
        path: String,
    },
    /// EIO, try again: routing, storage or the store of metadata is not there now.
    #[error("not now: {detail}")]
    Unavailable {
        /// What is missing.
        detail: String,
    },
    /// ENOSPC.
    #[error("no space for metadata: {detail}")]
    NoSpace {
        /// What the store said.
        detail: String,
    },
    /// EAGAIN, try again: too many answers are kept for retries of a volume's clients.
    #[error(
        "the clients of volume {volume} have {used} bytes of answers that they have not acknowledged, \
         and {more} bytes more do not fit into {max}; each change of a client acknowledges its earlier \
         ones, and a client that has ended counts for an hour: try again, or end clients that \
         acknowledge nothing"
    )]
    AnswersFull {
        /// The volume's directory.
        volume: InodeId,
        /// Bytes of them.
        used: i64,
        /// Bytes that the change needed.
        more: i64,
        /// The bound.
        max: i64,
    },
    /// EIO, for good: a row of the store contradicts another.
    #[error("metadata is damaged: {detail}")]
    Damaged {
        /// What was found.
        detail: String,
    },
}

impl MetaError {
    /// True when the same call may go well a moment later.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::AnswersFull { .. })
    }
}
