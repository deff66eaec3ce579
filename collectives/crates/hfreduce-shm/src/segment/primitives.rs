//! Lock-free primitives of the segment, written over [`Atomics`] so that a model checker runs the
//! same code (`primitives_models.rs`).
//!
//! Zeroed bytes are valid for all of them, and no method waits.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

use fabric::atomics::{Atomic, Atomics, Native};

/// A counter that one rank publishes: a rank that reads a value sees everything written before it.
#[repr(transparent)]
pub struct PublishedCounter<A: Atomics = Native>(A::U64);

impl<A: Atomics> PublishedCounter<A> {
    pub fn publish(&self, value: u64) {
        self.0.store(value, Release);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Acquire)
    }
}

/// Whether a rank accesses memory of other ranks, which they may reclaim at any time.
#[repr(transparent)]
pub struct PeerAccess<A: Atomics = Native>(A::U32);

impl<A: Atomics> PeerAccess<A> {
    /// Returns false after an abort: the rank must not access the memory.
    pub fn start<const WORDS: usize>(&self, end: &OnceRecord<WORDS, A>) -> bool {
        self.0.store(1, Relaxed);
        A::fence(SeqCst);
        let may = !end.is_claimed();
        if !may {
            self.end();
        }
        may
    }

    pub fn end(&self) {
        self.0.store(0, Release);
    }

    /// Called after an abort was recorded or seen: false if the rank no longer accesses anything.
    pub fn is_accessing_peers(&self) -> bool {
        A::fence(SeqCst);
        self.0.load(Acquire) != 0
    }
}

/// Words that one rank overwrites and others read completely or not at all.
#[repr(C)]
pub struct Seqlock<const WORDS: usize, A: Atomics = Native> {
    /// Identifies the contents of `words`; 0 while they are written.
    stamp: A::U64,
    words: [A::U64; WORDS],
}

impl<const WORDS: usize, A: Atomics> Seqlock<WORDS, A> {
    /// No stamp is used twice, and none is 0.
    pub fn write(&self, stamp: u64, words: [u64; WORDS]) {
        self.stamp.store(0, Relaxed);
        A::fence(Release);
        for (place, word) in self.words.iter().zip(words) {
            place.store(word, Relaxed);
        }
        self.stamp.store(stamp, Release);
    }

    /// The words with this stamp, if present.
    pub fn read(&self, stamp: u64) -> Option<[u64; WORDS]> {
        if self.stamp.load(Acquire) != stamp {
            return None;
        }
        let words = std::array::from_fn(|at| self.words[at].load(Relaxed));
        A::fence(Acquire);
        // Overwritten during the reading: discard.
        (self.stamp.load(Relaxed) == stamp).then_some(words)
    }
}

/// Arrival counter of a chunk that the last arriver reduces.
///
/// One word: the chunk, the latest arriver and the number of arrivals. Values of an earlier chunk
/// in the slot count as zero: its ranks have finished before the slot is reused.
#[repr(transparent)]
pub struct ArrivalCounter<A: Atomics = Native>(A::U64);

impl<A: Atomics> ArrivalCounter<A> {
    const COUNT: u64 = 0xff;
    const DONE: u64 = 0xff;

    fn word(chunk: u64, local: usize, count: u64) -> u64 {
        chunk << 16 | (local as u64) << 8 | count
    }

    fn count(word: u64, chunk: u64) -> u64 {
        if word >> 16 == chunk { word & Self::COUNT } else { 0 }
    }

    /// Counts an arrival and returns the number of arrivals. The last arriver may read all inputs.
    pub fn arrive(&self, chunk: u64, local: usize) -> usize {
        let mut word = self.0.load(Relaxed);
        loop {
            let count = Self::count(word, chunk) + 1;
            let next = Self::word(chunk, local, count);
            match self.0.compare_exchange(word, next, AcqRel, Relaxed) {
                Ok(_) => return count as usize,
                Err(now) => word = now,
            }
        }
    }

    /// Publishes the result of the last arriver.
    pub fn complete(&self, chunk: u64, local: usize) {
        self.0.store(Self::word(chunk, local, Self::DONE), Release);
    }

    /// The rank that has reduced the chunk; its result is visible to the caller.
    pub fn reduced_by(&self, chunk: u64) -> Option<usize> {
        let word = self.0.load(Acquire);
        (Self::count(word, chunk) == Self::DONE).then_some((word >> 8 & 0xff) as usize)
    }

    /// The number of arrivals so far, and the latest arriver.
    pub fn progress(&self, chunk: u64) -> (usize, usize) {
        let word = self.0.load(Relaxed);
        (Self::count(word, chunk) as usize, (word >> 8 & 0xff) as usize)
    }
}

/// Events that a sleeping rank waits for.
#[repr(transparent)]
pub struct SleepState<A: Atomics = Native>(A::U32);

impl<A: Atomics> SleepState<A> {
    /// The rank checks everything once more after this, and then sleeps.
    pub fn fall_asleep(&self, reasons: u32) {
        self.0.store(reasons, Relaxed);
        A::fence(SeqCst);
    }

    pub fn wake_up(&self) {
        // An exchange: the model checker orders stores of several threads only by what they read.
        self.0.swap(0, Relaxed);
    }

    /// True if the rank sleeps until one of `reasons`. Called after a change and a full fence.
    pub fn sleeps_for(&self, reasons: u32) -> bool {
        self.0.load(Relaxed) & reasons != 0
    }

    /// The same; if true, this caller must wake the rank, and no other does.
    pub fn claim_wakeup(&self, reasons: u32) -> bool {
        let mut asleep_for = self.0.load(Relaxed);
        while asleep_for & reasons != 0 {
            // The rank may have woken up meanwhile and sleep for other events, which must not be
            // cleared.
            match self.0.compare_exchange(asleep_for, 0, Relaxed, Relaxed) {
                Ok(_) => return true,
                Err(now) => asleep_for = now,
            }
        }
        false
    }
}

/// Bytes that are written once, by the first writer.
#[repr(C)]
pub struct OnceRecord<const WORDS: usize, A: Atomics = Native> {
    /// 0: empty, 1: complete, otherwise 2 + the writer, which has not finished.
    state: A::U32,
    length: A::U32,
    words: [A::U64; WORDS],
}

/// Contents of a record.
#[derive(Debug, PartialEq, Eq)]
pub enum RecordState {
    Empty,
    /// This writer is writing it, or its process ended during the write.
    Partial(u32),
    Complete(Vec<u8>),
}

impl<const WORDS: usize, A: Atomics> OnceRecord<WORDS, A> {
    const COMPLETE: u32 = 1;
    const WRITER: u32 = 2;

    /// Returns false if another writer was first. Truncates the bytes to the available space.
    pub fn write(&self, writer: u32, bytes: &[u8]) -> bool {
        if !self.claim(writer) {
            return false;
        }
        let length = bytes.len().min(WORDS * 8);
        for (word, bytes) in self.words.iter().zip(bytes[..length].chunks(8)) {
            let mut value = [0; 8];
            value[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(value), Relaxed);
        }
        self.length.store(length as u32, Relaxed);
        self.state.store(Self::COMPLETE, Release);
        true
    }

    /// Claims the record for `writer`; false if another was first. One exchange does both, so the
    /// writer of a partial record is always known.
    pub fn claim(&self, writer: u32) -> bool {
        self.state.compare_exchange(0, Self::WRITER + writer, AcqRel, Acquire).is_ok()
    }

    pub fn read(&self) -> RecordState {
        match self.state.load(Acquire) {
            0 => return RecordState::Empty,
            Self::COMPLETE => {}
            other => return RecordState::Partial(other - Self::WRITER),
        }
        let length = self.length.load(Relaxed) as usize;
        let words = self.words.iter().take(length.div_ceil(8));
        let mut bytes: Vec<u8> = words.flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
        bytes.truncate(length);
        RecordState::Complete(bytes)
    }

    /// True once a writer has claimed it; cheap enough for every poll.
    pub fn is_claimed(&self) -> bool {
        self.state.load(Relaxed) != 0
    }
}

#[cfg(test)]
#[path = "primitives_models.rs"]
mod models;
