//! Progress of a communicator: one thread at a time holds the driver, a waiting one or the background
//! thread.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, TryLockError};
use std::time::{Duration, Instant};

use crate::driver::{Backend, Shared, TICK, lock};
use crate::fork_guard::ForkGuard;
use hfreduce_core::error::{AbortReason, CollectiveError, ErrorKind};

/// State of a communicator that its handles and its background thread share.
pub(super) struct Inner {
    pub shared: Arc<Shared>,
    /// None once the members have continued in another epoch.
    driver: Mutex<Option<Box<dyn Backend>>>,
    gate: Mutex<bool>,
    wakeup: Condvar,
    pub stop: AtomicBool,
    /// Threads that need the driver now: a waiting thread that holds it returns it.
    claims: AtomicU32,
    /// New operations are refused. Changed under the lock of the submissions.
    pub closing: AtomicBool,
    pub next: AtomicU64,
    /// The process that connected. A forked child has the memory and the sockets, but no thread: it
    /// must not use them.
    fork_guard: ForkGuard,
}

impl Inner {
    pub fn new(shared: Arc<Shared>, driver: Box<dyn Backend>) -> Self {
        Self {
            shared,
            driver: Mutex::new(Some(driver)),
            gate: Mutex::new(false),
            wakeup: Condvar::new(),
            stop: AtomicBool::new(false),
            claims: AtomicU32::new(0),
            closing: AtomicBool::new(false),
            next: AtomicU64::new(0),
            fork_guard: ForkGuard::new(),
        }
    }

    /// Moves data with the calling thread, or waits for the thread that does.
    pub fn wait(&self, mut now: Instant, until: Instant, done: impl Fn() -> bool) {
        while !done() && now < until {
            let leaves = || done() || self.is_claimed();
            if self.is_claimed() || !self.try_driver(|driver| driver.drive(until, &|_| leaves())) {
                if self.shared.pending.load(Ordering::SeqCst) {
                    self.shared.notify();
                }
                let free = || !matches!(self.driver.try_lock(), Err(TryLockError::WouldBlock));
                self.shared.waiters.wait(until, || done() || (!self.is_claimed() && free()));
            }
            if done() {
                break; // Without reading the clock again.
            }
            now = Instant::now();
        }
    }

    /// Runs `act` with the driver if it is free, and then wakes the threads that wait for it.
    pub fn try_driver(&self, act: impl FnOnce(&mut dyn Backend)) -> bool {
        let mut guard = match self.driver.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => {
                let mut guard = poisoned.into_inner();
                guard.iter_mut().for_each(|driver| driver.fail_after_panic());
                guard
            }
            Err(TryLockError::WouldBlock) => return false,
        };
        let busy = guard.as_mut().is_some_and(|driver| {
            act(&mut **driver);
            driver.is_busy()
        });
        let retired = guard.is_none();
        drop(guard);
        self.shared.waiters.wake_all();
        // A call that arrived after `is_busy` woke a background thread that found the driver in
        // use. It is checked after the driver was returned, with the fence of `waiters` in between.
        if busy || (!retired && self.shared.pending.load(Ordering::SeqCst)) {
            self.wake_background();
        }
        true
    }

    pub fn wake_background(&self) {
        *lock(&self.gate) = true;
        self.wakeup.notify_one();
    }

    pub fn run_background(&self) {
        while !self.stop.load(Ordering::SeqCst) {
            {
                let mut gate = lock(&self.gate);
                if !*gate {
                    gate = match self.wakeup.wait_timeout(gate, TICK) {
                        Ok((gate, _)) => gate,
                        Err(poisoned) => poisoned.into_inner().0,
                    };
                }
                *gate = false;
            }
            fence(Ordering::SeqCst); // Between the wake-up and the check whether the driver is free.
            if self.is_claimed() {
                continue; // The claiming thread wakes this one if operations remain.
            }
            self.try_driver(|driver| {
                driver.poll_once();
                if driver.is_busy() {
                    let stop = || self.stop.load(Ordering::SeqCst) || self.is_claimed();
                    let until = Instant::now() + Duration::from_secs(3600);
                    driver.drive(until, &|driver| !driver.is_busy() || stop());
                }
            });
        }
    }

    pub fn is_claimed(&self) -> bool {
        self.claims.load(Ordering::SeqCst) > 0
    }

    /// Runs `act` with the driver, which a waiting thread returns; false if it was not free before
    /// `until`.
    pub fn with_driver(&self, until: Instant, act: impl FnOnce(&mut dyn Backend)) -> bool {
        let _claim = Claim::new(self);
        let mut act = Some(act);
        loop {
            let was_free = self.try_driver(|driver| {
                if let Some(act) = act.take() {
                    act(driver);
                }
            });
            if was_free || Instant::now() >= until {
                return was_free;
            }
            self.shared.notify();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Takes the driver away, unless operations are in progress: later calls fail.
    pub fn take_driver(&self, until: Instant) -> Option<Box<dyn Backend>> {
        let _claim = Claim::new(self);
        self.with_driver(until, |driver| driver.poll_once());
        while Instant::now() < until {
            match self.driver.try_lock() {
                Ok(mut guard) => return guard.take_if(|driver| !driver.is_busy()),
                Err(TryLockError::Poisoned(_)) => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        None
    }

    pub fn is_ours(&self) -> bool {
        self.fork_guard.is_owner()
    }

    /// The error of a call in a forked child: memory and sockets belong to the parent.
    pub fn forked(&self, operation: &str) -> CollectiveError {
        let detail = format!(
            "process {} connected and this is a child of it: connect after forking",
            self.fork_guard.id()
        );
        self.refused(ErrorKind::Invalid, operation, detail)
    }

    pub fn refused(&self, kind: ErrorKind, operation: &str, detail: String) -> CollectiveError {
        let identity = &self.shared.identity;
        let node = identity.placement.node_name(identity.rank);
        CollectiveError {
            job: identity.job.as_str().into(),
            rank: identity.rank,
            node: node.into(),
            operation: operation.to_owned(),
            sequence: -1,
            phase: "being called".to_owned(),
            cause: Box::new(
                AbortReason::new(kind, identity.rank, detail).with_peer(identity.rank, node),
            ),
            flight_record: None,
        }
    }

    /// Aborts the communicator on every rank, naming this one; the first reason stays. Does nothing
    /// in a forked child: the group belongs to its parent.
    pub fn abort(&self, kind: ErrorKind, reason: &str) {
        if !self.is_ours() {
            return;
        }
        lock(&self.shared.abort_request).get_or_insert_with(|| (kind, reason.to_owned()));
        self.shared.notify();
        self.try_driver(|driver| driver.poll_once());
        self.wake_background();
    }
}

/// While a claim exists, threads that wait for an operation leave the driver to the claiming
/// thread.
struct Claim<'a>(&'a Inner);

impl<'a> Claim<'a> {
    fn new(inner: &'a Inner) -> Self {
        inner.claims.fetch_add(1, Ordering::SeqCst);
        Self(inner)
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.0.claims.fetch_sub(1, Ordering::SeqCst);
        self.0.shared.waiters.wake_all();
    }
}
