//! Checks of the replica that a simulator can leave out, one at a time, to show that its schedules
//! find what each of them prevents. Without the feature `simulator` every check is always made.

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
    /// The state that an update changes has nothing pending.
    PendingFirst,
    /// An update that waited in line may have expired there.
    Expiry,
    /// A forwarded update follows the version that the replica has.
    NextVersion,
    /// The successor has committed what it was sent.
    SameOutcome,
    /// A whole chunk is of the session of this sync.
    Session,
    /// A whole chunk is newer than the one taken before it.
    Sequence,
    /// A sync starts when the store is not at work for anything else.
    StoreIdle,
    /// A sync waits for updates that are under way.
    UnderWay,
    /// A replica that left SERVING is not up to date.
    Demotion,
    /// A replica whose store stalled is not up to date.
    Stall,
    /// A replica without room for a sync is not up to date.
    Room,
    /// A replica asks its successor before it answers that inodes are forgotten.
    ForgetDownChain,
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
