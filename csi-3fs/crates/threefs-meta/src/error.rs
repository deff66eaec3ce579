//! Errors of the metadata service.

use serde::{Deserialize, Serialize};
use threefs_core::ids::InodeId;

use crate::protocol::limits::{NAME_BYTES_MAX, PATH_BYTES_MAX, SYMLINKS_MAX};

/// Why a call failed; it changed nothing. The message contains paths and names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum MetaError {
    /// ENOENT.
    #[error("`{path}`: no such file or directory")]
    NotFound {
        /// As in the request, up to the missing name.
        path: String,
    },
    /// EEXIST.
    #[error("`{path}` already exists")]
    Exists {
        /// As in the request.
        path: String,
    },
    /// ENOTDIR.
    #[error("`{path}` is not a directory")]
    NotADirectory {
        /// As in the request, up to the name that is not a directory.
        path: String,
    },
    /// EISDIR.
    #[error("`{path}` is a directory")]
    IsADirectory {
        /// As in the request.
        path: String,
    },
    /// ENOTEMPTY.
    #[error("directory `{path}` is not empty")]
    NotEmpty {
        /// As in the request.
        path: String,
    },
    /// EACCES: denied by mode and owner.
    #[error("`{path}`: permission denied: {detail}")]
    PermissionDenied {
        /// As in the request, up to the name that denies access.
        path: String,
        /// The caller, the access and the inode.
        detail: String,
    },
    /// EPERM: only the owner or root may do this.
    #[error("`{path}`: operation not permitted: {reason}")]
    NotPermitted {
        /// As in the request.
        path: String,
        /// What is required.
        reason: String,
    },
    /// EDQUOT.
    #[error(
        "the quota of directory {directory} allows {max} {what}: {used} are in use and {more} more were \
         requested; remove files below it or raise its limit"
    )]
    QuotaExceeded {
        /// The directory with the quota.
        directory: InodeId,
        /// `bytes`, `inodes` or the kind of metadata.
        what: String,
        /// Current usage.
        used: i64,
        /// Requested in addition.
        more: i64,
        /// The limit.
        max: i64,
    },
    /// EXDEV: requires a copy.
    #[error("`{path}` cannot move from one quota to another: {reason}; copy it instead")]
    CrossQuota {
        /// As in the request.
        path: String,
        /// The reason.
        reason: String,
    },
    /// EFBIG.
    #[error("file too large: {detail}")]
    FileTooLarge {
        /// The requested and the largest size.
        detail: String,
    },
    /// ENODATA.
    #[error("`{path}` has no attribute `{name}`")]
    NoAttribute {
        /// As in the request.
        path: String,
        /// The attribute.
        name: String,
    },
    /// EOPNOTSUPP.
    #[error("`{path}`: not supported: {reason}")]
    NotSupported {
        /// As in the request.
        path: String,
        /// The reason.
        reason: String,
    },
    /// EINVAL.
    #[error("{field} `{value}`: {reason}")]
    Invalid {
        /// The invalid field of the request.
        field: String,
        /// Its value.
        value: String,
        /// What is invalid, and what is expected.
        reason: String,
    },
    /// ENAMETOOLONG.
    #[error(
        "name `{name}` is longer than {NAME_BYTES_MAX} bytes, or its path than {PATH_BYTES_MAX}"
    )]
    NameTooLong {
        /// The start of the name.
        name: String,
    },
    /// ELOOP.
    #[error("`{path}` has more than {SYMLINKS_MAX} symbolic links")]
    TooManySymlinks {
        /// As in the request.
        path: String,
    },
    /// ELOOP: the control plane does not follow symbolic links.
    #[error("`{path}`: `{name}` is a symbolic link, which the control plane does not follow")]
    SymlinkOnPath {
        /// As in the request.
        path: String,
        /// The link.
        name: String,
    },
    /// EBUSY: the root cannot be moved or removed.
    #[error("`{path}` is the root directory")]
    IsRoot {
        /// As in the request.
        path: String,
    },
    /// EIO, retryable: routing, storage or the metadata store is unavailable.
    #[error("temporarily unavailable: {detail}")]
    Unavailable {
        /// What is unavailable.
        detail: String,
    },
    /// ENOSPC.
    #[error("no space for metadata: {detail}")]
    NoSpace {
        /// The error of the store.
        detail: String,
    },
    /// EAGAIN, retryable: the answers kept for retries of a volume's clients have reached their
    /// bound.
    #[error(
        "the clients of volume {volume} have {used} bytes of unacknowledged answers, and {more} more \
         bytes exceed the limit of {max}; each change of a client acknowledges its earlier ones, and \
         the answers of a stopped client are kept for an hour: retry, or stop clients that do not \
         acknowledge"
    )]
    AnswersFull {
        /// The volume's directory.
        volume: InodeId,
        /// Bytes of answers that are kept.
        used: i64,
        /// Bytes that the change needs.
        more: i64,
        /// The bound.
        max: i64,
    },
    /// EIO, permanent: a row of the store contradicts another.
    #[error("metadata is damaged: {detail}")]
    Damaged {
        /// The contradiction.
        detail: String,
    },
    /// ENOLCK.
    #[error("too many locks: {what} are limited to {max}; release locks, or use fewer files")]
    TooManyLocks {
        /// What is limited.
        what: String,
        /// The limit.
        max: u64,
    },
    /// EROFS.
    #[error("`{path}`: snapshots are read-only")]
    ReadOnly {
        /// As in the request, or the inode.
        path: String,
    },
}

impl MetaError {
    /// True when a retry of the same call may succeed.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::AnswersFull { .. })
    }
}
