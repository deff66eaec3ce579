//! What a communicator tells about itself.

use std::sync::atomic::Ordering;

use fabric::arena::Block;

use super::Communicator;
use crate::cause::{CauseKind, CollectiveError};
use crate::drivers::Counters;
use crate::endpoint::Origin;
use crate::flight::Snapshot;

impl Communicator {
    /// What this rank did.
    pub fn counters(&self) -> &Counters {
        let counters = &self.inner.shared.counters;
        if let Some(origin) = &self.origin {
            counters.refused.store(origin.refused(), Ordering::Relaxed);
        }
        counters
    }

    /// Zeroed memory that the ranks of this node read and write in place when a buffer lies in it: no
    /// copy on the way in or out. It may outlive the communicator.
    ///
    /// # Errors
    /// There is no more of it (`HFREDUCE_REGISTERED_BYTES`), or what the kernel says.
    pub fn allocate(&self, bytes: usize) -> Result<Block, CollectiveError> {
        let refuse = |detail: String| self.refused(CauseKind::Invalid, "allocate", detail);
        let Some(origin) = self.origin() else {
            return Err(refuse("this is a forked child: connect after forking".to_owned()));
        };
        let arena = origin.arena().map_err(|error| refuse(error.to_string()))?;
        arena.allocate(bytes).map_err(|error| refuse(error.to_string()))
    }

    /// Bytes of this rank's registered memory that are handed out.
    pub fn registered_bytes(&self) -> usize {
        self.origin().and_then(|origin| origin.arena().ok()).map_or(0, |arena| arena.used())
    }

    /// How often its members have changed.
    pub fn epoch(&self) -> u32 {
        self.origin.as_ref().map_or(0, Origin::epoch)
    }

    /// Collective operations that ended here without an error, each after all before it. The
    /// meeting of `connect` is the first.
    pub fn completed(&self) -> u64 {
        let inner = &self.inner;
        inner.next.load(Ordering::SeqCst).min(inner.shared.unended.load(Ordering::SeqCst))
    }

    /// By rank: the epoch that each member left for this one, and how many operations it had
    /// completed there. None for newcomers, and for all in the first epoch.
    pub fn came_from(&self) -> Vec<Option<(u32, u64)>> {
        self.origin.iter().flat_map(Origin::came_from).collect()
    }

    /// Where the next epoch begins; none in a forked child.
    pub(crate) fn origin(&self) -> Option<&Origin> {
        self.origin.as_ref().filter(|_| self.inner.is_ours())
    }

    /// What this rank did last.
    pub fn flight(&self) -> Option<Snapshot> {
        self.inner.shared.recorder.snapshot()
    }
}
