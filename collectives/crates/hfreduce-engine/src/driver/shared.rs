//! What callers and the driver share without the driver's lock.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::fd::OwnedFd;

use super::poller;
use super::priority::Priority;
use crate::core::{Determinism, Kind};
use crate::error::{AbortReason, CollectiveError, ErrorKind};
use crate::flight::Recorder;
use crate::operation::Operation;
use crate::placement::Placement;
use crate::share::{Charge, Share};
use crate::work::{Waiters, WorkState};

/// Who this rank is.
#[derive(Debug)]
pub struct Identity {
    /// The job, for messages.
    pub job: String,
    /// This rank.
    pub rank: u32,
    /// Where everybody is.
    pub placement: Placement,
    /// How many ranks of each node own a channel.
    pub channels: usize,
    /// Silence after which a peer counts as stopped.
    pub liveness: Duration,
    /// The ranks share processors and are the only node: large sums go round.
    pub ring_accumulation: bool,
    /// What its operations promise about bits.
    pub determinism: Determinism,
    /// By rank: a daemon runs its part.
    pub served: Vec<bool>,
    /// Whose chunks go first, of the communicators with the same share.
    pub priority: Priority,
    /// What it shares with its user's other ranks here.
    pub share: Arc<Share>,
    /// How long ours wait for others' at most.
    pub held_back: Duration,
    /// Interface and address that other nodes try first; empty if there are none.
    pub reached_at: String,
}

impl Identity {
    /// The node of this rank.
    pub fn node(&self) -> usize {
        self.placement.node_of(self.rank)
    }

    /// The ranks of this node.
    pub fn locals(&self) -> &[u32] {
        self.placement.members(self.node())
    }

    /// This rank's index among them.
    pub fn local(&self) -> usize {
        self.placement.local_of(self.rank)
    }

    pub(super) fn owner_of(&self, chunk: u32) -> usize {
        (chunk as usize / 2) % self.channels
    }
}

/// What this rank did, for people and tests.
#[derive(Debug, Default)]
pub struct Counters {
    /// Operations completed.
    pub operations: AtomicU64,
    /// Chunks delivered.
    pub chunks: AtomicU64,
    /// Times we slept.
    pub sleeps: AtomicU64,
    /// Times our chunks were held back, because another communicator's go first.
    pub held_back: AtomicU64,
    /// Times we rang another rank's doorbell.
    pub wakeups: AtomicU64,
    /// TCP connections along the trees.
    pub streams: AtomicU64,
    /// Bytes sent along the trees.
    pub sent_bytes: AtomicU64,
    /// Those of them that the receiver copied from our segment.
    pub mapped_bytes: AtomicU64,
    /// Bytes of messages that went to other ranks of this node through the segment.
    pub staged_bytes: AtomicU64,
    /// Bytes received along the trees.
    pub received_bytes: AtomicU64,
    /// Connections refused at the port.
    pub refused: AtomicU64,
    /// Bytes of this rank's own buffers that allreduces have summed.
    pub reduced_bytes: AtomicU64,
    /// Bytes of this rank's registered buffers that were combined in place.
    pub in_place_bytes: AtomicU64,
    /// Bytes of this rank's own buffers that were added in turn with the others'.
    pub ring_bytes: AtomicU64,
    /// Time during which at least one allreduce was under way, from the call to its end.
    pub reducing_nanoseconds: AtomicU64,
}

impl Counters {
    /// One has ended. Overlapping ones count their common time once: the last ended at `until`.
    pub fn count_allreduce(&self, done: &WorkState, until: &mut Option<Instant>, now: Instant) {
        let fingerprint = &done.fingerprint;
        if fingerprint.kind != Kind::Allreduce {
            return;
        }
        let since = until.map_or(done.began(), |end| end.max(done.began()));
        let nanoseconds = now.saturating_duration_since(since).as_nanos();
        self.reduced_bytes.fetch_add(fingerprint.size_bytes(), Ordering::Relaxed);
        let nanoseconds = u64::try_from(nanoseconds).unwrap_or(u64::MAX);
        self.reducing_nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        *until = Some(now);
    }
}

/// A call on its way to the driver.
pub struct Submission {
    /// What to do.
    pub operation: Operation,
    /// The caller's handle.
    pub work: Arc<WorkState>,
}

/// What callers and the driver share without the driver's lock.
pub struct Shared {
    /// Who we are.
    pub identity: Identity,
    /// Calls not yet seen by the driver.
    pub submissions: Mutex<VecDeque<Submission>>,
    /// Connections admitted by the port, not yet seen by the driver.
    pub admitted: Mutex<Vec<(u32, TcpStream, Charge)>>,
    /// Connections that this rank dialled, or why it could not.
    pub dialed: Mutex<Vec<(u32, Result<TcpStream, AbortReason>)>>,
    /// An abort asked for by the caller, or by whoever moves the memory of an operation.
    pub abort_asked: Mutex<Option<(ErrorKind, String)>>,
    /// Something is in one of the four above.
    pub pending: AtomicBool,
    /// The process that we serve has said something.
    pub client_ready: AtomicBool,
    /// Our doorbell.
    pub doorbell: OwnedFd,
    /// Threads that wait while another one drives.
    pub waiters: Waiters,
    /// The first cause, once broken.
    pub broken: OnceLock<AbortReason>,
    /// The first collective operation that did not end here; `u64::MAX` while all do.
    pub first_unended: AtomicU64,
    /// Counters.
    pub counters: Counters,
    /// What this rank did last.
    pub recorder: Arc<Recorder>,
}

/// A lock that a panic elsewhere does not take away from us.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Of a rank for which nothing has happened yet.
    pub fn new(identity: Identity, doorbell: OwnedFd, recorder: Arc<Recorder>) -> Self {
        Self {
            identity,
            submissions: Mutex::default(),
            admitted: Mutex::default(),
            dialed: Mutex::default(),
            abort_asked: Mutex::default(),
            pending: false.into(),
            client_ready: false.into(),
            doorbell,
            waiters: Waiters::default(),
            broken: OnceLock::new(),
            first_unended: u64::MAX.into(),
            counters: Counters::default(),
            recorder,
        }
    }

    /// The node of this rank.
    pub fn own_node_name(&self) -> &str {
        self.identity.placement.node_name(self.identity.rank)
    }

    /// Tells the driver, wherever it sleeps, to look.
    pub fn notify(&self) {
        self.pending.store(true, Ordering::SeqCst);
        poller::notify(&self.doorbell);
    }

    /// Leaves word for the driver without waking anybody.
    pub fn mark_pending(&self) {
        self.pending.store(true, Ordering::SeqCst);
    }

    /// This operation ends with an error.
    pub fn record_unended(&self, work: &WorkState) {
        if !matches!(work.fingerprint.kind, Kind::Send | Kind::Recv) {
            self.first_unended.fetch_min(work.sequence, Ordering::SeqCst);
        }
    }

    /// The error of an operation (or of none) after the communicator broke.
    pub fn error(&self, work: Option<&WorkState>, phase: &str) -> Option<CollectiveError> {
        let cause = self.broken.get()?.clone();
        let identity = &self.identity;
        // A caller may be here before the driver, which tells the other ranks first.
        let record = self.recorder.broke(&cause.encode());
        Some(CollectiveError {
            job: identity.job.as_str().into(),
            rank: identity.rank,
            node: identity.placement.node_name(identity.rank).into(),
            operation: work.map(|work| work.fingerprint.describe()).unwrap_or_default(),
            sequence: work.map_or(-1, |work| work.sequence as i64),
            phase: phase.to_owned(),
            cause: Box::new(cause),
            flight_record: record.map(|path| path.display().to_string().into()),
        })
    }
}
