//! Watermarks of a buffer that fills and drains during its operation, so that copies from and to a
//! GPU overlap with the reduction.
//!
//! Both watermarks are byte counts and only grow. The producer of the input advances `arrived` and
//! notifies the engine (`Work::arrived`); the engine advances `delivered` and unparks the watcher.
//! An operation that has ended advances neither and accesses its memory no more.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::thread::Thread;

use fabric::atomics::{Atomic, Atomics, Native};

/// A monotonic byte count; a reader sees everything that was done to the bytes before it.
#[derive(Debug)]
struct Prefix<A: Atomics = Native>(A::U64);

impl<A: Atomics> Prefix<A> {
    fn grow(&self, end: usize) {
        // Compare and exchange: the thread sanitizer does not support `fetch_max`, which is the
        // same on most processors. The first guess returns the count; a load before it would hide
        // orders from the model checker.
        let (end, mut current) = (end as u64, 0);
        while current < end {
            match self.0.compare_exchange(current, end, Release, Relaxed) {
                Ok(_) => break,
                Err(now) => current = now,
            }
        }
    }

    fn end(&self) -> usize {
        self.0.load(Acquire) as usize
    }
}

impl<A: Atomics> Default for Prefix<A> {
    fn default() -> Self {
        Self(A::U64::default())
    }
}

/// Progress of the memory of one operation, in bytes from its start.
#[derive(Debug, Default)]
pub struct Watermarks {
    arrived: Prefix,
    delivered: Prefix,
    watcher: OnceLock<Thread>,
}

impl Watermarks {
    /// Creates watermarks at zero; `watcher` is unparked whenever more is delivered.
    #[inline]
    pub fn with_watcher(watcher: Thread) -> Self {
        Self { watcher: watcher.into(), ..Self::default() }
    }

    /// The bytes before `end` of the input have arrived and will not be written again.
    #[inline]
    pub fn arrive(&self, end: usize) {
        self.arrived.grow(end);
    }

    /// Bytes of the input that have arrived.
    #[inline]
    pub fn arrived(&self) -> usize {
        self.arrived.end()
    }

    /// The bytes before `end` of the output are final.
    #[inline]
    pub fn deliver(&self, end: usize) {
        self.delivered.grow(end);
        if let Some(watcher) = self.watcher.get() {
            watcher.unpark();
        }
    }

    /// Bytes of the output that are final.
    #[inline]
    pub fn delivered(&self) -> usize {
        self.delivered.end()
    }
}

#[cfg(test)]
mod models {
    use super::*;
    use fabric::atomics::model::*;
    use loom::cell::UnsafeCell;
    use std::sync::Arc;

    /// One thread produces bytes and reports them, also out of order; another consumes what has
    /// arrived.
    fn what_has_arrived_is_there<A: Atomics>() {
        let shared = Arc::new((Prefix::<A>::default(), UnsafeCell::new(0)));
        let bringing = shared.clone();
        let bringer = loom::thread::spawn(move || {
            // SAFETY: loom reports concurrent accesses.
            bringing.1.with_mut(|value| unsafe { *value = 1 });
            bringing.0.grow(8);
            bringing.0.grow(4);
        });
        if shared.0.end() >= 8 {
            // SAFETY: as above.
            assert_eq!(shared.1.with(|value| unsafe { *value }), 1);
        }
        bringer.join().unwrap();
        assert_eq!(shared.0.end(), 8);
    }

    #[test]
    fn bytes_are_accessed_only_after_they_arrived() {
        every_order(what_has_arrived_is_there::<Modelled>);
        assert!(breaks(what_has_arrived_is_there::<Weak<NO_RELEASE>>));
        assert!(breaks(what_has_arrived_is_there::<Weak<NO_ACQUIRE>>));
    }
}
