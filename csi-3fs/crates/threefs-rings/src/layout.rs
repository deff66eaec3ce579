//! Layout of a ring: a header of one page with the completion counter in its first word, then
//! the submissions, then the completions.
//!
//! Both arrays have the same number of entries. The n-th submission and the n-th completion are at
//! index n modulo that number, which is a power of two, so that the numbers can wrap around. The
//! caller never has more submissions in flight than the ring has entries, so neither array
//! overflows.

use crate::entry::{COMPLETION_BYTES, SUBMISSION_BYTES};

/// Bytes of the header: one page, so that the daemon can map it alone.
pub const HEADER_BYTES: usize = 4096;
/// Maximum number of entries of a ring.
pub const ENTRIES_MAX: u32 = 1 << 16;

/// Layout of a ring with a number of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    entries: u32,
}

impl Layout {
    /// `None` if the number of entries is not a power of two, or above [`ENTRIES_MAX`].
    pub fn new(entries: u32) -> Option<Self> {
        (entries.is_power_of_two() && entries <= ENTRIES_MAX).then_some(Self { entries })
    }

    /// The smallest ring with room for `entries`; `None` if that is 0 or above [`ENTRIES_MAX`].
    pub fn for_entries(entries: u32) -> Option<Self> {
        let valid = (1..=ENTRIES_MAX).contains(&entries);
        valid.then(|| Self { entries: entries.next_power_of_two() })
    }

    /// Number of entries.
    pub fn entries(self) -> u32 {
        self.entries
    }

    /// Size of the ring in bytes.
    pub fn bytes(self) -> usize {
        HEADER_BYTES + self.entries as usize * (SUBMISSION_BYTES + COMPLETION_BYTES)
    }

    /// Offset of submission number `number`, counted from the ring's creation.
    pub fn submission(self, number: u32) -> usize {
        HEADER_BYTES + (number % self.entries) as usize * SUBMISSION_BYTES
    }

    /// Offset of completion number `number`.
    pub fn completion(self, number: u32) -> usize {
        HEADER_BYTES
            + self.entries as usize * SUBMISSION_BYTES
            + (number % self.entries) as usize * COMPLETION_BYTES
    }

    /// Number of submissions from `number` on that are contiguous, at most `count`.
    pub fn contiguous(self, number: u32, count: u32) -> u32 {
        count.min(self.entries - number % self.entries)
    }
}
