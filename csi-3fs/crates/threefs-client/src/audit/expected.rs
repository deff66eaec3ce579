//! Chunks of a file that must exist on one chain, and their comparison with those that do.
//!
//! A chunk that must exist has the last epoch in which a version of it may have been made: any for the
//! tree, that of the snapshot for a file of a snapshot. Its newest version up to there must have content.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use threefs_core::ids::{ChainId, ChunkId, ChunkVersion, Epoch, InodeId};
use threefs_core::scrub::ChunkSummary;
use threefs_meta::{AuditedFile, Written};

/// A file of the tree or of a snapshot, and the chains of its chunks: chunk `index` is on chain `index`
/// modulo their number.
#[derive(Clone, Debug)]
pub(super) struct LocatedFile {
    pub file: AuditedFile,
    pub chains: Vec<ChainId>,
    /// The inode of its chunks.
    pub stored: InodeId,
    /// The last epoch of its versions.
    pub up_to: Epoch,
    /// The root of the snapshot.
    pub snapshot: Option<InodeId>,
}

impl LocatedFile {
    /// A chunk that must exist.
    pub(super) fn expected(&self, index: u32) -> ChunkId {
        ChunkId::new(self.stored, index).in_epoch(self.up_to)
    }

    /// Those of the given chunks that are on a chain, in order.
    pub(super) fn chunks_on<'a>(&'a self, written: &'a Written, chain: ChainId) -> Chunks<'a> {
        let stripe = self.chains.len().max(1) as u64;
        let places = (0_u64..).zip(&self.chains).filter(|(_, it)| **it == chain);
        let places: Vec<u64> = places.map(|(place, _)| place).collect();
        if places.is_empty() {
            return Box::new(std::iter::empty());
        }
        Box::new(written.iter().flat_map(move |(first, last)| {
            let (first, last) = (u64::from(first), u64::from(last));
            let places = places.clone();
            (first / stripe..=last / stripe)
                .flat_map(move |row| places.clone().into_iter().map(move |it| row * stripe + it))
                .skip_while(move |index| *index < first)
                .take_while(move |index| *index <= last)
                // Not above the last index of the range.
                .map(move |index| self.expected(index as u32))
        }))
    }
}

/// Chunks in the order of their ids.
pub(super) type Chunks<'a> = Box<dyn Iterator<Item = ChunkId> + Send + 'a>;

/// Chunks of several files in one order.
pub(super) fn merged<'a>(files: impl Iterator<Item = Chunks<'a>>) -> Chunks<'a> {
    let (mut heads, mut rest) = (BinaryHeap::new(), Vec::new());
    for mut chunks in files {
        if let Some(chunk) = chunks.next() {
            heads.push(Reverse((chunk, rest.len())));
            rest.push(chunks);
        }
    }
    Box::new(std::iter::from_fn(move || {
        let Reverse((chunk, file)) = heads.pop()?;
        let next = rest.get_mut(file).and_then(Iterator::next);
        heads.extend(next.map(|next| Reverse((next, file))));
        Some(chunk)
    }))
}

/// Walks along chunks that must exist, in order, with the versions of chunks of a chain.
pub(super) struct Comparison<'a> {
    expected: std::iter::Peekable<Chunks<'a>>,
    /// The chunk of the last version that was seen, and whether its versions up to it have content:
    /// the newest committed one has, or an update is pending.
    seen: Option<ChunkId>,
    exists: bool,
    pending: bool,
}

impl<'a> Comparison<'a> {
    pub(super) fn new(expected: Chunks<'a>) -> Self {
        Self { expected: expected.peekable(), seen: None, exists: false, pending: false }
    }

    /// The next version of a chunk of the chain: `missing` gets those chunks that must have content
    /// before it, and have none.
    pub(super) fn next(&mut self, state: &ChunkSummary, missing: &mut impl FnMut(ChunkId)) {
        while let Some(chunk) = self.expected.next_if(|chunk| *chunk < state.chunk) {
            self.compare(chunk, missing);
        }
        let chunk = state.chunk.first_version();
        if self.seen != Some(chunk) {
            (self.seen, self.exists, self.pending) = (Some(chunk), false, false);
        }
        if state.version > ChunkVersion(0) {
            self.exists = state.exists;
        }
        self.pending |= state.pending;
    }

    /// The chain has no further chunks.
    pub(super) fn end(mut self, missing: &mut impl FnMut(ChunkId)) {
        while let Some(chunk) = self.expected.next() {
            self.compare(chunk, missing);
        }
    }

    fn compare(&self, chunk: ChunkId, missing: &mut impl FnMut(ChunkId)) {
        let is_stored = self.seen == Some(chunk.first_version());
        if !is_stored || !(self.exists || self.pending) {
            missing(chunk);
        }
    }
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
        let stored = InodeId(inode);
        let file = AuditedFile { inode: stored, layout, written };
        let chains = chains.into_iter().map(ChainId).collect();
        LocatedFile { file, chains, stored, up_to: Epoch::MAX, snapshot: None }
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

        /// Exactly the expected chunks without content are missing, whatever else is on the chain. The
        /// epoch of an expected chunk is that of a snapshot, 3 that of the tree.
        #[test]
        fn the_missing_chunks_are_the_difference(
            expected in prop::collection::btree_set((1_u64..4, 0_u32..9, 0_u32..4), 0..40),
            stored in prop::collection::btree_map(
                (1_u64..4, 0_u32..9, 0_u32..3),
                (any::<bool>(), any::<bool>(), any::<bool>()),
                0..60,
            ),
        ) {
            let chunk = |(inode, index, count): (u64, u32, u32)| {
                let epoch = match count {
                    0 => Epoch::default(),
                    3 => Epoch::MAX,
                    count => Epoch::new(1, count),
                };
                ChunkId::new(InodeId(inode), index).in_epoch(epoch)
            };
            // One file for each epoch.
            let files = (0..4).map(|count| -> Chunks<'_> {
                Box::new(expected.iter().filter(move |it| it.2 == count).map(|it| chunk(*it)))
            });
            let mut comparison = Comparison::new(merged(files));
            let mut missing = Vec::new();
            let mut report = |chunk| missing.push(chunk);
            for (at, (committed, exists, pending)) in &stored {
                let version = ChunkVersion(u64::from(*committed));
                let state = state(chunk(*at), *committed && *exists, *pending);
                comparison.next(&ChunkSummary { version, ..state }, &mut report);
            }
            comparison.end(&mut report);
            let lacks = |at: &&(u64, u32, u32)| {
                let versions = || stored.range((at.0, at.1, 0)..=**at);
                let newest = versions().rfind(|(_, (committed, ..))| *committed);
                let exists = newest.is_some_and(|(_, (_, exists, _))| *exists);
                !exists && !versions().any(|(_, (_, _, pending))| *pending)
            };
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
        assert_eq!(on(0), [ChunkId::new(InodeId(7), u32::MAX).last_version()]);
        assert_eq!(on(2), [ChunkId::new(InodeId(7), u32::MAX - 1).last_version()]);
        assert_eq!(on(1), []);
    }
}
