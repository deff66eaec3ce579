//! The memory that the ranks of one node share: where they meet without a system call.
//!
//! ```text
//! header        abort record
//! rank[L]       beat, sleeping, left, entered; staged, published, released, ended; where its memory
//!               of the last operations lies; their fingerprints
//! roll[K]       who has contributed to a chunk that the last one adds up
//! input[L][K]   chunks on their way in        result[K]   chunks on their way out        sum[R]
//! message[L][M] pieces of messages to other ranks of the node, written by their sender alone
//! ```
//! Chunks of all operations are numbered through (g = 0, 1, …); chunk g uses slot g mod K, if it uses
//! one at all: memory that is registered (see [`Registered`]) is read and written where it is.
//! Every rank has three counters of chunks, which only grow. Who writes what, and what others may do
//! once they have read it:
//! - `staged[r] > g`: r has contributed to g. Written by r (release); now the owner of g may read
//!   `input[r][g mod K]`, or what r has registered for the operation.
//! - `published[o] > g`, for a chunk g that o owns: its result is in `result[g mod K]`, for those who
//!   copy it there, and in the memory of those who registered theirs. Written by o (release).
//!   Where a sum goes round (see the `driver::ring`), r has written that, in `sum[g mod R]` if it is long: only
//!   r + 1 may use it then, and after the last rank everybody may read it; nobody publishes it. Where the last one adds up (see
//!   the `driver::last_arriver`), that is whoever `arrivals[g mod K]` tells that all have contributed; he alone
//!   uses `result[g mod K]` until he closes the roll.
//! - `released[r] > g`: r neither reads nor writes the slots of g. When all ranks say so of g, they
//!   belong to chunk g + K, and its sum's to chunk g + R.
//!
//! `peer_access[o]` is 1 while o reads or writes registered memory of others. It says so before it looks
//! whether all has ended ([`ShmSegment::begin_peer_access`]), and who ends everything looks in the opposite
//! order: so after an abort was recorded and `peer_access[o]` was seen to be 0, o touches no such memory.
//!
//! The abort record is written once, by whoever wins the exchange of its state.
//!
//! Waking: whoever sleeps says first for what (`sleeping`, then a full fence, then a last look);
//! whoever changes something fences ([`ShmSegment::full_fence`]) and looks at `sleeping`. So one of the two
//! sees the other. Of several who change what one waits for, the last sees all the changes and rings.
//!
//! The protocols themselves are in `primitives`, which knows nothing of memory that is shared: a model
//! checker runs the same code. Here is where each block lies.

mod arrivals;
mod primitives;

use std::sync::atomic::{AtomicU64, Ordering, fence};

use fabric::shm::Segment;

use crate::core::FINGERPRINT_BYTES;
use crate::core::Fingerprint;
use crate::core::OUTSTANDING_MAX;
use crate::error::REASON_BYTES_MAX;
use arrivals::ArrivalBlock;
use primitives::{OnceRecord, PeerAccess, PublishedCounter, RecordState, Seqlock, SleepState};

/// Operations of a rank whose registered memory is known at a time. It registers none while the
/// oldest of so many is under way, so nothing that others still read is written over.
pub const REGISTERED_MAX: usize = 16;
/// Fingerprints that are kept for each rank. No rank starts more operations than this after one that
/// another rank of the node has not ended (see the `driver::window`), so that every fingerprint that
/// is still compared is kept: 16 KiB a rank.
pub const FINGERPRINTS_KEPT: usize = OUTSTANDING_MAX;
const PAGE_BYTES: usize = 4096;
/// How long a half-written abort record is waited for: a second.
const ABORT_LOOKS: u32 = 1000;
const ABORT_LOOK_EVERY: std::time::Duration = std::time::Duration::from_millis(1);
const MAGIC: u64 = u64::from_le_bytes(*b"HFBOARD1");

/// Sleeping for inputs of other ranks.
pub const WAIT_INPUT: u32 = 1;
/// Sleeping for results.
pub const WAIT_RESULT: u32 = 2;
/// Sleeping for a slot to become free.
pub const WAIT_SLOT: u32 = 4;
/// Sleeping at all: always set, so that an abort wakes everybody.
pub const WAIT_ABORT: u32 = 8;
/// Sleeping for the last result of an operation.
pub const WAIT_END: u32 = 16;
/// Sleeping for the rank before to have added to a sum that goes round.
pub const WAIT_TURN: u32 = 32;
/// Sleeping for other ranks to end operations, so that this one may start more.
pub const WAIT_WINDOW: u32 = 64;

const NOT_REGISTERED: u64 = u64::MAX;

/// Where a rank's memory of one operation lies in its arena, where others may use it in place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registered {
    /// Where its contribution begins.
    pub input: Option<u64>,
    /// Where its result belongs.
    pub output: Option<u64>,
}

#[repr(C)]
struct Header {
    magic: AtomicU64,
    abort: OnceRecord<{ REASON_BYTES_MAX / 8 }>,
}

#[repr(C, align(128))]
struct RankBlock {
    /// A line that others look at and that seldom changes.
    beat: AtomicU64,
    closed: PublishedCounter,
    sleeping: SleepState,
    peer_access: PeerAccess,
    _gap: [u8; 40],
    /// One that every operation changes.
    entered: PublishedCounter,
    staged: PublishedCounter,
    published: PublishedCounter,
    released: PublishedCounter,
    ended: PublishedCounter,
    _gap2: [u8; 24],
    /// Input and output; stamped as the fingerprints are.
    registered: [Seqlock<2>; REGISTERED_MAX],
    /// Stamped with the operation's number + 1.
    fingerprints: [Seqlock<{ FINGERPRINT_BYTES / 8 }>; FINGERPRINTS_KEPT],
}

/// Slots of each rank for pieces of messages to other ranks of its node.
pub const MESSAGE_SLOTS: usize = 8;

/// The sizes that both sides of a segment must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Ranks on this node.
    pub locals: usize,
    /// Slots.
    pub slots: usize,
    /// Slots of sums that go round; none where none do.
    pub ring_slots: usize,
    /// Bytes of one slot; a multiple of the page size.
    pub slot_bytes: usize,
}

impl Shape {
    fn ranks_at(&self) -> usize {
        PAGE_BYTES
    }

    fn arrivals_at(&self) -> usize {
        self.ranks_at() + self.locals * size_of::<RankBlock>()
    }

    fn data_at(&self) -> usize {
        (self.arrivals_at() + self.slots * size_of::<ArrivalBlock>()).next_multiple_of(PAGE_BYTES)
    }

    /// Slots of chunks; those of messages lie behind them.
    fn chunk_slots(&self) -> usize {
        (self.locals + 1) * self.slots + self.ring_slots
    }

    /// A rank that is alone on its node has none.
    fn message_slots(&self) -> usize {
        if self.locals > 1 { self.locals * MESSAGE_SLOTS } else { 0 }
    }

    /// Size of the whole segment.
    pub fn bytes(&self) -> usize {
        self.data_at() + (self.chunk_slots() + self.message_slots()) * self.slot_bytes
    }
}

/// A mapped segment. All its methods are safe to call from any process at any time; only the slots'
/// contents follow the protocol above.
#[derive(Debug)]
pub struct ShmSegment {
    segment: Segment,
    shape: Shape,
}

/// The abort record.
#[derive(Debug, PartialEq, Eq)]
pub enum Aborted {
    /// The encoded cause.
    Reason(Vec<u8>),
    /// This local rank began to write it and did not finish within [`ABORT_LOOKS`]: it was killed.
    Unfinished(usize),
}

/// A local rank's operation next to this rank's of the same number.
#[derive(Debug, PartialEq, Eq)]
pub enum Compared {
    /// The same.
    Equal,
    /// This other one.
    Differs(Fingerprint),
    /// It has not started that operation. The one that it started last, if any.
    Absent(Option<(u64, Fingerprint)>),
}

impl ShmSegment {
    /// Takes a segment of [`Shape::bytes`] zeroed bytes and makes it a segment.
    pub fn create(segment: Segment, shape: Shape) -> Option<Self> {
        let shm = Self::over(segment, shape)?;
        shm.header().magic.store(MAGIC, Ordering::Release);
        Some(shm)
    }

    /// Maps a segment that another rank created.
    pub fn open(segment: Segment, shape: Shape) -> Option<Self> {
        let shm = Self::over(segment, shape)?;
        (shm.header().magic.load(Ordering::Acquire) == MAGIC).then_some(shm)
    }

    fn over(segment: Segment, shape: Shape) -> Option<Self> {
        const { assert!(size_of::<Header>() <= PAGE_BYTES) };
        (segment.bytes() == shape.bytes() && segment.base().addr().is_multiple_of(PAGE_BYTES))
            .then_some(Self { segment, shape })
    }

    /// The memory itself, to hand to a peer.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// The sizes.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    fn header(&self) -> &Header {
        // SAFETY: the first page of the segment; a Header is atomics alone, any bytes are valid.
        unsafe { &*self.segment.base().cast::<Header>() }
    }

    fn rank(&self, local: usize) -> &RankBlock {
        assert!(local < self.shape.locals);
        let offset = self.shape.ranks_at() + local * size_of::<RankBlock>();
        // SAFETY: within the segment (`Shape::bytes`) and aligned: the base is at a page, the
        // offset a multiple of the block's alignment. Atomics and padding alone.
        unsafe { &*self.segment.base().add(offset).cast::<RankBlock>() }
    }

    /// Where rank `local` puts its contribution to chunk `chunk`.
    pub fn input(&self, local: usize, chunk: u64) -> *mut u8 {
        assert!(local < self.shape.locals);
        self.data(local, chunk)
    }

    /// Where the result of chunk `chunk` belongs.
    pub fn result(&self, chunk: u64) -> *mut u8 {
        self.data(self.shape.locals, chunk)
    }

    /// Where the sum of chunk `chunk` goes round.
    pub fn ring_slot(&self, chunk: u64) -> *mut u8 {
        assert!(self.shape.ring_slots > 0);
        let at = (chunk % self.shape.ring_slots as u64) as usize;
        self.slot((self.shape.locals + 1) * self.shape.slots + at)
    }

    /// Slot `at` of rank `local` for messages; none if there is no such slot.
    pub fn message(&self, local: usize, at: usize) -> Option<*mut u8> {
        let exists = local < self.shape.locals && at < MESSAGE_SLOTS && self.shape.locals > 1;
        exists.then(|| self.slot(self.shape.chunk_slots() + local * MESSAGE_SLOTS + at))
    }

    fn data(&self, row: usize, chunk: u64) -> *mut u8 {
        let at = (chunk % self.shape.slots as u64) as usize;
        self.slot(row * self.shape.slots + at)
    }

    fn slot(&self, index: usize) -> *mut u8 {
        let offset = self.shape.data_at() + index * self.shape.slot_bytes;
        // SAFETY: rows are at most `locals`, slots of a row under `slots`, sums, which lie behind
        // the rows, under `ring_slots`, and message slots, which come last, were looked up: inside the
        // segment.
        unsafe { self.segment.base().add(offset) }
    }

    /// The chunks whose slots `local` is through with: all below this number.
    pub fn released(&self, local: usize) -> u64 {
        self.rank(local).released.get()
    }

    /// The chunks whose slots belong to nobody any more: all below this number.
    pub fn released_by_all(&self) -> u64 {
        self.least(|rank| &rank.released)
    }

    /// Says that `local` is through with the slots of all chunks below `chunks`.
    pub fn release(&self, local: usize, chunks: u64) {
        self.rank(local).released.publish(chunks);
    }

    /// Says that `local` has contributed to every chunk below `chunks`.
    pub fn stage(&self, local: usize, chunks: u64) {
        self.rank(local).staged.publish(chunks);
    }

    /// How many chunks `local` has contributed to.
    pub fn staged(&self, local: usize) -> u64 {
        self.rank(local).staged.get()
    }

    /// How many chunks every rank has contributed to.
    pub fn staged_by_all(&self) -> u64 {
        self.least(|rank| &rank.staged)
    }

    /// Says that the results of all chunks below `chunks` that `local` owns are in their places.
    pub fn publish(&self, local: usize, chunks: u64) {
        self.rank(local).published.publish(chunks);
    }

    /// What `local` has published.
    pub fn published(&self, local: usize) -> u64 {
        self.rank(local).published.get()
    }

    fn least(&self, counter: impl Fn(&RankBlock) -> &PublishedCounter) -> u64 {
        let ranks = (0..self.shape.locals).map(|local| self.rank(local));
        ranks.map(|rank| counter(rank).get()).min().unwrap_or(0)
    }

    /// Says where the memory of `local` for its operation number `ordinal` along the trees lies; before
    /// it stages the first chunk of it.
    pub fn register(&self, local: usize, ordinal: u64, sequence: u64, memory: Registered) {
        let block = &self.rank(local).registered[ordinal as usize % REGISTERED_MAX];
        let word = |place: Option<u64>| place.unwrap_or(NOT_REGISTERED);
        block.write(sequence + 1, [word(memory.input), word(memory.output)]);
    }

    /// What `local` said there, if it did; it has once it has staged a chunk of the operation and
    /// registered anything.
    pub fn registered(&self, local: usize, ordinal: u64, sequence: u64) -> Option<Registered> {
        let block = &self.rank(local).registered[ordinal as usize % REGISTERED_MAX];
        let place = |word| Some(word).filter(|word| *word != NOT_REGISTERED);
        let [input, output] = block.read(sequence + 1)?.map(place);
        Some(Registered { input, output })
    }

    /// Before `local` uses registered memory of others; false if all has ended and it must not.
    pub fn begin_peer_access(&self, local: usize) -> bool {
        self.rank(local).peer_access.begin(&self.header().abort)
    }

    /// After it. Also for a rank whose process has ended: the dead touch nothing.
    pub fn end_peer_access(&self, local: usize) {
        self.rank(local).peer_access.end();
    }

    /// True if `local` uses registered memory of others; after an abort, whether it still may.
    pub fn is_accessing_peers(&self, local: usize) -> bool {
        self.rank(local).peer_access.is_accessing_peers()
    }

    /// Says that `local` begins operation `sequence`.
    pub fn enter(&self, local: usize, sequence: u64, fingerprint: &Fingerprint) {
        let rank = self.rank(local);
        rank.fingerprints[sequence as usize % FINGERPRINTS_KEPT]
            .write(sequence + 1, fingerprint.words());
        rank.entered.publish(sequence + 1);
    }

    /// How many operations `local` has begun.
    pub fn entered(&self, local: usize) -> u64 {
        self.rank(local).entered.get()
    }

    /// Says that every operation below `sequence` has ended at `local`.
    pub fn end(&self, local: usize, sequence: u64) {
        self.rank(local).ended.publish(sequence);
    }

    /// Every operation below this one has ended at `local`.
    pub fn ended(&self, local: usize) -> u64 {
        self.rank(local).ended.get()
    }

    /// Every operation below this one has ended at every rank.
    pub fn ended_by_all(&self) -> u64 {
        self.least(|rank| &rank.ended)
    }

    /// Compares what `local` runs as operation `sequence` with `ours`.
    pub fn compare(&self, local: usize, sequence: u64, ours: Fingerprint) -> Compared {
        match self.fingerprint(local, sequence) {
            Some(theirs) if theirs == ours => Compared::Equal,
            Some(theirs) => Compared::Differs(theirs),
            None => {
                let latest = self.entered(local).checked_sub(1);
                Compared::Absent(latest.and_then(|at| Some((at, self.fingerprint(local, at)?))))
            }
        }
    }

    /// What `local` said it runs as operation `sequence`, while that is remembered.
    pub fn fingerprint(&self, local: usize, sequence: u64) -> Option<Fingerprint> {
        let block = &self.rank(local).fingerprints[sequence as usize % FINGERPRINTS_KEPT];
        let words = block.read(sequence + 1)?;
        let mut bytes = [0; FINGERPRINT_BYTES];
        for (word, bytes) in words.iter().zip(bytes.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Fingerprint::decode(&bytes)
    }

    /// A sign of life.
    pub fn beat(&self, local: usize) {
        self.rank(local).beat.fetch_add(1, Ordering::Relaxed);
    }

    /// The signs of life so far.
    pub fn beats(&self, local: usize) -> u64 {
        self.rank(local).beat.load(Ordering::Relaxed)
    }

    /// Says that `local` takes leave and will not begin operation `next` or any later one.
    pub fn mark_closed(&self, local: usize, next: u64) {
        self.rank(local).closed.publish(next + 1);
    }

    /// The first operation that `local` will not begin, if it took leave.
    pub fn closed_at(&self, local: usize) -> Option<u64> {
        self.rank(local).closed.get().checked_sub(1)
    }

    /// Says that `local` is about to sleep for `reasons`; the caller looks once more and then does.
    pub fn fall_asleep(&self, local: usize, reasons: u32) {
        self.rank(local).sleeping.fall_asleep(reasons | WAIT_ABORT);
    }

    /// Says that `local` is awake.
    pub fn wake_up(&self, local: usize) {
        self.rank(local).sleeping.wake_up();
    }

    /// After a change, before a look at what others have changed.
    pub fn full_fence(&self) {
        fence(Ordering::SeqCst);
    }

    /// After a change and [`ShmSegment::full_fence`]: true if `local` sleeps for such a thing.
    pub fn sleeps_for(&self, local: usize, reasons: u32) -> bool {
        self.rank(local).sleeping.sleeps_for(reasons)
    }

    /// The same, and it must be woken by the caller.
    pub fn claim_wakeup(&self, local: usize, reasons: u32) -> bool {
        self.rank(local).sleeping.claim_wakeup(reasons)
    }

    /// Records why everything ends, as `local`; false if another rank did before.
    pub fn abort(&self, local: usize, cause: &[u8]) -> bool {
        self.header().abort.write(local as u32, cause)
    }

    /// Why everything ended, if it did.
    pub fn aborted(&self) -> Option<Aborted> {
        // The writer needs a microsecond, unless it lost its processor in it; if it was killed in
        // it, the fact must do.
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

    /// True if an abort is recorded; cheap enough for every look.
    pub fn is_aborted(&self) -> bool {
        self.header().abort.is_claimed()
    }
}

#[cfg(test)]
#[path = "shm_test.rs"]
mod tests;
