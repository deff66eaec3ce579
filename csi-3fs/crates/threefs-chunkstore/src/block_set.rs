//! Set of blocks of the data file, as disjoint runs.

use std::collections::BTreeMap;

/// End of each run by its start.
#[derive(Debug, Default)]
pub(crate) struct BlockSet(BTreeMap<u64, u64>);

impl BlockSet {
    /// Adds a run, of which any part may be in the set.
    pub(crate) fn insert(&mut self, start: u64, blocks: u64) {
        if blocks == 0 {
            return;
        }
        let (mut start, mut end) = (start, start + blocks);
        while let Some((&before, &until)) = self.0.range(..=end).next_back()
            && until >= start
        {
            self.0.remove(&before);
            (start, end) = (start.min(before), end.max(until));
        }
        self.0.insert(start, end);
    }

    /// Removes a run, of which any part may be in the set.
    pub(crate) fn remove(&mut self, start: u64, blocks: u64) {
        if blocks == 0 {
            return;
        }
        let end = start + blocks;
        while let Some((&before, &until)) = self.0.range(..end).next_back()
            && until > start
        {
            self.0.remove(&before);
            if before < start {
                self.0.insert(before, start);
            }
            if until > end {
                self.0.insert(end, until);
            }
        }
    }

    /// Whether any block of a run is in the set.
    pub(crate) fn intersects(&self, start: u64, blocks: u64) -> bool {
        self.0.range(..start + blocks).next_back().is_some_and(|(_, until)| *until > start)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn it_equals_a_set_of_single_blocks() {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        for _ in 0..200 {
            let (mut runs, mut blocks) = (BlockSet::default(), BTreeSet::new());
            for _ in 0..40 {
                let (start, count) = (rng.random_range(0..40), rng.random_range(0..9));
                if rng.random_bool(0.5) {
                    runs.insert(start, count);
                    blocks.extend(start..start + count);
                } else {
                    runs.remove(start, count);
                    blocks.retain(|block| !(start..start + count).contains(block));
                }
                for block in 0..50 {
                    assert_eq!(runs.intersects(block, 1), blocks.contains(&block));
                }
                let (start, count) = (rng.random_range(0..40), rng.random_range(1..9));
                let any = (start..start + count).any(|block| blocks.contains(&block));
                assert_eq!(runs.intersects(start, count), any);
                let disjoint: Vec<_> = runs.0.iter().collect();
                assert!(disjoint.windows(2).all(|pair| pair[0].1 < pair[1].0), "{disjoint:?}");
            }
        }
    }
}
