//! Errors of a storage service.

use fabric::auth::AuthError;
use fabric::rpc::ServerError;
use threefs_core::disks::Refusal;
use threefs_mgmtd::MgmtdError;

/// Error that ended a storage service or kept it from starting.
#[derive(Debug, thiserror::Error)]
pub enum StorageServiceError {
    /// The key file cannot be used.
    #[error(transparent)]
    Key(#[from] AuthError),
    /// The port cannot be served.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The data folder cannot be used.
    #[error("data folder `{path}`: {reason}")]
    Data {
        /// Path of the folder.
        path: String,
        /// Error of the operating system.
        reason: String,
    },
    /// The node id is that of a further disk of another service.
    #[error(
        "node id {0} is above 999999: higher ids are those of further disks of a service. Drain this \
         node with the former release, then start an empty one with a lower id"
    )]
    NodeId(u32),
    /// None of the disks belongs to this service.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Another process serves this node, or its data belongs to another cluster.
    #[error(transparent)]
    Replaced(#[from] MgmtdError),
}
