//! State of one operation, and waiting for it.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use fabric::atomics::{Atomic, Atomics, Native};
use hfreduce_core::Fingerprint;
use hfreduce_core::error::CollectiveError;
use hfreduce_core::matching::ANY_RANK;

const PENDING: u32 = 0;
const DONE: u32 = 1;
const FAILED: u32 = 2;

/// State of one operation, shared with its handle.
#[derive(Debug)]
pub struct WorkState {
    /// Sequence number.
    pub sequence: u64,
    /// Fingerprint.
    pub fingerprint: Fingerprint,
    /// Time at which the operation fails.
    pub deadline: Instant,
    /// Timeout given by the caller.
    pub timeout: Duration,
    /// Number of its flight record.
    pub flight: u64,
    completion: Completion,
    source: AtomicU32,
    error: OnceLock<CollectiveError>,
    callbacks: Callbacks,
}

impl WorkState {
    /// State of an operation that has been submitted.
    pub fn new(
        sequence: u64,
        fingerprint: Fingerprint,
        timeout: Duration,
        now: Instant,
        flight: u64,
    ) -> Self {
        Self {
            flight,
            sequence,
            fingerprint,
            deadline: now + timeout,
            timeout,
            completion: Completion::default(),
            source: AtomicU32::new(ANY_RANK),
            error: OnceLock::new(),
            callbacks: Callbacks::default(),
        }
    }

    /// Time of the call.
    pub fn started_at(&self) -> Instant {
        self.deadline - self.timeout
    }

    /// True once it has ended.
    pub fn is_done(&self) -> bool {
        self.completion.load() != PENDING
    }

    /// The result, if the operation has ended.
    pub fn result(&self) -> Option<Result<(), CollectiveError>> {
        match self.completion.load() {
            PENDING => None,
            DONE => Some(Ok(())),
            _ => self.error.get().cloned().map(Err),
        }
    }

    /// The sender of a receive from any rank, once known.
    pub fn source(&self) -> Option<u32> {
        Some(self.source.load(Ordering::Acquire)).filter(|rank| *rank != ANY_RANK)
    }

    pub fn set_source(&self, rank: u32) {
        self.source.store(rank, Ordering::Release);
    }

    /// Runs `callback` once the operation has ended: on the thread that ends it, or immediately.
    pub fn on_end(&self, callback: Callback) {
        {
            let mut callbacks = self.callbacks.lock();
            if !self.is_done() {
                callbacks.push(callback);
                return;
            }
        }
        callback();
    }

    pub fn complete(&self) {
        self.completion.store(DONE);
        self.callbacks.run();
    }

    pub fn fail(&self, error: CollectiveError) {
        let _ = self.error.set(error);
        self.completion.store(FAILED);
        self.callbacks.run();
    }
}

/// Callback at the end of an operation. It runs on a thread that moves data: it must neither wait
/// nor call the communicator.
pub type Callback = Box<dyn FnOnce() + Send>;

/// Callbacks of one operation. The end is published before they are taken, and a callback is added
/// only before that, under the same lock: each runs exactly once.
#[derive(Default)]
struct Callbacks(Mutex<Vec<Callback>>);

impl Callbacks {
    fn lock(&self) -> MutexGuard<'_, Vec<Callback>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let callbacks = std::mem::take(&mut *self.lock());
        for callback in callbacks {
            callback();
        }
    }
}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Callbacks({})", self.lock().len())
    }
}

/// How an operation ended, [`PENDING`] before. A thread that reads the end sees everything done
/// before: the result is in the caller's memory, which the engine no longer accesses.
#[derive(Debug)]
struct Completion<A: Atomics = Native>(A::U32);

impl<A: Atomics> Completion<A> {
    fn store(&self, how: u32) {
        self.0.store(how, Ordering::Release);
    }

    fn load(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
}

impl<A: Atomics> Default for Completion<A> {
    fn default() -> Self {
        Self(A::U32::default())
    }
}

/// Number of waiting threads. A thread that changes state and reads zero is seen by the next
/// waiter.
#[derive(Debug)]
struct WaiterCount<A: Atomics = Native>(A::U32);

impl<A: Atomics> WaiterCount<A> {
    /// Announces a waiter, which checks once more after this and then waits.
    fn enter(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
        A::fence(Ordering::SeqCst);
    }

    fn leave(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// True if a thread may have to be woken. Called after a change.
    fn has_waiters(&self) -> bool {
        A::fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) > 0
    }
}

impl<A: Atomics> Default for WaiterCount<A> {
    fn default() -> Self {
        Self(A::U32::default())
    }
}

/// Threads that wait while another one moves the data. Cheap without waiters.
#[derive(Debug, Default)]
pub struct Waiters {
    waiting: WaiterCount,
    mutex: Mutex<()>,
    wakeup: Condvar,
}

impl Waiters {
    /// Waits until `until` or [`Waiters::wake_all`]; returns immediately if `ready` holds already.
    pub fn wait(&self, until: Instant, ready: impl Fn() -> bool) {
        self.waiting.enter();
        let guard = self.lock();
        // Checked under the lock: a thread that changes it and calls `wake_all` afterwards finds
        // this one waiting.
        if !ready() {
            let remaining = until.saturating_duration_since(Instant::now());
            drop(self.wakeup.wait_timeout(guard, remaining));
        }
        self.waiting.leave();
    }

    /// Wakes all waiting threads.
    pub fn wake_all(&self) {
        if self.waiting.has_waiters() {
            drop(self.lock());
            self.wakeup.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hfreduce_core::{Determinism, Kind};
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    fn barrier() -> WorkState {
        let fingerprint = Fingerprint {
            kind: Kind::Barrier,
            dtype: 0,
            element_bytes: 1,
            op: 0,
            root: 0,
            count: 0,
            shape: 0,
            modes: Determinism::DEFAULT,
        };
        WorkState::new(0, fingerprint, Duration::from_secs(1), Instant::now(), 0)
    }

    fn counting(count: &Arc<AtomicUsize>) -> Callback {
        let count = count.clone();
        Box::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
        })
    }

    #[test]
    fn a_callback_registered_before_or_after_the_end_runs_once() {
        let work = barrier();
        let count = Arc::new(AtomicUsize::new(0));
        work.on_end(counting(&count));
        assert_eq!(count.load(Ordering::SeqCst), 0);
        work.complete();
        assert_eq!(count.load(Ordering::SeqCst), 1);
        work.on_end(counting(&count));
        work.complete();
        assert_eq!(count.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn callbacks_that_race_with_the_end_all_run() {
        for _ in 0..200 {
            let work = barrier();
            let count = Arc::new(AtomicUsize::new(0));
            std::thread::scope(|scope| {
                scope.spawn(|| work.on_end(counting(&count)));
                scope.spawn(|| work.complete());
            });
            assert_eq!(count.load(Ordering::SeqCst), 1);
        }
    }
}

#[cfg(test)]
mod models {
    use super::*;
    use fabric::atomics::model::*;
    use loom::cell::UnsafeCell;
    use std::sync::Arc;

    /// One thread moves the data and publishes the end; the caller uses its memory again.
    fn the_result_is_the_callers<A: Atomics>() {
        let shared = Arc::new((Completion::<A>::default(), UnsafeCell::new(0)));
        let moving = shared.clone();
        let backend = loom::thread::spawn(move || {
            // SAFETY: loom reports concurrent accesses.
            moving.1.with_mut(|value| unsafe { *value = 1 });
            moving.0.store(DONE);
        });
        if shared.0.load() == DONE {
            // SAFETY: as above.
            shared.1.with_mut(|value| unsafe { *value += 1 });
        }
        backend.join().unwrap();
    }

    #[test]
    fn the_end_makes_the_result_visible() {
        every_order(the_result_is_the_callers::<Modelled>);
        assert!(breaks(the_result_is_the_callers::<Weak<NO_RELEASE>>));
        assert!(breaks(the_result_is_the_callers::<Weak<NO_ACQUIRE>>));
    }

    /// The lock and the condition variable are not in the model: they only delay.
    fn one_sees_the_other<A: Atomics>() {
        let shared = Arc::new((WaiterCount::<A>::default(), A::U32::default()));
        let waiting = shared.clone();
        let waiter = loom::thread::spawn(move || {
            waiting.0.enter();
            waiting.1.load(Ordering::Acquire) == 1
        });
        shared.1.store(1, Ordering::Release);
        let notified = shared.0.has_waiters();
        assert!(waiter.join().unwrap() || notified, "never woken");
    }

    #[test]
    fn no_waiter_misses_a_change() {
        every_order(one_sees_the_other::<Modelled>);
        assert!(breaks(one_sees_the_other::<Weak<NO_FENCE>>));
        assert!(breaks(one_sees_the_other::<Weak<NO_TOTAL_ORDER>>));
    }
    /// The communicator's driver: one thread returns it, wakes the waiters and checks for pending
    /// work; the background thread, woken by the work, finds the driver free or in use.
    fn one_of_two_takes_the_news<A: Atomics>() {
        let shared = Arc::new((WaiterCount::<A>::default(), A::U32::default(), A::U32::default()));
        let background_shared = shared.clone();
        let background = loom::thread::spawn(move || {
            let (_, free, pending) = &*background_shared;
            pending.store(1, Ordering::Release);
            A::fence(Ordering::SeqCst);
            free.load(Ordering::Acquire) == 1
        });
        let (waiters, free, pending) = &*shared;
        free.store(1, Ordering::Release);
        waiters.has_waiters();
        let saw = pending.load(Ordering::Acquire) == 1;
        assert!(background.join().unwrap() || saw, "no thread moves it before the next tick");
    }

    #[test]
    fn events_during_the_return_of_the_driver_are_handled() {
        every_order(one_of_two_takes_the_news::<Modelled>);
        assert!(breaks(one_of_two_takes_the_news::<Weak<NO_FENCE>>));
        assert!(breaks(one_of_two_takes_the_news::<Weak<NO_TOTAL_ORDER>>));
    }
}
