//! Mapping of client errors to errno.

use rustix::io::Errno;
use threefs_client::ClientError;
use threefs_meta::MetaError;

/// The errno of an error. `by_inode`: the operation named an inode that the kernel knew; if it is
/// gone, ESTALE makes the kernel look the path up again.
pub(crate) fn errno(error: &ClientError, by_inode: bool) -> Errno {
    match error {
        ClientError::Meta(error) => of_meta(error, by_inode),
        ClientError::NoSpace { .. } => Errno::NOSPC,
        ClientError::Stale { .. } => Errno::STALE,
        ClientError::Lost { .. }
        | ClientError::Corrupt { .. }
        | ClientError::NotReserved { .. }
        | ClientError::Changed { .. }
        | ClientError::Protocol { .. }
        | ClientError::Fenced { .. } => Errno::IO,
        ClientError::Unavailable { .. } => Errno::TIMEDOUT,
        ClientError::Refused { .. } => Errno::ACCESS,
        ClientError::InvalidArgument { .. } => Errno::INVAL,
    }
}

fn of_meta(error: &MetaError, by_inode: bool) -> Errno {
    match error {
        MetaError::NotFound { .. } if by_inode => Errno::STALE,
        MetaError::NotFound { .. } => Errno::NOENT,
        MetaError::Exists { .. } => Errno::EXIST,
        MetaError::NotADirectory { .. } => Errno::NOTDIR,
        MetaError::IsADirectory { .. } => Errno::ISDIR,
        MetaError::NotEmpty { .. } => Errno::NOTEMPTY,
        MetaError::PermissionDenied { .. } => Errno::ACCESS,
        MetaError::NotPermitted { .. } => Errno::PERM,
        MetaError::QuotaExceeded { .. } => Errno::DQUOT,
        MetaError::CrossQuota { .. } => Errno::XDEV,
        MetaError::FileTooLarge { .. } => Errno::FBIG,
        MetaError::NoAttribute { .. } => Errno::NODATA,
        MetaError::NotSupported { .. } => Errno::OPNOTSUPP,
        MetaError::Invalid { .. } => Errno::INVAL,
        MetaError::NameTooLong { .. } => Errno::NAMETOOLONG,
        MetaError::TooManySymlinks { .. } | MetaError::SymlinkOnPath { .. } => Errno::LOOP,
        MetaError::IsRoot { .. } => Errno::BUSY,
        MetaError::Unavailable { .. } | MetaError::AnswersFull { .. } => Errno::TIMEDOUT,
        MetaError::NoSpace { .. } => Errno::NOSPC,
        MetaError::TooManyLocks { .. } => Errno::NOLCK,
        MetaError::ReadOnly { .. } => Errno::ROFS,
        MetaError::Damaged { .. } => Errno::IO,
    }
}
