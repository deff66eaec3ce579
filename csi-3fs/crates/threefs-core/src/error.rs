//! Errors of the storage service, and the remedy of the caller for each.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::checksum::Checksum;
use crate::ids::{
    ChainId, ChainVersion, ChunkId, ChunkVersion, ClientId, Epoch, InodeId, RequestTag, TargetId,
};
use crate::routing::PublicState;

/// Remedy of the caller; determined by the kind of the error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Remedy {
    /// Send the same request (same tag) to the same target again after a short wait.
    RetryAfterWait,
    /// Fetch newer routing, then send the same request (same tag) to the target that it names.
    RefreshRouting,
    /// Send the request to another SERVING replica of the chain.
    OtherReplica,
    /// Get the current epoch of the volume from the metadata service, then send the request (same
    /// tag) with it.
    RenewEpoch,
    /// Do not retry: the request is invalid, or its result is final.
    GiveUp,
}

/// Why a storage service did not execute a request.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum StorageError {
    /// Sender and receiver have different versions of the chain; the older one must be refreshed.
    #[error(
        "{chain}: request is for version {request_version}, this replica has version \
         {replica_version}"
    )]
    ChainVersionMismatch {
        /// The chain.
        chain: ChainId,
        /// The version in the request.
        request_version: ChainVersion,
        /// The version of this replica.
        replica_version: ChainVersion,
    },
    /// Client updates go to the head.
    #[error("{target} is not the head of {chain}: send updates to its first SERVING target")]
    NotHead {
        /// The receiver.
        target: TargetId,
        /// Its chain.
        chain: ChainId,
    },
    /// The sender of a forwarded update is not this target's predecessor.
    #[error("{from} is not the predecessor of {target}")]
    NotPredecessor {
        /// The sender.
        from: TargetId,
        /// The receiver.
        target: TargetId,
    },
    /// The target's state does not permit the request.
    #[error("{target} is {state}: it cannot serve this")]
    NotServing {
        /// The receiver.
        target: TargetId,
        /// Its state in this node's routing.
        state: PublicState,
    },
    /// The service has lost contact to mgmtd, or has just started and has no lease yet.
    #[error("{target} has no lease from mgmtd: it may have been replaced")]
    NoLease {
        /// The receiver.
        target: TargetId,
    },
    /// Unknown target.
    #[error("{target} is not on this node")]
    WrongTarget {
        /// The target in the request.
        target: TargetId,
    },
    /// The chunk has a pending update: it cannot be read before the commit.
    #[error("{chunk} has an uncommitted update: retry, or read from another replica")]
    ChunkNotCommit {
        /// Which chunk.
        chunk: ChunkId,
    },
    /// The chunk was never written, or was removed.
    #[error("{chunk} does not exist")]
    ChunkNotFound {
        /// Which chunk.
        chunk: ChunkId,
    },
    /// A forwarded update skips versions: the receiver lacks updates and will be resynced.
    #[error("{chunk}: update {update} cannot follow version {have}")]
    ChunkMissingUpdate {
        /// Which chunk.
        chunk: ChunkId,
        /// Newest version of the receiver.
        have: ChunkVersion,
        /// Version of the update.
        update: ChunkVersion,
    },
    /// A forwarded update is older than the committed version: a delayed message.
    #[error("{chunk}: update {update} is older than committed version {have}")]
    ChunkStaleUpdate {
        /// Which chunk.
        chunk: ChunkId,
        /// Committed version.
        have: ChunkVersion,
        /// Version of the update.
        update: ChunkVersion,
    },
    /// Another update is pending with the same version: the receiver will be resynced.
    #[error("{chunk}: another update is pending as version {version}")]
    ChunkConflict {
        /// Which chunk.
        chunk: ChunkId,
        /// The conflicting version.
        version: ChunkVersion,
    },
    /// A newer request of the channel was already accepted.
    #[error("{tag} is older than the newest request of its channel")]
    DuplicateUpdate {
        /// The tag.
        tag: RequestTag,
    },
    /// A later incarnation of the client has updated this replica. The request is a delayed copy;
    /// the later incarnation has repeated it if it was still needed.
    #[error("{tag} comes from an earlier incarnation of {successor}, which has replaced it")]
    Superseded {
        /// The tag.
        tag: RequestTag,
        /// The later incarnation.
        successor: ClientId,
    },
    /// Payload or chunk does not match its checksum.
    #[error("{chunk}: checksum {computed}, expected {expected}")]
    ChecksumMismatch {
        /// Which chunk.
        chunk: ChunkId,
        /// The expected checksum.
        expected: Checksum,
        /// The computed checksum.
        computed: Checksum,
    },
    /// The bytes on disk do not match their checksum. Other replicas have them; the repair has
    /// started.
    #[error("{chunk} is damaged on {target} (block {block}): read from another replica")]
    ChunkCorrupt {
        /// Which chunk.
        chunk: ChunkId,
        /// The target.
        target: TargetId,
        /// First damaged block of 4 KiB.
        block: u32,
    },
    /// The update would make the chunk larger than the file's chunk size.
    #[error("{chunk}: update ends at byte {end}, the chunk size of this file is {chunk_bytes}")]
    ChunkSizeMismatch {
        /// Which chunk.
        chunk: ChunkId,
        /// End of the update.
        end: u64,
        /// Chunk size of the file's layout.
        chunk_bytes: u32,
    },
    /// The disk under the target is full. Nothing was changed.
    #[error("no space left on {target}")]
    NoSpace {
        /// Which target.
        target: TargetId,
    },
    /// Too many requests are waiting.
    #[error("{target} has too many requests waiting")]
    Busy {
        /// Which target.
        target: TargetId,
    },
    /// The sync session of this message has ended or was restarted.
    #[error("{target}: the sync session of this message has ended")]
    SyncSessionMismatch {
        /// Which target.
        target: TargetId,
    },
    /// The request did not complete in time; its effect is unknown.
    #[error("{target}: deadline exceeded, the update may or may not take effect")]
    Timeout {
        /// Which target.
        target: TargetId,
    },
    /// The chunk store failed.
    #[error("{target}: store failed: {reason}")]
    StoreFailed {
        /// Which target.
        target: TargetId,
        /// Error of the store.
        reason: String,
    },
    /// The request is inconsistent.
    #[error("invalid request: {reason}")]
    InvalidRequest {
        /// Field, value and remedy.
        reason: String,
    },
    /// The update arrived after its expiry. This request had no effect.
    #[error("{target}: the update expired before it was started")]
    Expired {
        /// Which target.
        target: TargetId,
    },
    /// The file was removed for good and its inode number is never reused. (New variants go last:
    /// older versions decode by position.)
    #[error("{inode} was removed permanently: updates are refused")]
    InodeForgotten {
        /// Which file.
        inode: InodeId,
    },
    /// The update is for another version of the chunk. Nothing was changed.
    #[error("{chunk} has version {committed}, the update is for version {expected}")]
    ChunkChanged {
        /// Which chunk.
        chunk: ChunkId,
        /// As in the request.
        expected: ChunkVersion,
        /// Committed version.
        committed: ChunkVersion,
    },
    /// The update is of an epoch that has ended: the chunk has a version of a later one, and a
    /// snapshot may show this one.
    #[error(
        "{chunk} has a version of epoch {newest}: repeat the update with the current epoch of its \
         volume"
    )]
    EpochEnded {
        /// Which chunk, with the epoch of the update.
        chunk: ChunkId,
        /// The epoch of the newest version.
        newest: Epoch,
    },
    /// The update is of an epoch that has ended, or it does not name its volume.
    #[error(
        "{chunk}: {}: repeat the update with volume and current epoch of its file",
        fence_text(fence)
    )]
    Fenced {
        /// Which chunk, with the epoch of the update.
        chunk: ChunkId,
        /// Earlier epochs are refused; `None` if this service cannot know it.
        fence: Option<Epoch>,
    },
    /// The receiver does not have the update that is confirmed: the sender forwards it.
    #[error("{chunk}: update {update} is not prepared here")]
    NotPrepared {
        /// Which chunk.
        chunk: ChunkId,
        /// Version of the update.
        update: ChunkVersion,
    },
}

fn fence_text(fence: &Option<Epoch>) -> String {
    match fence {
        Some(fence) => format!("epochs of its volume before {fence} have ended"),
        None => "its volume is not named, or its fence is not known here".into(),
    }
}

impl StorageError {
    /// The remedy of the caller.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::ChainVersionMismatch { .. }
            | Self::NotHead { .. }
            | Self::NotPredecessor { .. }
            | Self::NotServing { .. }
            | Self::NoLease { .. }
            | Self::WrongTarget { .. }
            | Self::ChunkMissingUpdate { .. }
            | Self::ChunkConflict { .. }
            | Self::SyncSessionMismatch { .. }
            | Self::Timeout { .. }
            | Self::StoreFailed { .. } => Remedy::RefreshRouting,
            Self::ChunkNotCommit { .. }
            | Self::ChecksumMismatch { .. }
            | Self::Busy { .. }
            | Self::Expired { .. }
            | Self::NotPrepared { .. } => Remedy::RetryAfterWait,
            Self::ChunkCorrupt { .. } => Remedy::OtherReplica,
            Self::ChunkNotFound { .. }
            | Self::ChunkStaleUpdate { .. }
            | Self::DuplicateUpdate { .. }
            | Self::Superseded { .. }
            | Self::ChunkSizeMismatch { .. }
            | Self::NoSpace { .. }
            | Self::InvalidRequest { .. }
            | Self::InodeForgotten { .. }
            | Self::ChunkChanged { .. } => Remedy::GiveUp,
            Self::EpochEnded { .. } | Self::Fenced { .. } => Remedy::RenewEpoch,
        }
    }

    /// The file whose epoch must be renewed.
    #[must_use]
    pub fn inode(&self) -> Option<InodeId> {
        match self {
            Self::EpochEnded { chunk, .. } | Self::Fenced { chunk, .. } => Some(chunk.inode),
            _ => None,
        }
    }

    /// Whether a retry of the same request (same tag) can succeed.
    #[must_use]
    pub fn retryable(&self) -> bool {
        self.remedy() != Remedy::GiveUp
    }
}

/// Why a chunk store failed. The failed call changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StoreError {
    /// No space for the update.
    #[error("no space left: {needed_bytes} bytes needed")]
    NoSpace {
        /// Size of the update.
        needed_bytes: u64,
    },
    /// The content on disk does not match its checksum.
    #[error("{chunk} is damaged in block {block}")]
    Corrupt {
        /// Which chunk.
        chunk: ChunkId,
        /// First damaged block of 4 KiB.
        block: u32,
    },
    /// The store cannot be opened: its log is incomplete or inconsistent. Opening it again does not
    /// help.
    #[error("the store is damaged: {reason}")]
    Damaged {
        /// The inconsistency.
        reason: String,
    },
    /// No content: never written, removed, or not in the requested state.
    #[error("{chunk} has no such content")]
    NotFound {
        /// Which chunk.
        chunk: ChunkId,
    },
    /// The operating system reported an error. After a failed flush the store refuses updates: it
    /// is unknown what the kernel has dropped.
    #[error("{operation}: {reason}")]
    Io {
        /// The operation and its file.
        operation: String,
        /// The error of the system.
        reason: String,
    },
    /// The payload was damaged before it reached the store.
    #[error("the payload for {chunk} has checksum {computed}, not {expected}")]
    PayloadDamaged {
        /// Which chunk.
        chunk: ChunkId,
        /// The sender's checksum.
        expected: Checksum,
        /// Checksum of the payload.
        computed: Checksum,
    },
}

impl StoreError {
    /// The error that a storage service returns to callers.
    #[must_use]
    pub fn at(self, target: TargetId) -> StorageError {
        match self {
            Self::NoSpace { .. } => StorageError::NoSpace { target },
            Self::Corrupt { chunk, block } => StorageError::ChunkCorrupt { chunk, target, block },
            Self::NotFound { chunk } => StorageError::ChunkNotFound { chunk },
            Self::Damaged { reason } => StorageError::StoreFailed { target, reason },
            Self::PayloadDamaged { chunk, expected, computed } => {
                StorageError::ChecksumMismatch { chunk, expected, computed }
            }
            Self::Io { operation, reason } => {
                StorageError::StoreFailed { target, reason: format!("{operation}: {reason}") }
            }
        }
    }
}
