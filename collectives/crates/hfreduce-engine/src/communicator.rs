//! Communicator of a connected group: callers submit operations and get handles; one thread at a
//! time moves the data.

mod about;
mod call;
mod handle;
mod progress;
mod remote;

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fabric::arena::Arena;
use hfreduce_plan::Plan;

use crate::driver::{Backend, Identity, Shared, Submission, lock};
use crate::member::Member;
use crate::operation::Operation;
use crate::work::WorkState;
pub use call::Call;
pub use handle::{WaitError, Work};
use hfreduce_core::error::{AbortReason, CollectiveError, ErrorKind};
use hfreduce_core::{DType, Kind};
use progress::Inner;

/// The largest tag of a caller; the upper half is reserved for collective operations.
pub const TAG_MAX: u64 = COLLECTIVE_TAG - 1;
const COLLECTIVE_TAG: u64 = 1 << 63;
/// The longest timeout: a day. Infinite timeouts are not supported.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);

/// State that outlives the epochs of a communicator: its registered memory and its identity.
pub trait Session: Any + Send + Sync {
    /// Registered memory of this rank.
    ///
    /// # Errors
    /// The system call failed.
    fn arena(&self) -> io::Result<Arc<Arena>>;

    /// Number of membership changes so far.
    fn epoch(&self) -> u32;

    /// By rank: the epoch from which each member joined and the operations it completed there.
    fn previous_epochs(&self) -> Vec<Option<(u32, u64)>>;

    /// Connections that the port has refused.
    fn refused_connections(&self) -> Option<u64> {
        None
    }

    /// See [`Communicator::reconfigure`].
    ///
    /// # Errors
    /// The member that is missing, lost or disagrees.
    fn reconfigure(
        &self,
        communicator: &Communicator,
        members: &[Member],
        timeout: Duration,
    ) -> Result<Communicator, CollectiveError>;
}

/// A communicator. Closed when dropped.
pub struct Communicator {
    inner: Arc<Inner>,
    plan: Plan,
    session: Option<Box<dyn Session>>,
    background: Option<JoinHandle<()>>,
    closed: AtomicBool,
}

impl Communicator {
    /// Starts the background thread of a connected group.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        shared: Arc<Shared>,
        driver: Box<dyn Backend>,
        plan: Plan,
        session: Box<dyn Session>,
    ) -> std::io::Result<Self> {
        let inner = Arc::new(Inner::new(shared, driver));
        let background = inner.clone();
        let thread = std::thread::Builder::new()
            .name("hfreduce".into())
            .spawn(move || background.run_background())?;
        Ok(Self {
            inner,
            plan,
            session: Some(session),
            background: Some(thread),
            closed: AtomicBool::new(false),
        })
    }

    /// Runs the first barrier of all ranks, and then starts failure detection.
    pub fn meet(&self, timeout: Duration) -> Result<(), CollectiveError> {
        let work = self.call(Call::new(Kind::Barrier, DType::U8, timeout, true))?;
        work.wait(None).map_err(|error| match error {
            WaitError::Failed(error) => error,
            WaitError::StillRunning { .. } => {
                self.refused(ErrorKind::TimedOut, "connect", error.to_string())
            }
        })?;
        let soon = Instant::now() + timeout.max(Duration::from_secs(1));
        self.inner.with_driver(soon, |driver| driver.start_liveness());
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

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.identity().placement.world_size()
    }

    /// The trees.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Number of ranks of each node that own chunks.
    pub fn channels(&self) -> usize {
        self.identity().channels
    }

    /// The first error, once broken.
    pub fn error(&self) -> Option<CollectiveError> {
        self.inner.shared.error(None, "")
    }

    /// Aborts the communicator on every rank, without waiting.
    pub fn abort(&self, reason: &str) {
        self.inner.abort(ErrorKind::Aborted, reason);
    }

    /// Aborts the communicator because of a failure of this rank outside the engine, before it
    /// could call `operation`; returns the error to report.
    pub fn fail(&self, kind: ErrorKind, operation: &str, detail: String) -> CollectiveError {
        self.inner.abort(kind, &detail);
        self.refused(kind, operation, detail)
    }

    /// Completes operations in progress (for at most `timeout`), closes the connections and ends
    /// the threads. Returns the error that broke the communicator before, including operations that
    /// did not end in time.
    pub fn close(&self, timeout: Duration) -> Option<CollectiveError> {
        self.end(timeout, |driver, next, until| driver.close(next, until))
    }

    /// Closes the communicator with `leave`, which gets the number of the first operation that this
    /// rank will not start, and its deadline.
    ///
    /// Threads that wait for operations return the driver at once. Operations that have not ended
    /// by `timeout` fail, and only then is the communicator broken: no operation is left to a
    /// driver that makes no progress.
    fn end(
        &self,
        timeout: Duration,
        leave: impl FnOnce(&mut dyn Backend, u64, Instant),
    ) -> Option<CollectiveError> {
        if self.closed.swap(true, Ordering::SeqCst) || !self.inner.is_ours() {
            return None;
        }
        let shared = &self.inner.shared;
        let until = Instant::now() + timeout.min(TIMEOUT_MAX);
        let next = {
            let _submissions = lock(&shared.submissions);
            self.inner.closing.store(true, Ordering::SeqCst);
            self.inner.next.load(Ordering::SeqCst)
        };
        self.inner.stop.store(true, Ordering::SeqCst);
        self.inner.wake_background();
        let unfinished =
            (ErrorKind::Aborted, "closed while operations were in progress".to_owned());
        let mut broken = true;
        let ended = self.inner.with_driver(until + Duration::from_secs(1), |driver| {
            driver.drive(until, &|driver| !driver.is_busy());
            if driver.is_busy() && shared.broken.get().is_none() {
                *lock(&shared.abort_request) = Some(unfinished.clone());
                shared.mark_pending();
                driver.poll_once();
            }
            leave(driver, next, until);
            broken = shared.broken.set(self.closed_reason()).is_err();
        });
        if !ended {
            // A thread that gets no CPU holds the driver: it fails the operations at its next
            // check.
            lock(&shared.abort_request).get_or_insert(unfinished);
            shared.notify();
        }
        shared.recorder.close();
        if broken { self.error() } else { None }
    }

    fn closed_reason(&self) -> AbortReason {
        AbortReason::new(ErrorKind::PeerLeft, self.rank(), "this communicator is closed")
            .with_peer(self.rank(), self.identity().placement.node_name(self.rank()))
    }

    /// After `close`: releases the connections, the mapping of the segment and those of peer
    /// memory, however long the caller keeps the communicator.
    pub fn release(&self) {
        drop(self.inner.take_driver(Instant::now() + Duration::from_secs(1)));
    }

    /// Queues an operation. `lazy`: the background thread is not woken, since the caller waits.
    ///
    /// # Errors
    /// The communicator is broken or closed, or this is a forked child.
    pub fn submit(
        &self,
        mut operation: Operation,
        timeout: Duration,
        lazy: bool,
    ) -> Result<Work, CollectiveError> {
        let Operation { fingerprint, ref input, ref output, ref mut transfers } = operation;
        if !self.inner.is_ours() {
            return Err(self.inner.forked(fingerprint.kind.name()));
        }
        let pipelined = input.is_pipelined() || output.is_pipelined();
        if pipelined && !transfers.is_empty() {
            let detail = "its memory must be complete when it is called".to_owned();
            return Err(self.refused(ErrorKind::Invalid, fingerprint.kind.name(), detail));
        }
        let shared = &self.inner.shared;
        let work = {
            let mut submissions = lock(&shared.submissions);
            let sequence = self.inner.next.load(Ordering::SeqCst);
            let now = Instant::now();
            let timeout = timeout.min(TIMEOUT_MAX);
            let bytes = input.bytes().max(output.bytes());
            let timeout_ms = timeout.as_millis() as u64;
            let flight = shared.recorder.called(sequence, &fingerprint, bytes, timeout_ms, now);
            let work = Arc::new(WorkState::new(sequence, fingerprint, timeout, now, flight));
            if let Some(error) = shared.error(Some(&work), "being called") {
                shared.recorder.finished(flight, true, now);
                return Err(error);
            }
            if self.inner.closing.load(Ordering::SeqCst) {
                shared.recorder.finished(flight, true, now);
                let cause = Box::new(self.closed_reason());
                let error =
                    self.refused(ErrorKind::PeerLeft, fingerprint.kind.name(), String::new());
                return Err(CollectiveError { cause, ..error });
            }
            if !fingerprint.kind.is_message() {
                self.inner.next.store(sequence + 1, Ordering::SeqCst);
                transfers.iter_mut().for_each(|transfer| transfer.tag = COLLECTIVE_TAG | sequence);
            }
            submissions.push_back(Submission { operation, work: work.clone() });
            work
        };
        if lazy {
            shared.mark_pending();
        } else {
            shared.notify();
            self.inner.wake_background();
        }
        Ok(Work { state: work, inner: self.inner.clone() })
    }

    /// The error of a call that is rejected on this rank.
    pub fn refused(&self, kind: ErrorKind, operation: &str, detail: String) -> CollectiveError {
        self.inner.refused(kind, operation, detail)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.inner.is_ours() {
            // The threads to join exist only in the parent, which also closes the connections.
            std::mem::forget((self.background.take(), self.session.take()));
            return;
        }
        self.close(Duration::from_secs(1));
        if let Some(thread) = self.background.take() {
            let _ = thread.join();
        }
    }
}
