//! Set of a file's chunks that are known to exist.
//!
//! A chunk in the set was written and never removed since, so storage must have it: a read that
//! does not find it has detected data loss and returns an error. Any other absent chunk is a hole.
//! The set is exact. An inode keeps the [`RANGES_MAX`] longest ranges; further ones are in rows of
//! the store (`ops::file::written_rows`).

pub(crate) mod page;

use serde::{Deserialize, Serialize};

/// Ranges in the inode: at most 2.5 KiB of its row. Enough for a file that is written sequentially,
/// or by up to this many concurrent writers at distant offsets.
pub const RANGES_MAX: usize = 256;
/// Ranges in all reports of one change: those that move into rows fit into one transaction.
pub const REPORT_RANGES_MAX: usize = 512;

/// Chunk indexes, as ranges (first, last), sorted, disjoint and not adjacent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Written {
    ranges: Vec<(u32, u32)>,
    /// For an inode: further ranges are in rows of the store.
    more: bool,
}

impl Written {
    /// The chunks that contain bytes from `offset` up to `end`.
    pub fn of_bytes(offset: u64, end: u64, chunk_bytes: u32) -> Self {
        let mut written = Self::default();
        written.add_bytes(offset, end, chunk_bytes);
        written
    }

    /// Adds the chunks that contain bytes from `offset` up to `end`.
    pub fn add_bytes(&mut self, offset: u64, end: u64, chunk_bytes: u32) {
        let size = u64::from(chunk_bytes.max(1));
        if end > offset {
            let index = |at: u64| u32::try_from(at / size).unwrap_or(u32::MAX);
            self.add(index(offset), index(end - 1));
        }
    }

    /// Adds the chunks from `first` to `last`.
    pub fn add(&mut self, first: u32, last: u32) {
        if first > last {
            return;
        }
        let before = |end: u32| end.checked_add(1).is_some_and(|next| next < first);
        let lower = self.ranges.partition_point(|(_, end)| before(*end));
        let end = self.ranges.partition_point(|(start, _)| *start <= last.saturating_add(1));
        let adjacent = self.ranges.get(lower..end).unwrap_or_default();
        let first = adjacent.first().map_or(first, |(start, _)| first.min(*start));
        let last = adjacent.last().map_or(last, |(_, end)| last.max(*end));
        self.ranges.splice(lower..end.max(lower), [(first, last)]);
    }

    /// Adds all ranges of another set.
    pub fn merge(&mut self, other: &Self) {
        for (first, last) in &other.ranges {
            self.add(*first, *last);
        }
    }

    /// Removes the shortest ranges until at most `ranges_max` are left, and returns them.
    pub fn shorten(&mut self, ranges_max: usize) -> Self {
        let mut removed = Self::default();
        while self.ranges.len() > ranges_max {
            let length = |at: &usize| self.ranges[*at].1 - self.ranges[*at].0;
            let Some(shortest) = (0..self.ranges.len()).min_by_key(length) else { break };
            let (first, last) = self.ranges.remove(shortest);
            removed.add(first, last);
        }
        removed
    }

    /// Removes and returns the first ranges, at most `ranges_max`.
    pub fn take(&mut self, ranges_max: usize) -> Self {
        let rest = self.ranges.split_off(ranges_max.min(self.ranges.len()));
        Self { ranges: std::mem::replace(&mut self.ranges, rest), more: false }
    }

    /// Removes the chunks at or beyond `length` bytes.
    pub fn cut(&mut self, length: u64, chunk_bytes: u32) {
        let chunks = chunks_of(length, chunk_bytes);
        self.ranges.retain(|(first, _)| u64::from(*first) < chunks);
        if let Some((_, last)) = self.ranges.last_mut() {
            let end = u32::try_from(chunks.saturating_sub(1)).unwrap_or(u32::MAX);
            *last = (*last).min(end);
        }
    }

    /// Whether this chunk must exist. For an inode with more ranges in rows, `false` is
    /// inconclusive.
    pub fn contains(&self, index: u32) -> bool {
        let position = self.ranges.partition_point(|(_, last)| *last < index);
        self.ranges.get(position).is_some_and(|(first, _)| *first <= index)
    }

    /// Whether all chunks from `first` to `last` must exist.
    pub fn contains_all(&self, first: u32, last: u32) -> bool {
        let position = self.ranges.partition_point(|(_, end)| *end < last);
        self.ranges.get(position).is_some_and(|(start, _)| *start <= first)
    }

    /// The ranges, first and last chunk of each.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.ranges.iter().copied()
    }

    /// Number of ranges.
    pub fn ranges(&self) -> usize {
        self.ranges.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether further ranges are in rows of the store.
    pub fn has_more(&self) -> bool {
        self.more
    }

    /// Sets whether further ranges are in rows of the store.
    pub(crate) fn set_more(&mut self, more: bool) {
        self.more = more;
    }
}

/// Chunks that may hold bytes before `length`.
pub(crate) fn chunks_of(length: u64, chunk_bytes: u32) -> u64 {
    length.div_ceil(u64::from(chunk_bytes.max(1)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn of(ranges: &[(u32, u32)]) -> Written {
        Written { ranges: ranges.to_vec(), more: false }
    }

    #[test]
    fn adjacent_ranges_merge_and_a_truncation_keeps_the_chunk_with_the_end() {
        let mut written = Written::of_bytes(0, 100, 10);
        written.add_bytes(100, 101, 10);
        assert_eq!(written, of(&[(0, 10)]));
        written.cut(55, 10);
        assert_eq!(written, of(&[(0, 5)]));
        written.cut(0, 10);
        assert!(written.is_empty());
        written.add_bytes(u64::MAX - 1, u64::MAX, 10);
        assert!(written.contains(u32::MAX));
    }

    #[test]
    fn the_shortest_ranges_are_removed_first() {
        let mut written = of(&[(0, 9), (20, 20), (30, 35), (50, 51)]);
        assert_eq!(written.shorten(2), of(&[(20, 20), (50, 51)]));
        assert_eq!(written, of(&[(0, 9), (30, 35)]));
        assert_eq!(written.take(1), of(&[(0, 9)]));
        assert_eq!((written.take(5), written.is_empty()), (of(&[(30, 35)]), true));
    }

    proptest! {
        /// The set holds exactly the chunks that were added and not cut since.
        #[test]
        fn it_equals_the_set_of_written_chunks(
            steps in prop::collection::vec((0u32..60, 0u32..20, any::<bool>()), 0..60),
        ) {
            let mut written = Written::default();
            let mut model = BTreeSet::new();
            for (at, length, cut) in steps {
                if cut {
                    written.cut(u64::from(at) * 4 - u64::from(at > 0), 4);
                    model.retain(|index| *index < at);
                } else {
                    written.merge(&Written::of_bytes(u64::from(at) * 4, u64::from(at + length) * 4, 4));
                    model.extend(at..at + length);
                }
                let starts = |index: &&u32| **index == 0 || !model.contains(&(**index - 1));
                prop_assert_eq!(written.ranges(), model.iter().filter(starts).count());
                for index in 0..100 {
                    prop_assert_eq!(written.contains(index), model.contains(&index));
                }
            }
        }
    }
}
