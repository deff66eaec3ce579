//! State that callers and the driver share outside the driver's lock.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::fd::OwnedFd;

use super::peer_bytes::PeerBytes;
use crate::operation::Operation;
use crate::priority::{Priority, Wake};
use crate::share::Share;
use crate::work::{Waiters, WorkState};
use hfreduce_core::error::{AbortReason, CollectiveError, ErrorKind};
use hfreduce_core::placement::Placement;
use hfreduce_core::{Determinism, Kind};
use hfreduce_shm::flight::Recorder;
use hfreduce_shm::quota::Charge;
use hfreduce_transport::poller;

/// Identity of this rank.
#[derive(Debug)]
pub struct Identity {
    /// The job, for messages.
    pub job: String,
    /// This rank.
    pub rank: u32,
    /// Placement of all ranks.
    pub placement: Placement,
    /// Number of ranks of each node that own a channel.
    pub channels: usize,
    /// Silence after which a peer is considered stopped.
    pub liveness: Duration,
    /// Large reductions use the ring: the ranks share CPUs and are on one node.
    pub ring_accumulation: bool,
    /// Determinism modes of its operations.
    pub determinism: Determinism,
    /// By rank: true if a daemon runs it.
    pub served: Vec<bool>,
    /// Priority among the communicators with the same share.
    pub priority: Priority,
    /// Resources shared with its user's other ranks in this process.
    pub share: Arc<Share>,
    /// Maximum time for which chunks are held back.
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

    pub fn owner_of(&self, chunk: u32) -> usize {
        (chunk as usize / 2) % self.channels
    }
}

/// Counters of this rank.
#[derive(Debug, Default)]
pub struct Counters {
    /// Operations completed.
    pub operations: AtomicU64,
    /// Chunks delivered.
    pub chunks: AtomicU64,
    /// Times the driver has slept.
    pub sleeps: AtomicU64,
    /// Times that chunks were held back for another communicator.
    pub held_back: AtomicU64,
    /// Times this rank has notified another rank's doorbell.
    pub wakeups: AtomicU64,
    /// TCP connections along the trees.
    pub streams: AtomicU64,
    /// Bytes sent along the trees.
    pub sent_bytes: AtomicU64,
    /// Of those, bytes that the receiver has copied from this rank's segment.
    pub mapped_bytes: AtomicU64,
    /// Bytes of messages to other ranks of the node that used the segment.
    pub staged_bytes: AtomicU64,
    /// Bytes received along the trees.
    pub received_bytes: AtomicU64,
    /// Connections refused at the port.
    pub refused: AtomicU64,
    /// Bytes of this rank's buffers that allreduces have reduced.
    pub reduced_bytes: AtomicU64,
    /// Bytes of this rank's registered buffers that were reduced in place.
    pub in_place_bytes: AtomicU64,
    /// Bytes of this rank's buffers that were reduced by ring accumulation.
    pub ring_bytes: AtomicU64,
    /// Time during which at least one allreduce was in progress, from the call to its end.
    pub reducing_nanoseconds: AtomicU64,
}

impl Counters {
    /// Counts a completed operation. The common time of overlapping ones counts once: the last one
    /// ended at `until`.
    pub fn count_allreduce(&self, done: &WorkState, until: &mut Option<Instant>, now: Instant) {
        let fingerprint = &done.fingerprint;
        if fingerprint.kind != Kind::Allreduce {
            return;
        }
        let since = until.map_or(done.started_at(), |end| end.max(done.started_at()));
        let nanoseconds = now.saturating_duration_since(since).as_nanos();
        self.reduced_bytes.fetch_add(fingerprint.size_bytes(), Ordering::Relaxed);
        let nanoseconds = u64::try_from(nanoseconds).unwrap_or(u64::MAX);
        self.reducing_nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        *until = Some(now);
    }
}

/// A call on its way to the driver.
pub struct Submission {
    /// The operation.
    pub operation: Operation,
    /// The caller's handle.
    pub work: Arc<WorkState>,
}

/// State that callers and the driver share outside the driver's lock.
pub struct Shared {
    /// Identity of this rank.
    pub identity: Identity,
    /// Calls that the driver has not taken.
    pub submissions: Mutex<VecDeque<Submission>>,
    /// Connections that the port has admitted and the driver has not taken.
    pub admitted: Mutex<Vec<(u32, TcpStream, Charge)>>,
    /// Connections that this rank has dialed, or the reason of the failure.
    pub dialed: Mutex<Vec<(u32, Result<TcpStream, AbortReason>)>>,
    /// An abort requested by the caller, or by the thread that copies the memory of an operation.
    pub abort_request: Mutex<Option<(ErrorKind, String)>>,
    /// One of the four above is not empty.
    pub pending: AtomicBool,
    /// The client process has sent a message.
    pub client_ready: AtomicBool,
    /// Doorbell of this rank.
    pub doorbell: OwnedFd,
    /// Threads that wait while another one drives.
    pub waiters: Waiters,
    /// The first abort reason, once broken.
    pub broken: OnceLock<AbortReason>,
    /// The first collective operation that did not complete here; `u64::MAX` while all do.
    pub first_unended: AtomicU64,
    /// Counters.
    pub counters: Counters,
    /// Bytes between this rank and each other rank.
    pub peer_bytes: PeerBytes,
    /// The flight recorder.
    pub recorder: Arc<Recorder>,
}

impl Wake for Shared {
    fn wake(&self) {
        self.notify();
    }
}

impl Shared {
    /// State of a new communicator.
    pub fn new(identity: Identity, doorbell: OwnedFd, recorder: Arc<Recorder>) -> Self {
        let peer_bytes = PeerBytes::new(identity.placement.world_size());
        Self {
            identity,
            submissions: Mutex::default(),
            admitted: Mutex::default(),
            dialed: Mutex::default(),
            abort_request: Mutex::default(),
            pending: false.into(),
            client_ready: false.into(),
            doorbell,
            waiters: Waiters::default(),
            broken: OnceLock::new(),
            first_unended: u64::MAX.into(),
            counters: Counters::default(),
            peer_bytes,
            recorder,
        }
    }

    /// The node of this rank.
    pub fn own_node_name(&self) -> &str {
        self.identity.placement.node_name(self.identity.rank)
    }

    /// Wakes the driver.
    pub fn notify(&self) {
        self.pending.store(true, Ordering::SeqCst);
        poller::notify(&self.doorbell);
    }

    /// Marks work for the driver without waking it.
    pub fn mark_pending(&self) {
        self.pending.store(true, Ordering::SeqCst);
    }

    /// Records that an operation ends with an error.
    pub fn record_unended(&self, work: &WorkState) {
        if !matches!(work.fingerprint.kind, Kind::Send | Kind::Recv) {
            self.first_unended.fetch_min(work.sequence, Ordering::SeqCst);
        }
    }

    /// The error of an operation (or of none) after the communicator broke.
    pub fn error(&self, work: Option<&WorkState>, phase: &str) -> Option<CollectiveError> {
        let cause = self.broken.get()?.clone();
        let identity = &self.identity;
        // A caller may be here before the driver, which notifies the other ranks first.
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
