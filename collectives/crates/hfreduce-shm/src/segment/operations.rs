//! Operations of the ranks: their fingerprints, their registered memory and access to it, and which
//! have ended.

use super::ShmSegment;
use super::layout::{FINGERPRINTS_KEPT, REGISTERED_MAX};
use hfreduce_core::{FINGERPRINT_BYTES, Fingerprint};

const NOT_REGISTERED: u64 = u64::MAX;

/// Offsets of a rank's memory of one operation in its arena, where other ranks access it in place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registered {
    /// Offset of its input.
    pub input: Option<u64>,
    /// Offset of its output.
    pub output: Option<u64>,
}

/// Comparison of another rank's operation with that of this rank.
#[derive(Debug, PartialEq, Eq)]
pub enum Compared {
    /// Equal.
    Equal,
    /// Different: this is the other rank's.
    Differs(Fingerprint),
    /// The other rank has not started that operation; its latest one, if any.
    Absent(Option<(u64, Fingerprint)>),
}

impl ShmSegment {
    /// Publishes the memory that `local` has registered for its operation number `ordinal` along
    /// the trees, before it stages the first chunk of the operation.
    #[inline]
    pub fn register(&self, local: usize, ordinal: u64, sequence: u64, memory: Registered) {
        let block = &self.rank(local).registered[ordinal as usize % REGISTERED_MAX];
        let word = |place: Option<u64>| place.unwrap_or(NOT_REGISTERED);
        block.write(sequence + 1, [word(memory.input), word(memory.output)]);
    }

    /// The memory that `local` has registered for the operation, if any. Valid once it has staged a
    /// chunk of it.
    #[inline]
    pub fn registered(&self, local: usize, ordinal: u64, sequence: u64) -> Option<Registered> {
        let block = &self.rank(local).registered[ordinal as usize % REGISTERED_MAX];
        let place = |word| Some(word).filter(|word| *word != NOT_REGISTERED);
        let [input, output] = block.read(sequence + 1)?.map(place);
        Some(Registered { input, output })
    }

    /// Starts access of `local` to registered memory of other ranks; false after an abort.
    #[inline]
    pub fn start_peer_access(&self, local: usize) -> bool {
        self.rank(local).peer_access.start(&self.header().abort)
    }

    /// Ends that access. Also called for a rank whose process has ended.
    #[inline]
    pub fn end_peer_access(&self, local: usize) {
        self.rank(local).peer_access.end();
    }

    /// True if `local` accesses registered memory of other ranks; after an abort, whether it still
    /// may.
    #[inline]
    pub fn is_accessing_peers(&self, local: usize) -> bool {
        self.rank(local).peer_access.is_accessing_peers()
    }

    /// Publishes that `local` starts operation `sequence`.
    #[inline]
    pub fn enter(&self, local: usize, sequence: u64, fingerprint: &Fingerprint) {
        let rank = self.rank(local);
        rank.fingerprints[sequence as usize % FINGERPRINTS_KEPT]
            .write(sequence + 1, fingerprint.words());
        rank.entered.publish(sequence + 1);
    }

    /// Number of operations that `local` has started.
    #[inline]
    pub fn entered(&self, local: usize) -> u64 {
        self.rank(local).entered.get()
    }

    /// Publishes that every operation below `sequence` has ended at `local`.
    #[inline]
    pub fn end(&self, local: usize, sequence: u64) {
        self.rank(local).ended.publish(sequence);
    }

    /// Every operation below this one has ended at `local`.
    #[inline]
    pub fn ended(&self, local: usize) -> u64 {
        self.rank(local).ended.get()
    }

    /// Every operation below this one has ended at every rank.
    #[inline]
    pub fn ended_by_all(&self) -> u64 {
        self.least(|rank| &rank.ended)
    }

    /// Compares operation `sequence` of `local` with `fingerprint`.
    #[inline]
    pub fn compare(&self, local: usize, sequence: u64, fingerprint: Fingerprint) -> Compared {
        match self.fingerprint(local, sequence) {
            Some(other) if other == fingerprint => Compared::Equal,
            Some(other) => Compared::Differs(other),
            None => {
                let latest = self.entered(local).checked_sub(1);
                Compared::Absent(latest.and_then(|at| Some((at, self.fingerprint(local, at)?))))
            }
        }
    }

    /// Fingerprint of operation `sequence` of `local`, while it is kept.
    #[inline]
    pub fn fingerprint(&self, local: usize, sequence: u64) -> Option<Fingerprint> {
        let block = &self.rank(local).fingerprints[sequence as usize % FINGERPRINTS_KEPT];
        let words = block.read(sequence + 1)?;
        let mut bytes = [0; FINGERPRINT_BYTES];
        for (word, bytes) in words.iter().zip(bytes.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Fingerprint::decode(&bytes)
    }
}
