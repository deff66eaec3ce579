//! Chunks of a file that must exist on one chain, and their comparison with those that do.

use threefs_core::ids::{ChainId, ChunkId};
use threefs_core::scrub::ChunkSummary;
use threefs_meta::{AuditedFile, Written};

/// A file and the chains of its chunks: chunk `index` is on chain `index` modulo their number.
#[derive(Clone, Debug)]
pub(super) struct LocatedFile {
    pub file: AuditedFile,
    pub chains: Vec<ChainId>,
}

impl LocatedFile {
    /// Those of the given chunks that are on a chain, in order.
    pub(super) fn chunks_on<'a>(&'a self, written: &'a Written, chain: ChainId) -> Chunks<'a> {
        let stripe = self.chains.len().max(1) as u64;
        let places = (0_u64..).zip(&self.chains).filter(|(_, it)| **it == chain);
        let places: Vec<u64> = places.map(|(place, _)| place).collect();
        if places.is_empty() {
            return Box::new(std::iter::empty());
        }
        let inode = self.file.inode;
        Box::new(written.iter().flat_map(move |(first, last)| {
            let (first, last) = (u64::from(first), u64::from(last));
            let places = places.clone();
            (first / stripe..=last / stripe)
                .flat_map(move |row| places.clone().into_iter().map(move |it| row * stripe + it))
                .skip_while(move |index| *index < first)
                .take_while(move |index| *index <= last)
                // Not above the last index of the range.
                .map(move |index| ChunkId::new(inode, index as u32))
        }))
    }
}

/// Chunks in the order of their ids.
pub(super) type Chunks<'a> = Box<dyn Iterator<Item = ChunkId> + Send + 'a>;

/// Walks along chunks that must exist, in order, with the chunks of a chain.
pub(super) struct Comparison<'a> {
    expected: std::iter::Peekable<Chunks<'a>>,
}

impl<'a> Comparison<'a> {
    pub(super) fn new(expected: Chunks<'a>) -> Self {
        Self { expected: expected.peekable() }
    }

    /// The next chunk of the chain: `missing` gets those that must be before it, and the chunk
    /// itself if it has no content.
    pub(super) fn next(&mut self, state: &ChunkSummary, missing: &mut impl FnMut(ChunkId)) {
        while let Some(chunk) = self.expected.next_if(|chunk| *chunk <= state.chunk) {
            if chunk < state.chunk || !has_content(state) {
                missing(chunk);
            }
        }
    }

    /// The chain has no further chunks.
    pub(super) fn end(self, missing: &mut impl FnMut(ChunkId)) {
        self.expected.for_each(missing);
    }
}

/// Whether a chunk has content, or may have: an update is pending.
pub(super) fn has_content(state: &ChunkSummary) -> bool {
    state.exists || state.pending
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use threefs_core::checksum::Checksum;
    use threefs_core::ids::{ChunkVersion, InodeId, TableId, TableVersion};
    use threefs_core::layout::{ChainChoice, Layout};

    use super::*;

    fn located(inode: u64, written: Written, chains: Vec<u32>) -> LocatedFile {
        let layout = Layout {
            table: TableId(1),
            table_version: TableVersion(1),
            chunk_bytes: 4096,
            stripe: chains.len() as u32,
            chains: ChainChoice::Range { base: 0, seed: 0 },
        };
        let file = AuditedFile { inode: InodeId(inode), layout, written };
        LocatedFile { file, chains: chains.into_iter().map(ChainId).collect() }
    }

    fn of_indexes(indexes: &BTreeSet<u32>) -> Written {
        let mut written = Written::default();
        indexes.iter().for_each(|index| written.add(*index, *index));
        written
    }

    fn state(chunk: ChunkId, exists: bool, pending: bool) -> ChunkSummary {
        let (version, checksum) = (ChunkVersion(1), Checksum(0));
        ChunkSummary { chunk, version, length: 1, checksum, exists, pending }
    }

    proptest! {
        /// Each written chunk is on one chain, in order.
        #[test]
        fn the_chains_partition_the_chunks(
            indexes in prop::collection::btree_set(0_u32..200, 0..60),
            chains in prop::collection::vec(0_u32..4, 1..7),
        ) {
            let file = located(7, of_indexes(&indexes), chains.clone());
            let mut all = BTreeSet::new();
            for chain in 0..4 {
                let on: Vec<_> = file.chunks_on(&file.file.written, ChainId(chain)).collect();
                prop_assert!(on.is_sorted());
                for chunk in on {
                    prop_assert_eq!(chains[chunk.index as usize % chains.len()], chain);
                    prop_assert!(all.insert(chunk.index));
                }
            }
            prop_assert_eq!(all, indexes);
        }

        /// Exactly the expected chunks without content are missing, whatever else is on the chain.
        #[test]
        fn the_missing_chunks_are_the_difference(
            expected in prop::collection::btree_set((1_u64..4, 0_u32..30), 0..40),
            stored in prop::collection::btree_map(
                (1_u64..4, 0_u32..30), (any::<bool>(), any::<bool>()), 0..40,
            ),
        ) {
            let chunk = |(inode, index): (u64, u32)| ChunkId::new(InodeId(inode), index);
            let mut comparison = Comparison::new(Box::new(expected.iter().map(|it| chunk(*it))));
            let mut missing = Vec::new();
            let mut report = |chunk| missing.push(chunk);
            for (at, (exists, pending)) in &stored {
                comparison.next(&state(chunk(*at), *exists, *pending), &mut report);
            }
            comparison.end(&mut report);
            let lacks = |at: &&(u64, u32)| !stored.get(*at).is_some_and(|it| it.0 || it.1);
            let model: Vec<_> = expected.iter().filter(lacks).map(|at| chunk(*at)).collect();
            prop_assert_eq!(missing, model);
        }
    }

    #[test]
    fn the_last_chunk_of_the_longest_file_is_on_its_chain() {
        let mut written = Written::default();
        written.add(u32::MAX - 1, u32::MAX);
        let file = located(7, written, vec![0, 1, 2]);
        let on = |chain| file.chunks_on(&file.file.written, ChainId(chain)).collect::<Vec<_>>();
        assert_eq!(on(0), [ChunkId::new(InodeId(7), u32::MAX)]);
        assert_eq!(on(2), [ChunkId::new(InodeId(7), u32::MAX - 1)]);
        assert_eq!(on(1), []);
    }
}
