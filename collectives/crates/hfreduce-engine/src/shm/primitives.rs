//! The segment's protocols, one block each: plain memory of atomics, written over [`Atomics`] so that
//! a model checker runs the very code that ranks run (`primitives_models.rs`).
//!
//! All of them are valid as zeroed bytes, and none of their methods waits.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

use crate::atomics::{Atomic, Atomics, Native};

/// A number that one rank tells the others: what it did before telling is seen by whoever is told.
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

/// Whether a rank uses memory of others that they may want back at any moment.
#[repr(transparent)]
pub struct PeerAccess<A: Atomics = Native>(A::U32);

impl<A: Atomics> PeerAccess<A> {
    /// False if all has ended: then the rank must not.
    pub fn begin<const WORDS: usize>(&self, end: &OnceRecord<WORDS, A>) -> bool {
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

    /// For whoever has recorded the end, or has seen it: false if the rank touches nothing any more.
    pub fn is_accessing_peers(&self) -> bool {
        A::fence(SeqCst);
        self.0.load(Acquire) != 0
    }
}

/// Words that one rank writes again and again and others read whole or not at all.
#[repr(C)]
pub struct Seqlock<const WORDS: usize, A: Atomics = Native> {
    /// What is in `words`; 0 while it is being written.
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

    /// The words of this stamp, if they are there.
    pub fn read(&self, stamp: u64) -> Option<[u64; WORDS]> {
        if self.stamp.load(Acquire) != stamp {
            return None;
        }
        let words = std::array::from_fn(|at| self.words[at].load(Relaxed));
        A::fence(Acquire);
        // Overwritten while we read: forget it.
        (self.stamp.load(Relaxed) == stamp).then_some(words)
    }
}

/// Who has contributed to a chunk that the last one adds up.
///
/// One word: the chunk, whose turn it was last, how many have contributed. What an earlier chunk of
/// the same slot has left counts as nothing: its ranks are past it before the slot is anybody's.
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

    /// `local` has contributed; how many have. Whoever is told that all have reads what they gave.
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

    /// The last one has added up.
    pub fn complete(&self, chunk: u64, local: usize) {
        self.0.store(Self::word(chunk, local, Self::DONE), Release);
    }

    /// Who has added up; what he made is there for whoever is told.
    pub fn reduced_by(&self, chunk: u64) -> Option<usize> {
        let word = self.0.load(Acquire);
        (Self::count(word, chunk) == Self::DONE).then_some((word >> 8 & 0xff) as usize)
    }

    /// How many have contributed so far, and who was the last of them.
    pub fn progress(&self, chunk: u64) -> (usize, usize) {
        let word = self.0.load(Relaxed);
        (Self::count(word, chunk) as usize, (word >> 8 & 0xff) as usize)
    }
}

/// For what a rank sleeps.
#[repr(transparent)]
pub struct SleepState<A: Atomics = Native>(A::U32);

impl<A: Atomics> SleepState<A> {
    /// The rank looks once more at everything after this, and then sleeps.
    pub fn fall_asleep(&self, reasons: u32) {
        self.0.store(reasons, Relaxed);
        A::fence(SeqCst);
    }

    pub fn wake_up(&self) {
        // Exchanged: the model checker orders stores of several threads only by what they read.
        self.0.swap(0, Relaxed);
    }

    /// After a change and a full fence: true if the rank sleeps for such a thing.
    pub fn sleeps_for(&self, reasons: u32) -> bool {
        self.0.load(Relaxed) & reasons != 0
    }

    /// The same, and it must be woken by the caller, and by nobody else.
    pub fn claim_wakeup(&self, reasons: u32) -> bool {
        let mut asleep_for = self.0.load(Relaxed);
        while asleep_for & reasons != 0 {
            // Between two looks it may have woken up by itself and sleep for something else: that is
            // not ours to take away.
            match self.0.compare_exchange(asleep_for, 0, Relaxed, Relaxed) {
                Ok(_) => return true,
                Err(now) => asleep_for = now,
            }
        }
        false
    }
}

/// Bytes that are written once, by whoever is first.
#[repr(C)]
pub struct OnceRecord<const WORDS: usize, A: Atomics = Native> {
    /// 0 nothing, 1 there, otherwise 2 + the writer, which has not finished.
    state: A::U32,
    length: A::U32,
    words: [A::U64; WORDS],
}

/// What a record holds.
#[derive(Debug, PartialEq, Eq)]
pub enum RecordState {
    Empty,
    /// This writer is writing it, or died while it did.
    Partial(u32),
    Complete(Vec<u8>),
}

impl<const WORDS: usize, A: Atomics> OnceRecord<WORDS, A> {
    const COMPLETE: u32 = 1;
    const WRITER: u32 = 2;

    /// False if another writer was first. What does not fit is cut off.
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

    /// Makes `writer` the one that writes; false if another was first. One exchange does both, so no
    /// record is begun by an unknown writer.
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

    /// True once somebody has begun to write it; cheap enough for every look.
    pub fn is_claimed(&self) -> bool {
        self.state.load(Relaxed) != 0
    }
}

#[cfg(test)]
#[path = "primitives_models.rs"]
mod models;
