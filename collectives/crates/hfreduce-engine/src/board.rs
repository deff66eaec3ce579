//! The memory that the ranks of one node share: where they meet without a system call.
//!
//! ```text
//! header        abort record
//! rank[L]       beat, sleeping, left, entered, staged; the last operations' fingerprints
//! slot[K]       published, released
//! input[L][K]   chunks on their way in        result[K]   chunks on their way out
//! ```
//! Chunks of all operations are numbered through (g = 0, 1, …); chunk g uses slot g mod K.
//! Who writes what, and when others may read it:
//! - `staged[r]` = how many chunks rank r has contributed to, in order. Written by r (release);
//!   after reading `staged[r] > g` (acquire) the owner of g may read `input[r][g mod K]`.
//! - `published[s]` = g + 1 once the result of g is in `result[s]`. Written by the owner (release).
//! - `released[s]` counts ranks that are through with the slot. When it reaches L × (uses so far),
//!   the slot belongs to the next chunk: nobody reads or writes the old one any more.
//! - the abort record is written once, by whoever wins the exchange of its state.
//!
//! Waking: whoever sleeps says first for what (`sleeping`, then a full fence, then a last look);
//! whoever changes something fences and looks at `sleeping`. So one of the two sees the other.
//!
//! The protocols themselves are in `blocks`, which knows nothing of memory that is shared: a model
//! checker runs the same code. Here is where each block lies.

mod blocks;

use std::sync::atomic::{AtomicU64, Ordering};

use fabric::shm::Segment;

use crate::cause::CAUSE_BYTES_MAX;
use crate::core::Fingerprint;
use crate::core::fingerprint::FINGERPRINT_BYTES;
use blocks::{Counter, Record, Recorded, Sleeper, SlotBlock, Stamped};

/// Fingerprints that are kept for each rank.
const PRINTS: usize = 64;
const PAGE_BYTES: usize = 4096;
/// How long a half-written abort record is waited for: a second.
const ABORT_LOOKS: u32 = 1000;
const ABORT_LOOK_EVERY: std::time::Duration = std::time::Duration::from_millis(1);
const MAGIC: u64 = u64::from_le_bytes(*b"HFBOARD1");

/// Sleeping for inputs of other ranks.
pub const FOR_INPUT: u32 = 1;
/// Sleeping for results.
pub const FOR_RESULT: u32 = 2;
/// Sleeping for a slot to become free.
pub const FOR_SLOT: u32 = 4;
/// Sleeping at all: always set, so that an abort wakes everybody.
pub const FOR_ABORT: u32 = 8;

#[repr(C)]
struct Header {
    magic: AtomicU64,
    abort: Record<{ CAUSE_BYTES_MAX / 8 }>,
}

#[repr(C, align(128))]
struct RankBlock {
    beat: AtomicU64,
    left: Counter,
    entered: Counter,
    sleeping: Sleeper,
    _gap: [u8; 36],
    staged: Counter,
    _gap2: [u8; 56],
    /// Stamped with the operation's number + 1.
    prints: [Stamped<{ FINGERPRINT_BYTES / 8 }>; PRINTS],
}

/// The sizes that both sides of a board must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Ranks on this node.
    pub locals: usize,
    /// Slots.
    pub slots: usize,
    /// Bytes of one slot; a multiple of the page size.
    pub slot_bytes: usize,
}

impl Shape {
    fn ranks_at(&self) -> usize {
        PAGE_BYTES
    }

    fn slots_at(&self) -> usize {
        self.ranks_at() + self.locals * size_of::<RankBlock>()
    }

    fn data_at(&self) -> usize {
        (self.slots_at() + self.slots * size_of::<SlotBlock>()).next_multiple_of(PAGE_BYTES)
    }

    /// Size of the whole segment.
    pub fn bytes(&self) -> usize {
        self.data_at() + (self.locals + 1) * self.slots * self.slot_bytes
    }
}

/// A mapped board. All its methods are safe to call from any process at any time; only the slots'
/// contents follow the protocol above.
#[derive(Debug)]
pub struct Board {
    segment: Segment,
    shape: Shape,
}

impl Board {
    /// Takes a segment of [`Shape::bytes`] zeroed bytes and makes it a board.
    pub fn create(segment: Segment, shape: Shape) -> Option<Self> {
        let board = Self::over(segment, shape)?;
        board.header().magic.store(MAGIC, Ordering::Release);
        Some(board)
    }

    /// Maps a board that another rank created.
    pub fn open(segment: Segment, shape: Shape) -> Option<Self> {
        let board = Self::over(segment, shape)?;
        (board.header().magic.load(Ordering::Acquire) == MAGIC).then_some(board)
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

    fn slot(&self, chunk: u64) -> &SlotBlock {
        let slot = (chunk % self.shape.slots as u64) as usize;
        let offset = self.shape.slots_at() + slot * size_of::<SlotBlock>();
        // SAFETY: as for `rank`.
        unsafe { &*self.segment.base().add(offset).cast::<SlotBlock>() }
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

    fn data(&self, row: usize, chunk: u64) -> *mut u8 {
        let slot = (chunk % self.shape.slots as u64) as usize;
        let offset = self.shape.data_at() + (row * self.shape.slots + slot) * self.shape.slot_bytes;
        // SAFETY: `row` is at most `locals` and `slot` under `slots`: inside the segment.
        unsafe { self.segment.base().add(offset) }
    }

    /// True if chunk `chunk` may use its slot: every rank is through with the chunk before.
    pub fn slot_is_free(&self, chunk: u64) -> bool {
        let uses = chunk / self.shape.slots as u64;
        self.slot(chunk).is_free(uses * self.shape.locals as u64)
    }

    /// Says that a rank is through with a chunk's slot; true if it was the last one.
    pub fn release(&self, chunk: u64) -> bool {
        self.slot(chunk).release().is_multiple_of(self.shape.locals as u64)
    }

    /// Says that `local` has contributed to every chunk below `chunks`.
    pub fn stage(&self, local: usize, chunks: u64) {
        self.rank(local).staged.tell(chunks);
    }

    /// How many chunks `local` has contributed to.
    pub fn staged(&self, local: usize) -> u64 {
        self.rank(local).staged.told()
    }

    /// Says that the result of a chunk is in its place.
    pub fn publish(&self, chunk: u64) {
        self.slot(chunk).publish(chunk);
    }

    /// True if the result of a chunk is in its place.
    pub fn is_published(&self, chunk: u64) -> bool {
        self.slot(chunk).is_published(chunk)
    }

    /// Says that `local` begins operation `sequence`.
    pub fn enter(&self, local: usize, sequence: u64, print: &Fingerprint) {
        let rank = self.rank(local);
        rank.prints[sequence as usize % PRINTS].write(sequence + 1, print.words());
        rank.entered.tell(sequence + 1);
    }

    /// How many operations `local` has begun.
    pub fn entered(&self, local: usize) -> u64 {
        self.rank(local).entered.told()
    }

    /// What `local` said it runs as operation `sequence`, while that is remembered.
    pub fn print(&self, local: usize, sequence: u64) -> Option<Fingerprint> {
        let block = &self.rank(local).prints[sequence as usize % PRINTS];
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
    pub fn leave(&self, local: usize, next: u64) {
        self.rank(local).left.tell(next + 1);
    }

    /// The first operation that `local` will not begin, if it took leave.
    pub fn left(&self, local: usize) -> Option<u64> {
        self.rank(local).left.told().checked_sub(1)
    }

    /// Says that `local` is about to sleep for `reasons`; the caller looks once more and then does.
    pub fn fall_asleep(&self, local: usize, reasons: u32) {
        self.rank(local).sleeping.fall_asleep(reasons | FOR_ABORT);
    }

    /// Says that `local` is awake.
    pub fn wake_up(&self, local: usize) {
        self.rank(local).sleeping.wake_up();
    }

    /// After a change: true if `local` sleeps for such a thing and must be woken by the caller.
    pub fn must_wake(&self, local: usize, reasons: u32) -> bool {
        self.rank(local).sleeping.must_wake(reasons)
    }

    /// Records why everything ends; false if somebody else did before.
    pub fn abort(&self, cause: &[u8]) -> bool {
        self.header().abort.write(cause)
    }

    /// Why everything ended, if it did. An empty record: somebody died while writing it.
    pub fn aborted(&self) -> Option<Vec<u8>> {
        // The writer needs a microsecond, unless it lost its processor in it; if it was killed in
        // it, the fact must do.
        for _ in 0..ABORT_LOOKS {
            match self.header().abort.read() {
                Recorded::Nothing => return None,
                Recorded::There(cause) => return Some(cause),
                Recorded::InPart => std::thread::sleep(ABORT_LOOK_EVERY),
            }
        }
        Some(Vec::new())
    }

    /// True if an abort is recorded; cheap enough for every look.
    pub fn is_aborted(&self) -> bool {
        self.header().abort.is_begun()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{Determinism, Kind};

    const SHAPE: Shape = Shape { locals: 2, slots: 4, slot_bytes: 4096 };

    fn board() -> Board {
        Board::create(Segment::create("board", SHAPE.bytes()).unwrap(), SHAPE).unwrap()
    }

    #[test]
    fn a_slot_is_free_again_when_every_rank_released_it() {
        let board = board();
        assert!(board.slot_is_free(1) && !board.slot_is_free(5));
        board.publish(1);
        assert!(board.is_published(1) && !board.is_published(5));
        assert!(!board.release(1) && board.release(1));
        assert!(board.slot_is_free(5) && !board.slot_is_free(9) && !board.is_published(5));
    }

    #[test]
    fn fingerprints_are_remembered_for_a_while() {
        let board = board();
        let print = Fingerprint {
            kind: Kind::Reduce,
            dtype: 1,
            element_bytes: 2,
            op: 3,
            root: 4,
            count: 5,
            shape: 6,
            modes: Determinism::DEFAULT,
        };
        board.enter(1, 70, &print);
        assert_eq!(
            (board.print(1, 70), board.print(1, 6), board.print(0, 70)),
            (Some(print), None, None)
        );
        assert_eq!((board.entered(1), board.entered(0)), (71, 0));
    }

    #[test]
    fn the_first_abort_stays() {
        let board = board();
        assert!(board.aborted().is_none() && !board.is_aborted());
        assert!(board.abort(b"first") && !board.abort(b"second"));
        assert_eq!(board.aborted().unwrap(), b"first");
    }

    #[test]
    fn who_sleeps_for_something_else_is_left_alone() {
        let board = board();
        assert!(!board.must_wake(1, FOR_RESULT));
        board.fall_asleep(1, FOR_RESULT);
        assert!(!board.must_wake(1, FOR_INPUT));
        assert!(board.must_wake(1, FOR_RESULT) && !board.must_wake(1, FOR_RESULT));
        board.fall_asleep(1, 0);
        assert!(board.must_wake(1, FOR_ABORT));
    }

    #[test]
    fn slots_do_not_overlap() {
        let board = board();
        let mut places: Vec<usize> = (0..SHAPE.slots as u64)
            .flat_map(|g| [board.input(0, g), board.input(1, g), board.result(g)])
            .map(|place| place.addr())
            .collect();
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[1] - pair[0] == SHAPE.slot_bytes));
        assert!(
            places.last().unwrap() + SHAPE.slot_bytes
                <= board.segment.base().addr() + SHAPE.bytes()
        );
    }
}
