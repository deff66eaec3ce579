//! Shared-memory segment of the ranks of a node: they exchange chunks in it without system calls.
//!
//! ```text
//! header        abort record
//! rank[L]       beat, sleeping, closed, entered; staged, published, released, ended; registered
//!               memory of the last operations; their fingerprints
//! arrivals[K]   arrival counters of chunks that the last arriver reduces
//! input[L][K]   inputs of chunks      result[K]   results of chunks      ring[R]   ring accumulators
//! message[L][M] pieces of messages to other ranks of the node, written by their sender alone
//! ```
//! The chunks of all operations are numbered consecutively (g = 0, 1, …). Chunk g uses slot g mod
//! K, if it uses one: registered memory (see [`Registered`]) is read and written in place. Every
//! rank publishes three monotonic counters of chunks:
//! - `staged[r] > g`: r has contributed to g. Written by r (release); the owner of g may now read
//!   `input[r][g mod K]`, or the memory that r has registered for the operation.
//! - `published[o] > g`, for a chunk g that o owns: its result is in `result[g mod K]`, for ranks
//!   that copy it from there, and in the memory of ranks that registered theirs. Written by o
//!   (release). In a ring accumulation (see `driver::ring`), r has written the partial sum, in
//!   `ring[g mod R]` if it is long: only r + 1 may use it then, and after the last rank all may
//!   read it; it is not published. With a last arriver (see `driver::last_arriver`), the rank to
//!   which `arrivals[g mod K]` reports that all have contributed has exclusive use of `result[g mod
//!   K]` until it resets the arrival counter.
//! - `released[r] > g`: r neither reads nor writes the slots of g. Once that holds for all ranks,
//!   the slots belong to chunk g + K, and the ring slot to chunk g + R.
//!
//! `peer_access[o]` is 1 while o reads or writes registered memory of other ranks. It is set before
//! o checks for an abort ([`ShmSegment::start_peer_access`]), and a rank that aborts checks in the
//! opposite order: after an abort was recorded and `peer_access[o]` was seen to be 0, o accesses no
//! such memory.
//!
//! The abort record is written once, by the rank that wins the exchange of its state.
//!
//! Wake-ups: a rank that is about to sleep publishes the events that it waits for (`sleeping`),
//! executes a full fence and checks once more. A rank that changes state executes a full fence
//! ([`ShmSegment::full_fence`]) and reads `sleeping`. So one of the two sees the other. If several
//! ranks contribute to the event that a rank waits for, the last one sees all changes and notifies
//! it.
//!
//! The protocols are in `primitives`, which does not depend on shared memory: a model checker runs
//! the same code. `layout` defines the parts of the segment.

mod arrivals;
mod layout;
mod operations;
mod primitives;

use std::sync::atomic::{Ordering, fence};

use fabric::shm::Segment;

pub use layout::{FINGERPRINTS_KEPT, MESSAGE_SLOTS, REGISTERED_MAX, Shape};
use layout::{Header, PAGE_BYTES, RankBlock};
pub use operations::{Compared, Registered};
use primitives::{PublishedCounter, RecordState};

/// Number of checks for a partly written abort record: one second.
const ABORT_LOOKS: u32 = 1000;
const ABORT_LOOK_EVERY: std::time::Duration = std::time::Duration::from_millis(1);
const MAGIC: u64 = u64::from_le_bytes(*b"HFBOARD1");

/// Waits for inputs of other ranks.
pub const WAIT_INPUT: u32 = 1;
/// Waits for results.
pub const WAIT_RESULT: u32 = 2;
/// Waits for a free slot.
pub const WAIT_SLOT: u32 = 4;
/// Always set, so that an abort wakes every sleeping rank.
pub const WAIT_ABORT: u32 = 8;
/// Waits for the last result of an operation.
pub const WAIT_END: u32 = 16;
/// Waits for the previous rank of a ring accumulation.
pub const WAIT_TURN: u32 = 32;
/// Waits until other ranks end operations, so that this one may start more.
pub const WAIT_WINDOW: u32 = 64;

/// A mapped segment. All methods are safe to call from any process at any time; only the contents
/// of slots follow the protocol above.
#[derive(Debug)]
pub struct ShmSegment {
    segment: Segment,
    shape: Shape,
}

/// The abort record.
#[derive(Debug, PartialEq, Eq)]
pub enum Aborted {
    /// The encoded reason.
    Reason(Vec<u8>),
    /// This local rank started to write the record and did not finish within [`ABORT_LOOKS`]
    /// checks: it was killed.
    Unfinished(usize),
}

impl ShmSegment {
    /// Initializes a segment of [`Shape::bytes`] zeroed bytes.
    pub fn create(segment: Segment, shape: Shape) -> Option<Self> {
        let shm = Self::over(segment, shape)?;
        shm.header().magic.store(MAGIC, Ordering::Release);
        Some(shm)
    }

    /// Maps a segment that another rank has created.
    pub fn open(segment: Segment, shape: Shape) -> Option<Self> {
        let shm = Self::over(segment, shape)?;
        (shm.header().magic.load(Ordering::Acquire) == MAGIC).then_some(shm)
    }

    #[inline]
    fn over(segment: Segment, shape: Shape) -> Option<Self> {
        const { assert!(size_of::<Header>() <= PAGE_BYTES) };
        (segment.bytes() == shape.bytes() && segment.base().addr().is_multiple_of(PAGE_BYTES))
            .then_some(Self { segment, shape })
    }

    /// The underlying memory, to pass to a peer.
    #[inline]
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// The sizes.
    #[inline]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    #[inline]
    fn header(&self) -> &Header {
        // SAFETY: the first page of the segment; a Header consists of atomics, so any bytes are
        // valid.
        unsafe { &*self.segment.base().cast::<Header>() }
    }

    #[inline]
    fn rank(&self, local: usize) -> &RankBlock {
        assert!(local < self.shape.locals);
        let offset = self.shape.ranks_at() + local * size_of::<RankBlock>();
        // SAFETY: inside the segment (`Shape::bytes`) and aligned: the base is page-aligned, the
        // offset a multiple of the block's alignment. It consists of atomics and padding.
        unsafe { &*self.segment.base().add(offset).cast::<RankBlock>() }
    }

    /// Address of the input of rank `local` to a chunk.
    #[inline]
    pub fn input(&self, local: usize, chunk: u64) -> *mut u8 {
        assert!(local < self.shape.locals);
        self.data(local, chunk)
    }

    /// Address of the result of a chunk.
    #[inline]
    pub fn result(&self, chunk: u64) -> *mut u8 {
        self.data(self.shape.locals, chunk)
    }

    /// Address of the ring accumulator of a chunk.
    #[inline]
    pub fn ring_slot(&self, chunk: u64) -> *mut u8 {
        assert!(self.shape.ring_slots > 0);
        let at = (chunk % self.shape.ring_slots as u64) as usize;
        self.slot((self.shape.locals + 1) * self.shape.slots + at)
    }

    /// Address of slot `at` of rank `local` for messages; none if it does not exist.
    #[inline]
    pub fn message(&self, local: usize, at: usize) -> Option<*mut u8> {
        let exists = local < self.shape.locals && at < MESSAGE_SLOTS && self.shape.locals > 1;
        exists.then(|| self.slot(self.shape.chunk_slots() + local * MESSAGE_SLOTS + at))
    }

    #[inline]
    fn data(&self, row: usize, chunk: u64) -> *mut u8 {
        let at = (chunk % self.shape.slots as u64) as usize;
        self.slot(row * self.shape.slots + at)
    }

    #[inline]
    fn slot(&self, index: usize) -> *mut u8 {
        let offset = self.shape.data_at() + index * self.shape.slot_bytes;
        // SAFETY: rows are at most `locals`, slots of a row below `slots`, ring slots, which follow
        // the rows, below `ring_slots`, and message slots, which come last, were checked: inside
        // the segment.
        unsafe { self.segment.base().add(offset) }
    }

    /// All chunks below this number are released by `local`.
    #[inline]
    pub fn released(&self, local: usize) -> u64 {
        self.rank(local).released.get()
    }

    /// All chunks below this number are released by every rank.
    #[inline]
    pub fn released_by_all(&self) -> u64 {
        self.least(|rank| &rank.released)
    }

    /// Publishes that `local` has released all chunks below `chunks`.
    #[inline]
    pub fn release(&self, local: usize, chunks: u64) {
        self.rank(local).released.publish(chunks);
    }

    /// Publishes that `local` has contributed to all chunks below `chunks`.
    #[inline]
    pub fn stage(&self, local: usize, chunks: u64) {
        self.rank(local).staged.publish(chunks);
    }

    /// Number of chunks that `local` has contributed to.
    #[inline]
    pub fn staged(&self, local: usize) -> u64 {
        self.rank(local).staged.get()
    }

    /// Number of chunks that every rank has contributed to.
    #[inline]
    pub fn staged_by_all(&self) -> u64 {
        self.least(|rank| &rank.staged)
    }

    /// Publishes the results of all chunks below `chunks` that `local` owns.
    #[inline]
    pub fn publish(&self, local: usize, chunks: u64) {
        self.rank(local).published.publish(chunks);
    }

    /// All results of `local` below this chunk are published.
    #[inline]
    pub fn published(&self, local: usize) -> u64 {
        self.rank(local).published.get()
    }

    #[inline]
    fn least(&self, counter: impl Fn(&RankBlock) -> &PublishedCounter) -> u64 {
        let ranks = (0..self.shape.locals).map(|local| self.rank(local));
        ranks.map(|rank| counter(rank).get()).min().unwrap_or(0)
    }

    /// Increments the heartbeat of `local`.
    #[inline]
    pub fn beat(&self, local: usize) {
        self.rank(local).beat.fetch_add(1, Ordering::Relaxed);
    }

    /// Heartbeats of `local` so far.
    #[inline]
    pub fn beats(&self, local: usize) -> u64 {
        self.rank(local).beat.load(Ordering::Relaxed)
    }

    /// Publishes that `local` closes the communicator and will not start operation `next` or a
    /// later one.
    #[inline]
    pub fn mark_closed(&self, local: usize, next: u64) {
        self.rank(local).closed.publish(next + 1);
    }

    /// The first operation that `local` will not start, if it has closed the communicator.
    #[inline]
    pub fn closed_at(&self, local: usize) -> Option<u64> {
        self.rank(local).closed.get().checked_sub(1)
    }

    /// Publishes that `local` is about to sleep until one of `reasons`; the caller checks once more
    /// and then sleeps.
    #[inline]
    pub fn fall_asleep(&self, local: usize, reasons: u32) {
        self.rank(local).sleeping.fall_asleep(reasons | WAIT_ABORT);
    }

    /// Publishes that `local` is awake.
    #[inline]
    pub fn wake_up(&self, local: usize) {
        self.rank(local).sleeping.wake_up();
    }

    /// Separates a change from the following read of the other ranks' state.
    #[inline]
    pub fn full_fence(&self) {
        fence(Ordering::SeqCst);
    }

    /// True if `local` sleeps until one of `reasons`. Called after a change and
    /// [`ShmSegment::full_fence`].
    #[inline]
    pub fn sleeps_for(&self, local: usize, reasons: u32) -> bool {
        self.rank(local).sleeping.sleeps_for(reasons)
    }

    /// The same; if true, the caller must wake it.
    #[inline]
    pub fn claim_wakeup(&self, local: usize, reasons: u32) -> bool {
        self.rank(local).sleeping.claim_wakeup(reasons)
    }

    /// Records the abort reason; false if another rank has recorded one.
    #[inline]
    pub fn abort(&self, local: usize, cause: &[u8]) -> bool {
        self.header().abort.write(local as u32, cause)
    }

    /// The recorded abort, if any.
    pub fn aborted(&self) -> Option<Aborted> {
        // The writer takes a microsecond, unless it is preempted; if it was killed meanwhile, that
        // is reported.
        let mut by = 0;
        for _ in 0..ABORT_LOOKS {
            match self.header().abort.read() {
                RecordState::Empty => return None,
                RecordState::Complete(cause) => return Some(Aborted::Reason(cause)),
                RecordState::Partial(writer) => by = writer as usize,
            }
            std::thread::sleep(ABORT_LOOK_EVERY);
        }
        Some(Aborted::Unfinished(by))
    }

    /// True if an abort is recorded; cheap enough for every poll.
    #[inline]
    pub fn is_aborted(&self) -> bool {
        self.header().abort.is_claimed()
    }
}

#[cfg(test)]
#[path = "segment_test.rs"]
mod tests;
