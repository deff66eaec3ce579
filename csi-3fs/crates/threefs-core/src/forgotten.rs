//! Set of forgotten inodes, whose chunks were dropped permanently: prevents late updates from
//! recreating them.
//!
//! Inode numbers are never reused, so a forgotten inode stays forgotten, and replicas cannot
//! disagree: the union of their sets is correct. Adjacent numbers are one entry. The number of
//! entries is bounded: the set is the second line of defence (the first is that updates expire
//! before their inode is forgotten), so the least recently updated entry is evicted first.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::InodeId;

/// Maximum number of entries: about 8 MiB of memory and at most 1.3 MiB of a compacted log.
pub const FORGOTTEN_RANGES_MAX: usize = 65_536;

/// Maximum number of ranges in one request.
pub const FORGET_INODES_MAX: usize = 1_024;

/// Inodes `first ..= last`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct InodeRange {
    /// The first inode.
    pub first: InodeId,
    /// The last inode, inclusive.
    pub last: InodeId,
}

impl InodeRange {
    /// One inode.
    #[must_use]
    pub fn one(inode: InodeId) -> Self {
        Self { first: inode, last: inode }
    }

    /// Whether the range contains `inode`.
    #[must_use]
    pub fn contains(&self, inode: InodeId) -> bool {
        self.first <= inode && inode <= self.last
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    last: u64,
    last_touch: u64,
}

/// Bounded set of forgotten inodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForgottenInodes {
    runs: BTreeMap<u64, Run>,
    // Last update of a run -> its first inode.
    oldest_first: BTreeMap<u64, u64>,
    touches: u64,
}

impl ForgottenInodes {
    /// Inserts a range and merges it with its neighbors.
    pub fn insert(&mut self, range: InodeRange) {
        let (mut first, mut last) = (range.first.0, range.last.0);
        if first > last {
            return;
        }
        if let Some((&before, run)) = self.runs.range(..=first).next_back()
            && run.last.saturating_add(1) >= first
        {
            (first, last) = (before, last.max(run.last));
        }
        let reach = last.saturating_add(1);
        let adjacent: Vec<u64> = self.runs.range(first..=reach).map(|(start, _)| *start).collect();
        for start in adjacent {
            if let Some(run) = self.runs.remove(&start) {
                last = last.max(run.last);
                self.oldest_first.remove(&run.last_touch);
            }
        }
        self.touches += 1;
        self.runs.insert(first, Run { last, last_touch: self.touches });
        self.oldest_first.insert(self.touches, first);
        if self.runs.len() > FORGOTTEN_RANGES_MAX
            && let Some((_, oldest)) = self.oldest_first.pop_first()
        {
            self.runs.remove(&oldest);
        }
    }

    /// Whether `inode` was forgotten, as far as known.
    #[must_use]
    pub fn contains(&self, inode: InodeId) -> bool {
        let run = self.runs.range(..=inode.0).next_back();
        run.is_some_and(|(_, run)| inode.0 <= run.last)
    }

    /// Ranges that start after `after` (from the first for `None`), in order, at most `limit`.
    #[must_use]
    pub fn ranges(&self, after: Option<InodeId>, limit: usize) -> Vec<InodeRange> {
        let from = match after {
            None => 0,
            Some(InodeId(u64::MAX)) => return Vec::new(),
            Some(inode) => inode.0 + 1,
        };
        self.runs
            .range(from..)
            .take(limit)
            .map(|(first, run)| InodeRange { first: InodeId(*first), last: InodeId(run.last) })
            .collect()
    }

    /// All ranges, least recently updated first: inserting them in this order recreates the set
    /// with the same ages.
    pub fn by_age(&self) -> impl Iterator<Item = InodeRange> {
        self.oldest_first.values().filter_map(|first| {
            let run = self.runs.get(first)?;
            Some(InodeRange { first: InodeId(*first), last: InodeId(run.last) })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn range(first: u64, last: u64) -> InodeRange {
        InodeRange { first: InodeId(first), last: InodeId(last) }
    }

    #[test]
    fn adjacent_inodes_share_one_entry() {
        let mut forgotten = ForgottenInodes::default();
        for inode in [5, 7, 6, 9, 8, u64::MAX] {
            forgotten.insert(InodeRange::one(InodeId(inode)));
        }
        assert_eq!(forgotten.ranges(None, 9), [range(5, 9), range(u64::MAX, u64::MAX)]);
        assert_eq!(forgotten.ranges(Some(InodeId(5)), 9), [range(u64::MAX, u64::MAX)]);
        assert_eq!(forgotten.ranges(Some(InodeId(u64::MAX)), 9), []);
    }

    #[test]
    fn the_number_of_entries_is_bounded_and_the_oldest_is_evicted_first() {
        let mut forgotten = ForgottenInodes::default();
        for inode in 0..=FORGOTTEN_RANGES_MAX as u64 {
            forgotten.insert(InodeRange::one(InodeId(inode * 2)));
        }
        assert_eq!(forgotten.by_age().count(), FORGOTTEN_RANGES_MAX);
        assert!(!forgotten.contains(InodeId(0)));
        assert!(forgotten.contains(InodeId(2)));
    }

    proptest! {
        #[test]
        fn entries_behave_like_a_set(ranges in prop::collection::vec((0u64..60, 0u64..5), 0..40)) {
            let mut forgotten = ForgottenInodes::default();
            let mut model = BTreeSet::new();
            for (first, more) in ranges {
                forgotten.insert(range(first, first + more));
                model.extend(first..=first + more);
            }
            for inode in 0..70 {
                prop_assert_eq!(forgotten.contains(InodeId(inode)), model.contains(&inode));
            }
            let mut again = ForgottenInodes::default();
            forgotten.by_age().for_each(|range| again.insert(range));
            prop_assert_eq!(again.ranges(None, 99), forgotten.ranges(None, 99));
            // Entries are not adjacent.
            let runs = forgotten.ranges(None, 99);
            prop_assert!(runs.windows(2).all(|two| two[0].last.0 + 1 < two[1].first.0));
        }
    }
}
