//! A connected group of ranks: calls go in, handles come out, one thread moves the data.

mod calls;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fabric::tcp::Port;
use hfreduce_plan::Plan;

use crate::cause::{Cause, CauseKind, CollectiveError};
use crate::core::{Fingerprint, Kind};
use crate::drivers::{Counters, Driver, Identity, Shared, Submission, TICK, lock};
use crate::flight::Snapshot;
use crate::operation::{Buffer, Operation, Transfer};
use crate::work::WorkState;

/// The largest tag of a caller; the upper half belongs to collective operations.
pub const TAG_MAX: u64 = COLLECTIVE_TAG - 1;
const COLLECTIVE_TAG: u64 = 1 << 63;
/// The longest time-out: a day. There is no "never".
const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);

/// A handle of one operation.
#[derive(Clone)]
pub struct Work {
    state: Arc<WorkState>,
    inner: Arc<Inner>,
}

/// How a wait ended without the operation having ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// The operation failed.
    #[error(transparent)]
    Failed(#[from] CollectiveError),
    /// The time given to the wait passed; the operation goes on.
    #[error(
        "{operation} #{sequence} is not done after {waited:?}; it goes on until its own deadline"
    )]
    StillRunning {
        /// The operation.
        operation: String,
        /// Its number.
        sequence: u64,
        /// The time waited.
        waited: Duration,
    },
}

struct Inner {
    shared: Arc<Shared>,
    driver: Mutex<Driver>,
    gate: Mutex<bool>,
    bell: Condvar,
    stop: AtomicBool,
    next: AtomicU64,
    /// The process that connected. A forked child has the memory and the sockets, and no thread:
    /// it must touch none of them.
    process: u32,
}

/// See the module's text. Closed when dropped.
pub struct Communicator {
    inner: Arc<Inner>,
    plan: Plan,
    port: Option<Port>,
    background: Option<JoinHandle<()>>,
    closed: AtomicBool,
}

impl Inner {
    /// Moves data with the calling thread, or waits for whoever does.
    fn wait(&self, work: &WorkState, until: Instant) {
        while !work.is_done() && Instant::now() < until {
            if self.try_driver(|driver| driver.drive(until, |_| work.is_done())) {
                continue;
            }
            if self.shared.news.load(Ordering::SeqCst) {
                self.shared.ring();
            }
            let free = || !matches!(self.driver.try_lock(), Err(TryLockError::WouldBlock));
            self.shared.room.wait(until, || work.is_done() || free());
        }
    }

    /// Lends the driver to `act` if nobody has it. Whoever waits is called when it is free again.
    fn try_driver(&self, act: impl FnOnce(&mut Driver)) -> bool {
        let busy = match self.driver.try_lock() {
            Ok(mut driver) => {
                act(&mut driver);
                driver.is_busy()
            }
            Err(TryLockError::Poisoned(poisoned)) => {
                let mut driver = poisoned.into_inner();
                driver.give_up();
                act(&mut driver);
                driver.is_busy()
            }
            Err(TryLockError::WouldBlock) => return false,
        };
        self.shared.room.call();
        if busy {
            self.wake_background();
        }
        true
    }

    fn wake_background(&self) {
        *lock(&self.gate) = true;
        self.bell.notify_one();
    }

    fn run_background(&self) {
        while !self.stop.load(Ordering::SeqCst) {
            {
                let mut gate = lock(&self.gate);
                if !*gate {
                    gate = match self.bell.wait_timeout(gate, TICK) {
                        Ok((gate, _)) => gate,
                        Err(poisoned) => poisoned.into_inner().0,
                    };
                }
                *gate = false;
            }
            self.try_driver(|driver| {
                driver.glance();
                if driver.is_busy() {
                    let stop = || self.stop.load(Ordering::SeqCst);
                    let until = Instant::now() + Duration::from_secs(3600);
                    driver.drive(until, |driver| !driver.is_busy() || stop());
                }
            });
        }
    }

    /// The same, asking whoever has it for it until `until`.
    fn with_driver(&self, until: Instant, act: impl FnOnce(&mut Driver)) {
        let mut act = Some(act);
        while Instant::now() < until {
            let lent = self.try_driver(|driver| {
                if let Some(act) = act.take() {
                    act(driver);
                }
            });
            if lent {
                return;
            }
            self.shared.ring();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }
}

impl Work {
    /// Waits until the operation has ended, at most `timeout` (its own deadline ends it anyway).
    ///
    /// # Errors
    /// [`WaitError`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<(), WaitError> {
        let started = Instant::now();
        // The driver ends every operation soon after its deadline; the margin is for a machine
        // that is too busy to run it.
        let last = self.state.deadline.max(started) + Duration::from_secs(60);
        let until = timeout.map_or(last, |timeout| last.min(started + timeout.min(TIMEOUT_MAX)));
        if self.inner.is_ours() {
            self.inner.wait(&self.state, until);
        }
        match self.state.result() {
            Some(result) => Ok(result?),
            None => Err(WaitError::StillRunning {
                operation: self.state.print.describe(),
                sequence: self.state.sequence,
                waited: started.elapsed(),
            }),
        }
    }

    /// True if it should have ended long ago: the engine has a fault, or gets no processor.
    pub fn is_overdue(&self) -> bool {
        !self.is_done() && Instant::now() > self.state.deadline + Duration::from_secs(60)
    }

    /// True once it has ended.
    pub fn is_done(&self) -> bool {
        self.state.is_done()
    }

    /// Why it failed, if it did.
    pub fn error(&self) -> Option<CollectiveError> {
        self.state.result()?.err()
    }

    /// Its number in the communicator.
    pub fn sequence(&self) -> u64 {
        self.state.sequence
    }
}

impl Communicator {
    pub(crate) fn start(
        shared: Arc<Shared>,
        driver: Driver,
        plan: Plan,
        port: Port,
    ) -> std::io::Result<Self> {
        let inner = Arc::new(Inner {
            shared,
            driver: Mutex::new(driver),
            gate: Mutex::new(false),
            bell: Condvar::new(),
            stop: AtomicBool::new(false),
            next: AtomicU64::new(0),
            process: std::process::id(),
        });
        let background = inner.clone();
        let thread = std::thread::Builder::new()
            .name("hfreduce".into())
            .spawn(move || background.run_background())?;
        Ok(Self {
            inner,
            plan,
            port: Some(port),
            background: Some(thread),
            closed: AtomicBool::new(false),
        })
    }

    /// Meets everybody once; only then is silence judged.
    pub(crate) fn meet(&self, timeout: Duration) -> Result<(), CollectiveError> {
        let work = self.barrier(timeout, true)?;
        work.wait(None).map_err(|error| match error {
            WaitError::Failed(error) => error,
            WaitError::StillRunning { .. } => {
                self.refused(CauseKind::TimedOut, "connect", error.to_string())
            }
        })?;
        let soon = Instant::now() + timeout.max(Duration::from_secs(1));
        self.inner.with_driver(soon, |driver| driver.judging = true);
        self.inner.shared.recorder.open();
        Ok(())
    }

    fn identity(&self) -> &Identity {
        &self.inner.shared.identity
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.identity().rank
    }

    /// How many ranks.
    pub fn world_size(&self) -> usize {
        self.identity().placement.world_size()
    }

    /// The trees.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// How many ranks of each node share its work.
    pub fn channels(&self) -> usize {
        self.identity().channels
    }

    /// What this rank did.
    pub fn counters(&self) -> &Counters {
        let counters = &self.inner.shared.counters;
        if let Some(port) = &self.port {
            let refused = port.counters().refused.load(Ordering::Relaxed);
            counters.refused.store(refused, Ordering::Relaxed);
        }
        counters
    }

    /// What this rank did last.
    pub fn flight(&self) -> Option<Snapshot> {
        self.inner.shared.recorder.snapshot()
    }

    /// The first cause, once broken.
    pub fn error(&self) -> Option<CollectiveError> {
        self.inner.shared.error(None, "")
    }

    /// Breaks the communicator on every rank. Waits for nobody.
    pub fn abort(&self, reason: &str) {
        *lock(&self.inner.shared.abort_asked) = Some(reason.to_owned());
        self.inner.shared.ring();
        self.inner.try_driver(Driver::glance);
        self.inner.wake_background();
    }

    /// Finishes what is under way (for at most `timeout`), takes leave and ends the threads. What
    /// broke it before that, if anything did: work that did not end in time, too.
    pub fn close(&self, timeout: Duration) -> Option<CollectiveError> {
        if self.closed.swap(true, Ordering::SeqCst) || !self.inner.is_ours() {
            return None;
        }
        let until = Instant::now() + timeout.min(TIMEOUT_MAX);
        self.inner.stop.store(true, Ordering::SeqCst);
        self.inner.wake_background();
        let next = self.inner.next.load(Ordering::SeqCst);
        self.inner.with_driver(until + Duration::from_secs(1), |driver| {
            driver.drive(until, |driver| !driver.is_busy());
            if driver.is_busy() && self.inner.shared.broken.get().is_none() {
                *lock(&self.inner.shared.abort_asked) =
                    Some("closed while operations were under way".to_owned());
                self.inner.shared.leave_word();
                driver.glance();
            }
            driver.leave(next, until);
        });
        let closed = Cause::new(CauseKind::PeerLeft, self.rank(), "this communicator is closed")
            .blaming(self.rank(), self.identity().placement.node_name(self.rank()));
        let broken = self.inner.shared.broken.set(closed).is_err();
        self.inner.shared.recorder.close();
        if broken { self.error() } else { None }
    }

    pub(crate) fn submit(
        &self,
        print: Fingerprint,
        input: Buffer,
        output: Buffer,
        transfers: Vec<Transfer>,
        timeout: Duration,
        lazy: bool,
    ) -> Result<Work, CollectiveError> {
        if !self.inner.is_ours() {
            let detail = format!(
                "process {} connected and this is a child of it: connect after forking",
                self.inner.process
            );
            return Err(self.refused(CauseKind::Invalid, print.kind.name(), detail));
        }
        let shared = &self.inner.shared;
        let mut transfers = transfers;
        let work = {
            let mut submissions = lock(&shared.submissions);
            let collective = !matches!(print.kind, Kind::Send | Kind::Recv);
            let sequence = self.inner.next.load(Ordering::SeqCst);
            let now = Instant::now();
            let timeout = timeout.min(TIMEOUT_MAX);
            let bytes = input.bytes().max(output.bytes());
            let timeout_ms = timeout.as_millis() as u64;
            let flight = shared.recorder.called(sequence, &print, bytes, timeout_ms, now);
            let work = Arc::new(WorkState::new(sequence, print, timeout, now, flight));
            if let Some(error) = shared.error(Some(&work), "being called") {
                shared.recorder.finished(flight, true, now);
                return Err(error);
            }
            if collective {
                self.inner.next.store(sequence + 1, Ordering::SeqCst);
                transfers.iter_mut().for_each(|transfer| transfer.tag = COLLECTIVE_TAG | sequence);
            }
            let operation = Operation { print, input, output, transfers };
            submissions.push_back(Submission { operation, work: work.clone() });
            work
        };
        if lazy {
            shared.leave_word();
        } else {
            shared.ring();
            self.inner.wake_background();
        }
        Ok(Work { state: work, inner: self.inner.clone() })
    }

    pub(crate) fn refused(
        &self,
        kind: CauseKind,
        operation: &str,
        detail: String,
    ) -> CollectiveError {
        let identity = self.identity();
        let node = identity.placement.node_name(identity.rank);
        CollectiveError {
            job: identity.job.as_str().into(),
            rank: identity.rank,
            node: node.into(),
            operation: operation.to_owned(),
            sequence: -1,
            phase: "being called".to_owned(),
            cause: Box::new(Cause::new(kind, identity.rank, detail).blaming(identity.rank, node)),
            flight_record: None,
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.inner.is_ours() {
            // The threads to join exist in the parent alone, and so does the right to say farewell.
            std::mem::forget((self.background.take(), self.port.take()));
            return;
        }
        self.close(Duration::from_secs(1));
        if let Some(thread) = self.background.take() {
            let _ = thread.join();
        }
    }
}
