//! Errors of the storage service, and what the caller has to do about each.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::checksum::Checksum;
use crate::ids::{
    ChainId, ChainVersion, ChunkId, ChunkVersion, ClientId, InodeId, RequestTag, TargetId,
};
use crate::routing::PublicState;

/// What a caller does next. Follows from the error's kind alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Remedy {
    /// Send the same request (same tag) to the same target again after a short wait.
    RetryAfterWait,
    /// Fetch newer routing, then send the same request (same tag) to whom it names.
    RefreshRouting,
    /// Ask another SERVING replica of the chain.
    OtherReplica,
    /// Do not retry: the request itself is wrong, or already answered for good.
    GiveUp,
}

/// Why a storage service did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum StorageError {
    /// The two sides know different versions of the chain; the one with the older one refreshes.
    #[error("{chain}: request is for version {theirs}, this replica knows {mine}")]
    ChainVersionMismatch {
        /// Which chain.
        chain: ChainId,
        /// As in the request.
        theirs: ChainVersion,
        /// As known here.
        mine: ChainVersion,
    },
    /// Client updates go to the head.
    #[error("{target} is not the head of {chain}: send updates to its first SERVING target")]
    NotHead {
        /// Asked.
        target: TargetId,
        /// Its chain.
        chain: ChainId,
    },
    /// The sender of a forwarded update is not this target's predecessor.
    #[error("{from} is not the predecessor of {target}")]
    NotPredecessor {
        /// Who sent.
        from: TargetId,
        /// Who was asked.
        target: TargetId,
    },
    /// The target is in no state to do this.
    #[error("{target} is {state}: it cannot serve this")]
    NotServing {
        /// Asked.
        target: TargetId,
        /// Its state as known here.
        state: PublicState,
    },
    /// The service has lost touch with mgmtd, or has just started and is not yet sure of itself.
    #[error("{target} has no lease from mgmtd: it may have been replaced")]
    NoLease {
        /// Asked.
        target: TargetId,
    },
    /// No such target here.
    #[error("{target} is not on this node")]
    WrongTarget {
        /// Asked.
        target: TargetId,
    },
    /// A read met a pending update: it may not be answered before the commit.
    #[error("{chunk} has an uncommitted update: read again, or from another replica")]
    ChunkNotCommit {
        /// Which chunk.
        chunk: ChunkId,
    },
    /// No such chunk (never written, or removed).
    #[error("{chunk} does not exist")]
    ChunkNotFound {
        /// Which chunk.
        chunk: ChunkId,
    },
    /// A forwarded update skips versions: the receiver missed something and will be resynced.
    #[error("{chunk}: update {update} cannot follow version {have}")]
    ChunkMissingUpdate {
        /// Which chunk.
        chunk: ChunkId,
        /// Newest version here.
        have: ChunkVersion,
        /// Version of the update.
        update: ChunkVersion,
    },
    /// A forwarded update is older than what is committed: a message that came late.
    #[error("{chunk}: update {update} is older than committed version {have}")]
    ChunkStaleUpdate {
        /// Which chunk.
        chunk: ChunkId,
        /// Committed here.
        have: ChunkVersion,
        /// Version of the update.
        update: ChunkVersion,
    },
    /// Another update is pending under the same version: the receiver will be resynced.
    #[error("{chunk}: another update is pending as version {version}")]
    ChunkConflict {
        /// Which chunk.
        chunk: ChunkId,
        /// The version in dispute.
        version: ChunkVersion,
    },
    /// A newer request of the channel was already taken.
    #[error("{tag} is older than what its channel has already sent")]
    DuplicateUpdate {
        /// The tag.
        tag: RequestTag,
    },
    /// A later life of the client has updated this replica: what an earlier one has sent is a late
    /// copy, and its successor has sent it again where it was still needed.
    #[error("{tag} comes from an earlier life of {successor}, which has replaced it")]
    Superseded {
        /// The tag.
        tag: RequestTag,
        /// The later life.
        successor: ClientId,
    },
    /// Payload or chunk is not what its checksum says.
    #[error("{chunk}: checksum {got}, expected {expected}")]
    ChecksumMismatch {
        /// Which chunk.
        chunk: ChunkId,
        /// As announced.
        expected: Checksum,
        /// As computed.
        got: Checksum,
    },
    /// The bytes on disk are not what was written. Another replica has them; repair has begun.
    #[error("{chunk} is damaged on {target} (block {block}): read another replica")]
    ChunkCorrupt {
        /// Which chunk.
        chunk: ChunkId,
        /// Where.
        target: TargetId,
        /// First damaged block of 4 KiB.
        block: u32,
    },
    /// The update would make the chunk larger than the file's chunk size.
    #[error("{chunk}: update ends at byte {end}, chunks of this file have {chunk_bytes}")]
    ChunkSizeMismatch {
        /// Which chunk.
        chunk: ChunkId,
        /// Where the update ends.
        end: u64,
        /// What the file's layout says.
        chunk_bytes: u32,
    },
    /// The disk under the target is full. Nothing was changed.
    #[error("no space left on {target}")]
    NoSpace {
        /// Which target.
        target: TargetId,
    },
    /// Too many requests wait already.
    #[error("{target} has too many requests waiting")]
    Busy {
        /// Which target.
        target: TargetId,
    },
    /// The sync this message belongs to is over or was started anew.
    #[error("{target}: the sync session of this message is over")]
    SyncSessionMismatch {
        /// Which target.
        target: TargetId,
    },
    /// The request did not come to an end in its time; its effect is unknown.
    #[error("{target}: no end within the deadline, the update may or may not take effect")]
    Timeout {
        /// Which target.
        target: TargetId,
    },
    /// The chunk store failed.
    #[error("{target}: store failed: {reason}")]
    StoreFailed {
        /// Which target.
        target: TargetId,
        /// What it said.
        reason: String,
    },
    /// The request contradicts itself.
    #[error("invalid request: {reason}")]
    InvalidRequest {
        /// Field, value and remedy.
        reason: String,
    },
    /// The update came after the moment until which its sender might have it begun. This request
    /// had no effect.
    #[error("{target}: the update came too late to be begun")]
    Expired {
        /// Which target.
        target: TargetId,
    },
    /// The file was removed for good and its inode number is never used again. (New variants go
    /// last: older versions know the others by their places.)
    #[error("{inode} was removed for good: it takes no updates")]
    InodeForgotten {
        /// Which file.
        inode: InodeId,
    },
}

impl StorageError {
    /// What the caller has to do.
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
            | Self::Expired { .. } => Remedy::RetryAfterWait,
            Self::ChunkCorrupt { .. } => Remedy::OtherReplica,
            Self::ChunkNotFound { .. }
            | Self::ChunkStaleUpdate { .. }
            | Self::DuplicateUpdate { .. }
            | Self::Superseded { .. }
            | Self::ChunkSizeMismatch { .. }
            | Self::NoSpace { .. }
            | Self::InvalidRequest { .. }
            | Self::InodeForgotten { .. } => Remedy::GiveUp,
        }
    }

    /// Is the same request (same tag) worth another try somewhere?
    #[must_use]
    pub fn retryable(&self) -> bool {
        self.remedy() != Remedy::GiveUp
    }
}

/// What a chunk store says when it cannot do something. Nothing was changed by the failed call.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StoreError {
    /// No room for the update.
    #[error("no space left: {needed_bytes} bytes needed")]
    NoSpace {
        /// For this update.
        needed_bytes: u64,
    },
    /// What is on disk does not match its checksum.
    #[error("{chunk} is damaged in block {block}")]
    Corrupt {
        /// Which chunk.
        chunk: ChunkId,
        /// First damaged block of 4 KiB.
        block: u32,
    },
    /// The store cannot be opened as it is: what its log says is incomplete or impossible. Opening it
    /// again does not help.
    #[error("the store is damaged: {reason}")]
    Damaged {
        /// What was found.
        reason: String,
    },
    /// No content: never written, removed, or without the state that was asked for.
    #[error("{chunk} has no such content")]
    NotFound {
        /// Which chunk.
        chunk: ChunkId,
    },
    /// The operating system said no. After a failed flush the store stays closed to updates: what
    /// the kernel dropped then cannot be known.
    #[error("{operation}: {reason}")]
    Io {
        /// What was tried, on which file.
        operation: String,
        /// What the system said.
        reason: String,
    },
}

impl StoreError {
    /// As a storage service tells it to others.
    #[must_use]
    pub fn at(self, target: TargetId) -> StorageError {
        match self {
            Self::NoSpace { .. } => StorageError::NoSpace { target },
            Self::Corrupt { chunk, block } => StorageError::ChunkCorrupt { chunk, target, block },
            Self::NotFound { chunk } => StorageError::ChunkNotFound { chunk },
            Self::Damaged { reason } => StorageError::StoreFailed { target, reason },
            Self::Io { operation, reason } => {
                StorageError::StoreFailed { target, reason: format!("{operation}: {reason}") }
            }
        }
    }
}
