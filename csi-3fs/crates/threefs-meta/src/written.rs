//! Ranges of a file's chunks that are known to exist.
//!
//! A chunk in them was written and never removed since, so storage must have it: a read that does
//! not find it has met data loss and returns an error. Outside of them an absent chunk is a hole.
//! The set is bounded; what does not fit is forgotten, which turns an error into zeros and never
//! zeros into an error.

use serde::{Deserialize, Serialize};

/// Ranges that an inode keeps: at most 2.5 KiB of its row. A file that is written from its start to
/// its end, or by up to this many writers at distant places at once, is known completely.
pub const RANGES_MAX: usize = 256;
/// Ranges that one length report may carry.
pub const REPORT_RANGES_MAX: usize = 64;

/// Chunk indexes, as ranges (first, last), sorted, disjoint and not adjacent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Written(Vec<(u32, u32)>);

impl Written {
    /// The chunks that bytes from `offset` on and before `end` lie in.
    pub fn of_bytes(offset: u64, end: u64, chunk_bytes: u32) -> Self {
        let mut written = Self::default();
        written.add_bytes(offset, end, chunk_bytes);
        written
    }

    /// Adds the chunks that bytes from `offset` on and before `end` lie in.
    pub fn add_bytes(&mut self, offset: u64, end: u64, chunk_bytes: u32) {
        let size = u64::from(chunk_bytes.max(1));
        if end > offset {
            let index = |at: u64| u32::try_from(at / size).unwrap_or(u32::MAX);
            self.add(index(offset), index(end - 1), REPORT_RANGES_MAX);
        }
    }

    /// Adds all of another set, and keeps at most [`RANGES_MAX`] ranges.
    pub fn merge(&mut self, other: &Self) {
        self.merge_within(other, RANGES_MAX);
    }

    fn merge_within(&mut self, other: &Self, ranges_max: usize) {
        for (first, last) in &other.0 {
            self.add(*first, *last, ranges_max);
        }
    }

    /// Forgets the chunks at or beyond `length` bytes.
    pub fn cut(&mut self, length: u64, chunk_bytes: u32) {
        let chunks = length.div_ceil(u64::from(chunk_bytes.max(1)));
        self.0.retain(|(first, _)| u64::from(*first) < chunks);
        if let Some((_, last)) = self.0.last_mut() {
            let end = u32::try_from(chunks.saturating_sub(1)).unwrap_or(u32::MAX);
            *last = (*last).min(end);
        }
    }

    /// Whether this chunk must exist.
    pub fn contains(&self, index: u32) -> bool {
        self.0.iter().any(|(first, last)| (*first..=*last).contains(&index))
    }

    /// How many ranges it has.
    pub fn ranges(&self) -> usize {
        self.0.len()
    }

    /// True when nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn add(&mut self, first: u32, last: u32, ranges_max: usize) {
        if first > last {
            return;
        }
        let (mut first, mut last) = (first, last);
        self.0.retain(|(begin, end)| {
            let apart = end.checked_add(1).is_some_and(|next| next < first)
                || last.checked_add(1).is_some_and(|next| next < *begin);
            if !apart {
                first = first.min(*begin);
                last = last.max(*end);
            }
            apart
        });
        let place = self.0.partition_point(|(begin, _)| *begin < first);
        self.0.insert(place, (first, last));
        while self.0.len() > ranges_max {
            let shortest = (0..self.0.len()).min_by_key(|at| self.0[*at].1 - self.0[*at].0);
            self.0.remove(shortest.unwrap_or(0));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn adjacent_ranges_become_one_and_a_cut_keeps_the_chunk_with_the_end() {
        let mut written = Written::of_bytes(0, 100, 10);
        written.add_bytes(100, 101, 10);
        assert_eq!(written, Written(vec![(0, 10)]));
        written.cut(55, 10);
        assert_eq!(written, Written(vec![(0, 5)]));
        written.cut(0, 10);
        assert!(written.is_empty());
        written.add_bytes(u64::MAX - 1, u64::MAX, 10);
        assert!(written.contains(u32::MAX));
    }

    /// Each of them continues at its place, in turn; what the bound forgets stays forgotten.
    #[test]
    fn ninety_six_writers_of_one_file_leave_no_chunk_unknown() {
        const CHUNKS: u64 = 64;
        let mut written = Written::default();
        for chunk in 0..CHUNKS {
            for writer in 0..96 {
                let at = (writer * CHUNKS + chunk) * 10;
                written.merge(&Written::of_bytes(at, at + 10, 10));
            }
        }
        assert_eq!(written, Written(vec![(0, 96 * CHUNKS as u32 - 1)]));
    }

    proptest! {
        /// It never claims a chunk that was not written, however small the bound is, and while the
        /// bound holds all of them it forgets none.
        #[test]
        fn it_claims_only_what_was_written(
            steps in prop::collection::vec((0u32..60, 0u32..20, any::<bool>()), 0..60),
        ) {
            const BOUND: usize = 16;
            let mut written = Written::default();
            let mut model = std::collections::BTreeSet::new();
            let mut complete = true;
            for (at, length, cut) in steps {
                if cut {
                    written.cut(u64::from(at) * 4 - u64::from(at > 0), 4);
                    model.retain(|index| *index < at);
                } else {
                    let more = Written::of_bytes(u64::from(at) * 4, u64::from(at + length) * 4, 4);
                    written.merge_within(&more, BOUND);
                    model.extend(at..at + length);
                }
                prop_assert!(written.ranges() <= BOUND);
                let mut ranges = 0;
                for index in 0..80 {
                    ranges += u32::from(model.contains(&index) && !model.contains(&(index + 1)));
                    prop_assert!(!written.contains(index) || model.contains(&index));
                }
                complete &= ranges as usize <= BOUND;
                prop_assert!(!complete || model.iter().all(|index| written.contains(*index)));
            }
        }
    }
}
