//! Extents of the data file, and the free list.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// A run of blocks of the data file, or of zeros that are not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Extent {
    pub(crate) start: u64,
    pub(crate) blocks: u32,
}

/// A chunk in this number of runs or more is rewritten as a whole by its next update.
pub(crate) const RUNS_MAX: usize = 128;
/// Maximum number of runs of an allocation, as long as the data file can grow instead.
pub(crate) const ALLOCATED_RUNS_MAX: usize = 32;

/// Start of a run of zeros. Logs of older versions have none.
const HOLE: u64 = u64::MAX;

impl Extent {
    /// Zeros that take no blocks.
    pub(crate) fn hole(blocks: u32) -> Self {
        Self { start: HOLE, blocks }
    }

    pub(crate) fn is_hole(self) -> bool {
        self.start == HOLE
    }

    /// Must not be called on a hole.
    pub(crate) fn end(self) -> u64 {
        self.start + u64::from(self.blocks)
    }
}

/// Appends a run, merged with an adjacent run or hole.
pub(crate) fn push_extent(extents: &mut Vec<Extent>, next: Extent) {
    if next.blocks == 0 {
        return;
    }
    if let Some(last) = extents.last_mut()
        && (if last.is_hole() { next.is_hole() } else { last.end() == next.start })
        && let Some(blocks) = last.blocks.checked_add(next.blocks)
    {
        last.blocks = blocks;
        return;
    }
    extents.push(next);
}

/// Total number of blocks of the runs, without holes.
pub(crate) fn blocks_in(extents: &[Extent]) -> u64 {
    let data_extents = extents.iter().filter(|extent| !extent.is_hole());
    data_extents.map(|extent| u64::from(extent.blocks)).sum()
}

/// Blocks `from .. to` of the content that `extents` hold, in order.
pub(crate) fn slice(extents: &[Extent], from: usize, to: usize) -> Vec<Extent> {
    let mut part = Vec::new();
    let mut at = 0_usize;
    for extent in extents {
        let blocks = extent.blocks as usize;
        let (low, high) = (from.max(at), to.min(at + blocks));
        if low < high {
            let blocks = (high - low) as u32;
            let run = match extent.is_hole() {
                true => Extent::hole(blocks),
                false => Extent { start: extent.start + (low - at) as u64, blocks },
            };
            push_extent(&mut part, run);
        }
        at += blocks;
    }
    part
}

/// The blocks of `current` that are not in `retained`. Neither holds a block twice.
pub(crate) fn difference(current: &[Extent], retained: &[Extent]) -> Vec<Extent> {
    let (current, retained) = without_common_ends(current, retained);
    let mut retained: Vec<Extent> =
        retained.iter().copied().filter(|keep| !keep.is_hole()).collect();
    retained.sort();
    let mut difference = Vec::new();
    for extent in current.iter().filter(|extent| !extent.is_hole()) {
        let mut at = extent.start;
        // In the order of their ends, too, because they do not overlap.
        let first = retained.partition_point(|keep| keep.end() <= extent.start);
        for keep in &retained[first..] {
            if keep.start >= extent.end() {
                break;
            }
            if keep.start > at {
                push_extent(
                    &mut difference,
                    Extent { start: at, blocks: (keep.start - at) as u32 },
                );
            }
            at = at.max(keep.end());
        }
        if at < extent.end() {
            push_extent(&mut difference, Extent { start: at, blocks: (extent.end() - at) as u32 });
        }
    }
    difference
}

/// Both without the extents that they have in common at the start and at the end: most of them, for
/// the contents before and after a small update.
fn without_common_ends<'a>(
    current: &'a [Extent],
    retained: &'a [Extent],
) -> (&'a [Extent], &'a [Extent]) {
    let start = current.iter().zip(retained).take_while(|(one, other)| one == other).count();
    let (current, retained) = (&current[start..], &retained[start..]);
    let ends = current.iter().rev().zip(retained.iter().rev());
    let end = ends.take_while(|(one, other)| one == other).count();
    (&current[..current.len() - end], &retained[..retained.len() - end])
}

/// Free runs of the data file: by position, to merge neighbors, and by size, for best fit.
#[derive(Debug, Default)]
pub(crate) struct FreeBlocks {
    by_start: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
    free: u64,
}

impl FreeBlocks {
    pub(crate) fn free(&self) -> u64 {
        self.free
    }

    /// Start and length of each free run.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (u64, u64)> {
        self.by_start.iter().map(|(start, blocks)| (*start, *blocks))
    }

    /// Frees blocks.
    pub(crate) fn release(&mut self, start: u64, blocks: u64) {
        if blocks == 0 {
            return;
        }
        self.free += blocks;
        let (mut start, mut blocks) = (start, blocks);
        if let Some((&before, &size)) = self.by_start.range(..start).next_back()
            && before + size == start
        {
            self.remove(before, size);
            (start, blocks) = (before, size + blocks);
        }
        if let Some(&size) = self.by_start.get(&(start + blocks)) {
            self.remove(start + blocks, size);
            blocks += size;
        }
        self.insert(start, blocks);
    }

    /// Allocates `blocks` in one run, or in at most `runs_max` runs, largest first.
    pub(crate) fn take(&mut self, blocks: u32, runs_max: usize) -> Option<Vec<Extent>> {
        let count = u64::from(blocks);
        if count > self.free {
            return None;
        }
        if let Some(&(size, start)) = self.by_size.range((count, 0)..).next() {
            self.cut(start, size, count);
            return Some(vec![Extent { start, blocks }]);
        }
        let candidates: Vec<(u64, u64)> =
            self.by_size.iter().rev().take(runs_max).copied().collect();
        if candidates.iter().map(|(size, _)| size).sum::<u64>() < count {
            return None;
        }
        let mut runs = Vec::new();
        let mut missing = count;
        for (size, start) in candidates {
            let part = size.min(missing);
            self.cut(start, size, part);
            // Below `blocks`, a u32.
            push_extent(&mut runs, Extent { start, blocks: part as u32 });
            missing -= part;
            if missing == 0 {
                break;
            }
        }
        Some(runs)
    }

    /// Allocates the largest runs, `blocks` in total, or all if there are fewer.
    pub(crate) fn take_largest(&mut self, blocks: u64) -> Vec<Extent> {
        let mut runs = Vec::new();
        let mut missing = blocks;
        while missing > 0
            && let Some(&(size, start)) = self.by_size.last()
        {
            let part = size.min(missing).min(u64::from(u32::MAX));
            self.cut(start, size, part);
            runs.push(Extent { start, blocks: part as u32 });
            missing -= part;
        }
        runs
    }

    /// Removes the free tail of a file of `total` blocks, except `keep` blocks, if it has at least
    /// twice as many. Returns the new number of blocks.
    pub(crate) fn cut_tail(&mut self, total: u64, keep: u64) -> Option<u64> {
        let (&start, &size) = self.by_start.last_key_value()?;
        if start + size != total || size < keep.saturating_mul(2).max(1) {
            return None;
        }
        self.cut(start, size, size);
        self.release(start, keep);
        Some(start + keep)
    }

    /// Marks a run as used; false if it is not entirely free.
    pub(crate) fn claim(&mut self, extent: Extent) -> bool {
        let Some((&start, &size)) = self.by_start.range(..=extent.start).next_back() else {
            return false;
        };
        if start + size < extent.end() {
            return false;
        }
        self.remove(start, size);
        self.insert(start, extent.start - start);
        self.insert(extent.end(), start + size - extent.end());
        self.free -= u64::from(extent.blocks);
        true
    }

    fn cut(&mut self, start: u64, size: u64, blocks: u64) {
        self.remove(start, size);
        self.insert(start + blocks, size - blocks);
        self.free -= blocks;
    }

    fn insert(&mut self, start: u64, size: u64) {
        if size > 0 {
            self.by_start.insert(start, size);
            self.by_size.insert((size, start));
        }
    }

    fn remove(&mut self, start: u64, size: u64) {
        self.by_start.remove(&start);
        self.by_size.remove(&(size, start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start: u64, blocks: u32) -> Extent {
        Extent { start, blocks }
    }

    #[test]
    fn adjacent_runs_merge_and_the_best_fit_is_allocated() {
        let mut free = FreeBlocks::default();
        free.release(0, 10);
        free.release(20, 4);
        free.release(10, 5);
        assert_eq!(free.take(4, 8), Some(vec![run(20, 4)]));
        assert_eq!(free.take(15, 8), Some(vec![run(0, 15)]));
        assert_eq!(free.take(1, 8), None);
    }

    #[test]
    fn fragments_are_combined_up_to_the_limit() {
        let mut free = FreeBlocks::default();
        for start in [0, 10, 20] {
            free.release(start, 4);
        }
        assert_eq!(free.take(12, 2), None);
        assert_eq!(free.take(10, 3).map(|runs| runs.len()), Some(3));
        assert_eq!(free.free(), 2);
    }

    #[test]
    fn a_long_free_tail_is_removed() {
        let mut free = FreeBlocks::default();
        free.release(10, 90);
        assert_eq!(free.cut_tail(101, 8), None, "block 100 is in use");
        assert_eq!(free.cut_tail(100, 50), None, "it would be needed again immediately");
        assert_eq!(free.cut_tail(100, 8), Some(18));
        assert_eq!(free.free(), 8);
        assert_eq!(free.take(8, 1), Some(vec![run(10, 8)]));
    }

    #[test]
    fn a_claim_must_be_free() {
        let mut free = FreeBlocks::default();
        free.release(0, 10);
        assert!(free.claim(run(3, 4)));
        assert!(!free.claim(run(6, 2)));
        assert_eq!(free.free(), 6);
    }

    #[test]
    fn slices_and_differences() {
        let extents = [run(100, 4), run(50, 4)];
        assert_eq!(slice(&extents, 2, 6), [run(102, 2), run(50, 2)]);
        assert_eq!(slice(&extents, 0, 8), extents);
        assert_eq!(difference(&extents, &[run(102, 1), run(50, 4)]), [run(100, 2), run(103, 1)]);
        assert_eq!(difference(&extents, &extents), []);
        let sparse = [run(100, 2), Extent::hole(3), run(50, 1)];
        assert_eq!(slice(&sparse, 1, 4), [run(101, 1), Extent::hole(2)]);
        assert_eq!(slice(&sparse, 3, 6), [Extent::hole(2), run(50, 1)]);
        assert_eq!(difference(&sparse, &[run(101, 1), Extent::hole(9)]), [run(100, 1), run(50, 1)]);
        let mut merged = vec![Extent::hole(1)];
        push_extent(&mut merged, Extent::hole(2));
        push_extent(&mut merged, run(7, 1));
        assert_eq!(merged, [Extent::hole(3), run(7, 1)]);
        assert_eq!(difference(&extents, &[]), extents);
    }

    /// Blocks of two contents in any places: a few of them differ, or all.
    #[test]
    fn a_difference_is_that_of_the_sets_of_blocks() {
        for seed in 0..500_usize {
            let shuffled = |step: usize| (0..97).map(move |at| (at * step + seed) % 97);
            let extents = |blocks: &[usize]| {
                let mut extents = Vec::new();
                for block in blocks {
                    let is_hole = block % 13 == 0;
                    let one = if is_hole { Extent::hole(1) } else { run(*block as u64, 1) };
                    push_extent(&mut extents, one);
                }
                extents
            };
            let current: Vec<usize> = shuffled(1 + seed % 5).take(60).collect();
            let mut retained = current.clone();
            if seed % 3 == 0 {
                retained = shuffled(2 + seed % 7).take(seed % 60).collect();
            } else {
                // As after an update of a few blocks, in new places or in those of others.
                let new = shuffled(1 + seed % 5).skip(60 - seed % 2 * 20);
                retained
                    .iter_mut()
                    .skip(seed % 50)
                    .take(seed % 9)
                    .zip(new)
                    .for_each(|(it, new)| *it = new);
                retained.sort_unstable();
                retained.dedup();
            }
            let stored = |blocks: &[usize]| -> BTreeSet<u64> {
                blocks.iter().filter(|block| *block % 13 != 0).map(|block| *block as u64).collect()
            };
            let expected: BTreeSet<u64> =
                stored(&current).difference(&stored(&retained)).copied().collect();
            let found = difference(&extents(&current), &extents(&retained));
            let found: Vec<u64> = found.iter().flat_map(|run| run.start..run.end()).collect();
            assert_eq!(found.len(), expected.len(), "seed {seed}");
            assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), expected, "seed {seed}");
        }
    }
}
