//! The handle of one operation, and the room where threads wait for them.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::atomics::{Atomic, Atomics, Native};
use crate::cause::CollectiveError;
use crate::core::Fingerprint;
use crate::core::pair::ANY_RANK;

const PENDING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// What is known of one operation from outside.
#[derive(Debug)]
pub struct WorkState {
    /// Its number.
    pub sequence: u64,
    /// What it is.
    pub print: Fingerprint,
    /// When it gives up.
    pub deadline: Instant,
    /// What it was given.
    pub timeout: Duration,
    /// Its number in the flight recorder.
    pub flight: u64,
    state: AtomicU8,
    source: AtomicU32,
    error: OnceLock<CollectiveError>,
}

impl WorkState {
    /// One that is under way.
    pub fn new(
        sequence: u64,
        print: Fingerprint,
        timeout: Duration,
        now: Instant,
        flight: u64,
    ) -> Self {
        Self {
            flight,
            sequence,
            print,
            deadline: now + timeout,
            timeout,
            state: AtomicU8::new(PENDING),
            source: AtomicU32::new(ANY_RANK),
            error: OnceLock::new(),
        }
    }

    /// When it was called.
    pub fn began(&self) -> Instant {
        self.deadline - self.timeout
    }

    /// True once it has ended.
    pub fn is_done(&self) -> bool {
        self.state.load(Ordering::Acquire) != PENDING
    }

    /// How it ended, if it did.
    pub fn result(&self) -> Option<Result<(), CollectiveError>> {
        match self.state.load(Ordering::Acquire) {
            PENDING => None,
            DONE => Some(Ok(())),
            _ => self.error.get().cloned().map(Err),
        }
    }

    /// Who sent what a receive from anybody was given; none before, and none for anything else.
    pub fn source(&self) -> Option<u32> {
        Some(self.source.load(Ordering::Acquire)).filter(|rank| *rank != ANY_RANK)
    }

    pub(crate) fn came_from(&self, rank: u32) {
        self.source.store(rank, Ordering::Release);
    }

    pub(crate) fn complete(&self) {
        self.state.store(DONE, Ordering::Release);
    }

    pub(crate) fn fail(&self, error: CollectiveError) {
        let _ = self.error.set(error);
        self.state.store(FAILED, Ordering::Release);
    }
}

/// How many wait. Whoever changes something and finds nobody here is seen by whoever comes.
#[derive(Debug)]
struct Attendance<A: Atomics = Native>(A::U32);

impl<A: Atomics> Attendance<A> {
    /// The thread looks once more at everything after this, and then waits.
    fn come(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
        A::fence(Ordering::SeqCst);
    }

    fn go(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// After a change: true if somebody may have to be told.
    fn is_anybody_there(&self) -> bool {
        A::fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) > 0
    }
}

impl<A: Atomics> Default for Attendance<A> {
    fn default() -> Self {
        Self(A::U32::default())
    }
}

/// Where threads wait while another one moves the data. Cheap while nobody waits.
#[derive(Debug, Default)]
pub struct WaitingRoom {
    waiting: Attendance,
    mutex: Mutex<()>,
    bell: Condvar,
}

impl WaitingRoom {
    /// Waits until `until` or a call of [`WaitingRoom::call`]; not at all if `ready` holds already.
    pub fn wait(&self, until: Instant, ready: impl Fn() -> bool) {
        self.waiting.come();
        let guard = self.lock();
        // Looked at under the lock: whoever changes it and calls after that finds us waiting.
        if !ready() {
            let left = until.saturating_duration_since(Instant::now());
            drop(self.bell.wait_timeout(guard, left));
        }
        self.waiting.go();
    }

    /// Everybody in the room looks again.
    pub fn call(&self) {
        if self.waiting.is_anybody_there() {
            drop(self.lock());
            self.bell.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod models {
    use super::*;
    use crate::atomics::model::*;
    use std::sync::Arc;

    /// The lock that the room's bell goes with is not in the model: it only delays.
    fn one_sees_the_other<A: Atomics>() {
        let shared = Arc::new((Attendance::<A>::default(), A::U32::default()));
        let waiting = shared.clone();
        let waiter = loom::thread::spawn(move || {
            waiting.0.come();
            waiting.1.load(Ordering::Acquire) == 1
        });
        shared.1.store(1, Ordering::Release);
        let told = shared.0.is_anybody_there();
        assert!(waiter.join().unwrap() || told, "waits for ever");
    }

    #[test]
    fn nobody_waits_for_what_has_happened() {
        every_order(one_sees_the_other::<Modelled>);
        assert!(breaks(one_sees_the_other::<Weak<NO_FENCE>>));
        assert!(breaks(one_sees_the_other::<Weak<NO_TOTAL_ORDER>>));
    }
}
