//! Memory that fills and empties while its operation runs: what a copy from and to a GPU needs to
//! overlap with the sum.
//!
//! Both counters are prefixes and only grow. Whoever brings the input moves `arrived` and rings the
//! engine (`Work::arrived`); the engine moves `delivered` and wakes the watcher. An operation that
//! has ended moves neither, and touches its memory no more.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Thread;

/// How far the memory of one operation is, in bytes from its beginning.
#[derive(Debug, Default)]
pub struct Pace {
    arrived: AtomicUsize,
    delivered: AtomicUsize,
    watcher: OnceLock<Thread>,
}

impl Pace {
    /// Nothing has arrived; `watcher` is unparked whenever more is delivered.
    pub fn watched_by(watcher: Thread) -> Self {
        Self { watcher: watcher.into(), ..Self::default() }
    }

    /// The bytes before `end` of the input are there and are not written any more.
    pub(crate) fn arrive(&self, end: usize) {
        self.arrived.fetch_max(end, Ordering::Release);
    }

    /// How many bytes of the input are there.
    pub fn arrived(&self) -> usize {
        self.arrived.load(Ordering::Acquire)
    }

    /// The bytes before `end` of the output are final.
    pub(crate) fn deliver(&self, end: usize) {
        self.delivered.fetch_max(end, Ordering::Release);
        if let Some(watcher) = self.watcher.get() {
            watcher.unpark();
        }
    }

    /// How many bytes of the output are final.
    pub fn delivered(&self) -> usize {
        self.delivered.load(Ordering::Acquire)
    }
}
