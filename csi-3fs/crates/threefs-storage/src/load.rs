//! Load of a disk: small updates in progress, and how long a flush takes.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread::available_parallelism;
use std::time::Duration;

/// With more small updates in progress for each processor, the processors are taken to be busy.
const UPDATES_OF_PROCESSOR: usize = 2;
/// A flush that takes longer costs more than the messages with which replicas flush at the same time.
const FLUSH_SHORT_MAX: Duration = Duration::from_micros(300);
/// Weight of the last flush in the average: 1 / 8.
const AVERAGE_SHIFT: u32 = 3;

/// Most small updates in progress with which all are announced.
static UPDATES_LOW_MAX: LazyLock<usize> =
    LazyLock::new(|| UPDATES_OF_PROCESSOR * available_parallelism().map_or(1, usize::from));

/// Load of a disk.
#[derive(Default)]
pub(crate) struct Load {
    updates: AtomicUsize,
    /// Moving average, in nanoseconds; 0 before the first flush.
    flush_ns: AtomicU64,
}

/// A small update in progress, until it is dropped.
pub(crate) struct InProgress<'a>(&'a Load);

impl Load {
    /// Counts a small update.
    pub(crate) fn start(&self) -> InProgress<'_> {
        self.updates.fetch_add(1, Relaxed);
        InProgress(self)
    }

    /// A flush, or the wait for one, has ended. Of several that end at once, one may not count.
    pub(crate) fn flushed(&self, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let next = match self.flush_ns.load(Relaxed) {
            0 => took,
            average => average - (average >> AVERAGE_SHIFT) + (took >> AVERAGE_SHIFT),
        };
        self.flush_ns.store(next, Relaxed);
    }

    /// Whether a small update is worth a `Prepare` and a `Confirm` to the successor instead of a
    /// `Forward`: the replicas flush at the same time. That shortens the wait for one update. With
    /// many in progress on a disk that flushes quickly, the further messages take the time of the
    /// processors from other updates.
    pub(crate) fn is_worth_messages(&self) -> bool {
        self.updates.load(Relaxed) <= *UPDATES_LOW_MAX
            || Duration::from_nanos(self.flush_ns.load(Relaxed)) > FLUSH_SHORT_MAX
    }
}

impl Drop for InProgress<'_> {
    fn drop(&mut self) {
        self.0.updates.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_saved_under_load_on_a_quick_disk() {
        let load = Load::default();
        let mut updates: Vec<_> = (0..*UPDATES_LOW_MAX).map(|_| load.start()).collect();
        assert!(load.is_worth_messages());
        updates.push(load.start());
        load.flushed(FLUSH_SHORT_MAX * 2);
        assert!(load.is_worth_messages(), "the first flush counts as it is");
        for _ in 0..40 {
            load.flushed(FLUSH_SHORT_MAX / 4);
        }
        assert!(!load.is_worth_messages());
        for _ in 0..40 {
            load.flushed(FLUSH_SHORT_MAX * 2);
        }
        assert!(load.is_worth_messages());
        for _ in 0..40 {
            load.flushed(FLUSH_SHORT_MAX / 4);
        }
        assert!(!load.is_worth_messages());
        updates.pop();
        assert!(load.is_worth_messages());
    }
}
