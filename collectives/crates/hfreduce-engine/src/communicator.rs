//! A connected group of ranks: calls go in, handles come out, one thread moves the data.

mod about;
mod calls;
mod handle;
mod served;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hfreduce_plan::Plan;

use crate::cause::{Cause, CauseKind, CollectiveError};
use crate::core::{Fingerprint, Kind};
use crate::daemon::Seat;
use crate::drivers::{Identity, Mover, Shared, Submission, TICK, lock};
use crate::endpoint::Origin;
use crate::operation::{Buffer, Operation, Transfer};
use crate::process::Maker;
use crate::work::WorkState;
pub use handle::{WaitError, Work};

/// The largest tag of a caller; the upper half belongs to collective operations.
pub const TAG_MAX: u64 = COLLECTIVE_TAG - 1;
const COLLECTIVE_TAG: u64 = 1 << 63;
/// The longest time-out: a day. There is no "never".
pub(crate) const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);

struct Inner {
    shared: Arc<Shared>,
    /// None once the members have gone on without this epoch.
    driver: Mutex<Option<Mover>>,
    gate: Mutex<bool>,
    bell: Condvar,
    stop: AtomicBool,
    next: AtomicU64,
    /// The process that connected. A forked child has the memory and the sockets, and no thread:
    /// it must touch none of them.
    maker: Maker,
}

/// Where a communicator's connections and memory are.
pub(crate) enum Ground {
    /// Its own, from which another epoch may begin.
    Own(Box<Origin>),
    /// A daemon's.
    Daemon(Box<Seat>),
}

/// See the module's text. Closed when dropped.
pub struct Communicator {
    inner: Arc<Inner>,
    plan: Plan,
    ground: Option<Ground>,
    background: Option<JoinHandle<()>>,
    closed: AtomicBool,
}

impl Inner {
    /// Moves data with the calling thread, or waits for whoever does.
    fn wait(&self, mut now: Instant, until: Instant, done: impl Fn() -> bool) {
        while !done() && now < until {
            if !self.try_driver(|driver| driver.drive(until, &done)) {
                if self.shared.news.load(Ordering::SeqCst) {
                    self.shared.ring();
                }
                let free = || !matches!(self.driver.try_lock(), Err(TryLockError::WouldBlock));
                self.shared.room.wait(until, || done() || free());
            }
            if done() {
                break; // Without another look at the clock.
            }
            now = Instant::now();
        }
    }

    /// Lends the driver to `act` if nobody has it. Whoever waits is called when it is free again.
    fn try_driver(&self, act: impl FnOnce(&mut Mover)) -> bool {
        let mut lent = match self.driver.try_lock() {
            Ok(lent) => lent,
            Err(TryLockError::Poisoned(poisoned)) => {
                let mut lent = poisoned.into_inner();
                lent.iter_mut().for_each(Mover::give_up);
                lent
            }
            Err(TryLockError::WouldBlock) => return false,
        };
        let busy = lent.as_mut().is_some_and(|driver| {
            act(driver);
            driver.is_busy()
        });
        let retired = lent.is_none();
        drop(lent);
        self.shared.room.call();
        // A call that came after the look at `busy` woke a background thread that found the driver
        // taken. Which is looked at after the driver was given back, with the room's fence between.
        if busy || (!retired && self.shared.news.load(Ordering::SeqCst)) {
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
            fence(Ordering::SeqCst); // Between what woke us and whether the driver is free.
            self.try_driver(|driver| {
                driver.glance();
                if driver.is_busy() {
                    let stop = || self.stop.load(Ordering::SeqCst);
                    let until = Instant::now() + Duration::from_secs(3600);
                    driver.drive_all(until, stop);
                }
            });
        }
    }

    /// The same, asking whoever has it for it until `until`.
    fn with_driver(&self, until: Instant, act: impl FnOnce(&mut Mover)) {
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

    /// Takes the driver away, unless something is still under way: whoever submits from now on is told
    /// that this is over, and leaves nothing.
    fn take_driver(&self, until: Instant) -> Option<Mover> {
        self.with_driver(until, Mover::glance);
        while Instant::now() < until {
            match self.driver.try_lock() {
                Ok(mut lent) => return lent.take_if(|driver| !driver.is_busy()),
                Err(TryLockError::Poisoned(_)) => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        None
    }

    fn is_ours(&self) -> bool {
        self.maker.is_here()
    }

    /// Breaks the communicator on every rank, blaming this one; the first reason stays.
    fn abort(&self, kind: CauseKind, reason: &str) {
        lock(&self.shared.abort_asked).get_or_insert_with(|| (kind, reason.to_owned()));
        self.shared.ring();
        self.try_driver(Mover::glance);
        self.wake_background();
    }
}

impl Communicator {
    pub(crate) fn start(
        shared: Arc<Shared>,
        driver: Mover,
        plan: Plan,
        ground: Ground,
    ) -> std::io::Result<Self> {
        let inner = Arc::new(Inner {
            shared,
            driver: Mutex::new(Some(driver)),
            gate: Mutex::new(false),
            bell: Condvar::new(),
            stop: AtomicBool::new(false),
            next: AtomicU64::new(0),
            maker: Maker::new(),
        });
        let background = inner.clone();
        let thread = std::thread::Builder::new()
            .name("hfreduce".into())
            .spawn(move || background.run_background())?;
        Ok(Self {
            inner,
            plan,
            ground: Some(ground),
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
        self.inner.with_driver(soon, Mover::judge);
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

    /// The first cause, once broken.
    pub fn error(&self) -> Option<CollectiveError> {
        self.inner.shared.error(None, "")
    }

    /// Breaks the communicator on every rank. Waits for nobody.
    pub fn abort(&self, reason: &str) {
        self.inner.abort(CauseKind::Aborted, reason);
    }

    /// The same for what befell this rank outside the engine before it could call `operation`; the
    /// error to report.
    pub fn fail(&self, kind: CauseKind, operation: &str, detail: String) -> CollectiveError {
        self.inner.abort(kind, &detail);
        self.refused(kind, operation, detail)
    }

    /// Finishes what is under way (for at most `timeout`), takes leave and ends the threads. What
    /// broke it before that, if anything did: work that did not end in time, too.
    pub fn close(&self, timeout: Duration) -> Option<CollectiveError> {
        self.end(timeout, Mover::leave)
    }

    /// The same with this way of taking leave, which is told the number of the first operation that
    /// this rank will not begin, and until when.
    fn end(
        &self,
        timeout: Duration,
        leave: impl FnOnce(&mut Mover, u64, Instant),
    ) -> Option<CollectiveError> {
        if self.closed.swap(true, Ordering::SeqCst) || !self.inner.is_ours() {
            return None;
        }
        let until = Instant::now() + timeout.min(TIMEOUT_MAX);
        self.inner.stop.store(true, Ordering::SeqCst);
        self.inner.wake_background();
        let next = self.inner.next.load(Ordering::SeqCst);
        self.inner.with_driver(until + Duration::from_secs(1), |driver| {
            driver.drive_all(until, || false);
            if driver.is_busy() && self.inner.shared.broken.get().is_none() {
                *lock(&self.inner.shared.abort_asked) =
                    Some((CauseKind::Aborted, "closed while operations were under way".to_owned()));
                self.inner.shared.leave_word();
                driver.glance();
            }
            leave(driver, next, until);
        });
        let closed = Cause::new(CauseKind::PeerLeft, self.rank(), "this communicator is closed")
            .blaming(self.rank(), self.identity().placement.node_name(self.rank()));
        let broken = self.inner.shared.broken.set(closed).is_err();
        self.inner.shared.recorder.close();
        if broken { self.error() } else { None }
    }

    /// After `close`: the connections, our map of the node's memory and those of what neighbours
    /// lent go now, however long the caller keeps this.
    pub(crate) fn release(&self) {
        drop(self.inner.take_driver(Instant::now() + Duration::from_secs(1)));
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
                self.inner.maker.id()
            );
            return Err(self.refused(CauseKind::Invalid, print.kind.name(), detail));
        }
        let paced = input.is_paced() || output.is_paced();
        if paced && !transfers.is_empty() {
            let detail = "its memory must be there when it is called".to_owned();
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
            std::mem::forget((self.background.take(), self.ground.take()));
            return;
        }
        self.close(Duration::from_secs(1));
        if let Some(thread) = self.background.take() {
            let _ = thread.join();
        }
    }
}
