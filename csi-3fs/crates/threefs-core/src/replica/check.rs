//! Checks of the replica that a simulator can leave out, one at a time, to show that its schedules
//! find what each of them prevents. Without the feature `simulator` every check is always made.
//! Checks whose absence no schedule notices are not listed.

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
    /// An update that waited in line may have expired there.
    Expiry,
    /// A whole chunk is newer than the one taken before it.
    Sequence,
    /// A replica that left SERVING is not up to date.
    Demotion,
    /// A replica whose store stalled is not up to date.
    Stall,
    /// A replica without room for a sync is not up to date.
    Room,
    /// A replica asks its successor before it answers that inodes are forgotten.
    ForgetDownChain,
    /// A removed chunk is purged only when all updates from before have expired.
    PurgeAge,
    /// A replica purges a chunk after its successor has.
    PurgeDownChain,
}

impl Config {
    /// Is `check` made?
    #[cfg(feature = "simulator")]
    pub(super) fn makes(&self, check: Check) -> bool {
        self.without != Some(check)
    }

    /// Is `check` made?
    #[cfg(not(feature = "simulator"))]
    #[allow(clippy::unused_self)] // The same signature as the one above.
    pub(super) const fn makes(&self, _check: Check) -> bool {
        true
    }
}
