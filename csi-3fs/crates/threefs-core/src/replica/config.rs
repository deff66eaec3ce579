//! Configuration of a replica, and its checks.

use crate::ids::{ChainId, Incarnation, TargetId};

/// Limits and timeouts of a replica.
#[derive(Clone, Debug)]
pub struct Config {
    /// This target.
    pub target: TargetId,
    /// Its chain.
    pub chain: ChainId,
    /// Number of this opening of the store; each opening has a different one.
    pub incarnation: Incarnation,
    /// Timeout of a call to another replica, after which it is repeated.
    pub call_timeout_ms: u64,
    /// First pause before a failed call is repeated; doubles up to `retry_wait_ms_max`.
    pub retry_wait_ms: u64,
    /// Maximum pause before a failed call is repeated.
    pub retry_wait_ms_max: u64,
    /// A store operation that takes longer makes the target report itself OFFLINE: a disk that
    /// hangs blocks its chain, a disk that fails does not.
    pub store_stall_ms: u64,
    /// How long a SYNCING target without space stays OFFLINE.
    pub full_wait_ms: u64,
    /// How long a removed chunk of an existing file is remembered: longer than a client retries an
    /// update.
    pub purge_after_ms: u64,
    /// Maximum number of requests that wait for one chunk.
    pub chunk_queue_max: usize,
    /// Maximum number of operations in progress.
    pub ops_max: usize,
    /// Chunks that a sync sends concurrently. Each holds one chunk in memory.
    pub sync_window: usize,
    /// Chunk metas per page of a sync.
    pub sync_page: usize,
    /// The disabled check.
    #[cfg(feature = "simulator")]
    pub without: Option<Check>,
}

impl Config {
    /// Defaults for one target of one chain.
    #[must_use]
    pub fn new(target: TargetId, chain: ChainId, incarnation: Incarnation) -> Self {
        Self {
            target,
            chain,
            incarnation,
            call_timeout_ms: 2_000,
            retry_wait_ms: 20,
            retry_wait_ms_max: 500,
            store_stall_ms: 10_000,
            full_wait_ms: 5_000,
            purge_after_ms: 60_000,
            chunk_queue_max: 64,
            ops_max: 4_096,
            sync_window: 8,
            sync_page: 256,
            #[cfg(feature = "simulator")]
            without: None,
        }
    }
}

/// A check of the replica. A simulator can disable one at a time, to verify that its schedules find
/// the failures that each check prevents. Without the feature `simulator` all checks are made. Checks
/// whose absence no schedule detects are not listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// A replica that serves needs a lease.
    Lease,
    /// A chunk with a pending state is not read.
    NothingPending,
    /// A retry is recognized by the tags of its chunk.
    Tags,
    /// An update that waited in its queue may have expired.
    Expiry,
    /// A whole chunk is newer than the one received before it.
    Sequence,
    /// A replica that left SERVING is not up to date.
    Demotion,
    /// A replica whose store stalled is not up to date.
    Stall,
    /// A replica without room for a sync is not up to date.
    Room,
    /// A replica waits for its successor before it replies that inodes are forgotten.
    ForgetDownChain,
    /// A removed chunk is purged only when all updates from before the removal have expired.
    PurgeAge,
    /// A replica purges a chunk after its successor has.
    PurgeDownChain,
    /// A removed version of a chunk is purged only after all older ones.
    PurgeOldest,
    /// An update of an epoch is refused once its chunk has a version of a later one.
    Epoch,
    /// A new version of a chunk starts with the content of the version before it.
    CopyContent,
    /// A new version of a chunk starts with the tags of the version before it.
    CopyTags,
    /// A version that a snapshot shows is not dropped.
    ShownVersions,
    /// A version is dropped only if all snapshots that can show it are listed.
    CompleteList,
    /// An update of an epoch that has ended does not start.
    Fence,
    /// A fence is confirmed once all earlier operations have ended.
    DrainedOperations,
    /// A confirmation is of one chain version.
    DrainedInChain,
    /// A pending state is resolved only if the predecessor has it.
    Confirmed,
    /// The head keeps an update that its successor may have.
    Announced,
}

impl Config {
    /// Whether `check` is made.
    #[cfg(feature = "simulator")]
    pub(super) fn makes(&self, check: Check) -> bool {
        self.without != Some(check)
    }

    /// Whether `check` is made.
    #[cfg(not(feature = "simulator"))]
    #[allow(clippy::unused_self)] // The same signature as the one above.
    pub(super) const fn makes(&self, _check: Check) -> bool {
        true
    }
}
