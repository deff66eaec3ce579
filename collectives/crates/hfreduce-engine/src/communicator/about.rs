//! What a communicator tells about itself.

use std::sync::atomic::Ordering;

use super::Communicator;
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
