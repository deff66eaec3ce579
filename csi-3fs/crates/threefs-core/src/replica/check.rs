//! Checks of the replica that a simulator can disable one at a time, to verify that its schedules
//! find the failures that each check prevents. Without the feature `simulator` all checks are made.
//! Checks whose absence no schedule detects are not listed.

use super::Config;

/// A check of the replica.
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
