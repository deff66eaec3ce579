//! Geometry of an operation: how it is split into chunks. A pure function of its fingerprint, equal
//! on every rank.
//!
//! Even chunks travel in tree 0, odd ones in tree 1. The split depends on the size of the operation
//! alone, never on earlier operations, so that equal shapes produce equal bits. In stable mode all
//! chunks use tree 0 with its own root.

use super::fingerprint::Fingerprint;
use super::flow::Stage;
use super::kind::Kind;

/// A set of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranks {
    /// All ranks.
    All,
    /// A single rank.
    One(u32),
}

impl Ranks {
    /// True if `rank` is in the set.
    #[inline]
    pub fn includes(self, rank: u32) -> bool {
        match self {
            Ranks::All => true,
            Ranks::One(one) => one == rank,
        }
    }

    /// The rank of a single-rank set.
    #[inline]
    pub fn single(self) -> Option<u32> {
        match self {
            Ranks::All => None,
            Ranks::One(rank) => Some(rank),
        }
    }
}

/// One chunk of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Index in the operation.
    pub index: u32,
    /// The tree in which it travels.
    pub tree: usize,
    /// The ranks that contribute.
    pub source: Ranks,
    /// The ranks that receive the result.
    pub sink: Ranks,
    /// Offset in a contributor's buffer.
    pub input_offset: usize,
    /// Offset in a receiver's buffer.
    pub output_offset: usize,
    /// Its length.
    pub bytes: usize,
    /// Length of a partial sum on its way up.
    pub partial_bytes: usize,
    /// Reduced at the tree's own root, whichever rank receives the result.
    pub anchored: bool,
}

impl Chunk {
    /// Length of the payload in a stage.
    #[inline]
    pub fn bytes_in(&self, stage: Stage) -> usize {
        match stage {
            Stage::Up => self.partial_bytes,
            Stage::Down => self.bytes,
        }
    }

    /// True if partial sums have wider elements than the result.
    #[inline]
    pub fn is_wide(&self) -> bool {
        self.partial_bytes != self.bytes
    }

    /// End of the chunk in a contributor's buffer.
    #[inline]
    pub fn input_end(&self) -> usize {
        self.input_offset + self.bytes
    }

    /// True if contributions are reduced on the way.
    #[inline]
    pub fn reduces(&self) -> bool {
        self.source == Ranks::All
    }

    /// True if all ranks receive the result.
    #[inline]
    pub fn spreads(&self) -> bool {
        self.sink == Ranks::All
    }

    /// The single rank that contributes or receives, if any.
    #[inline]
    pub fn root(&self) -> Option<u32> {
        self.source.single().or(self.sink.single())
    }

    /// The root of the tree for this chunk, unless it is the tree's own root; `root` is the node of
    /// [`Chunk::root`].
    #[inline]
    pub fn rooted_at(&self, root: Option<usize>) -> Option<usize> {
        root.filter(|_| !self.anchored)
    }
}

/// Minimum chunk size that is worth a separate frame.
pub const CHUNK_BYTES_MIN: usize = 16 << 10;
/// Minimum number of chunks of an operation, unless they would be smaller than that: two for each
/// tree keep both directions of an edge busy.
const CHUNKS_WANTED: usize = 4;
/// Chunks start at multiples of this, so that no element and no cache line is split.
const ALIGNMENT_BYTES: usize = 64;
/// Bytes of an element of a partial sum that is wider than the result's.
const WIDE_BYTES: usize = 4;

/// The split of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    kind: Kind,
    root: u32,
    blocks: usize,
    block_bytes: usize,
    chunk_bytes: usize,
    chunks_per_block: usize,
    /// Bytes of a partial sum per byte of a chunk.
    widening: usize,
    stable: bool,
}

impl Geometry {
    /// Splits an operation over `world_size` ranks into chunks of at most `slot_bytes`.
    pub fn new(fingerprint: &Fingerprint, world_size: usize, slot_bytes: usize) -> Self {
        let block_bytes = fingerprint.count as usize * usize::from(fingerprint.element_bytes);
        let blocks = match fingerprint.kind {
            Kind::Allgather | Kind::ReduceScatter if block_bytes > 0 => world_size,
            _ => 1,
        };
        let element_bytes = usize::from(fingerprint.element_bytes).max(1);
        let widening = if fingerprint.modes.wide { (WIDE_BYTES / element_bytes).max(1) } else { 1 };
        // A slot also holds a partial sum.
        let slot_bytes = slot_bytes / widening;
        let target_bytes = block_bytes.div_ceil(CHUNKS_WANTED).max(CHUNK_BYTES_MIN).min(slot_bytes);
        let chunk_bytes = target_bytes.div_ceil(ALIGNMENT_BYTES) * ALIGNMENT_BYTES;
        Self {
            kind: fingerprint.kind,
            root: fingerprint.root,
            blocks,
            block_bytes,
            chunk_bytes: chunk_bytes.min(slot_bytes),
            chunks_per_block: block_bytes.div_ceil(chunk_bytes.min(slot_bytes)).max(1),
            widening,
            stable: fingerprint.modes.stable,
        }
    }

    /// Number of chunks; at least one, so that an empty operation still synchronizes all ranks.
    #[inline]
    pub fn chunks(&self) -> u32 {
        (self.blocks * self.chunks_per_block) as u32
    }

    /// The chunk with this index.
    pub fn chunk(&self, index: u32) -> Chunk {
        let block = index as usize / self.chunks_per_block;
        let offset = (index as usize % self.chunks_per_block) * self.chunk_bytes;
        let bytes = self.chunk_bytes.min(self.block_bytes.saturating_sub(offset));
        let full_offset = block * self.block_bytes + offset;
        let (source, sink, input_offset, output_offset) = match self.kind {
            Kind::Broadcast => (Ranks::One(self.root), Ranks::All, offset, offset),
            Kind::Reduce => (Ranks::All, Ranks::One(self.root), offset, offset),
            Kind::Allgather if self.block_bytes > 0 => {
                (Ranks::One(block as u32), Ranks::All, offset, full_offset)
            }
            Kind::ReduceScatter if self.block_bytes > 0 => {
                (Ranks::All, Ranks::One(block as u32), full_offset, offset)
            }
            _ => (Ranks::All, Ranks::All, offset, offset),
        };
        let anchored = self.stable && source == Ranks::All;
        Chunk {
            index,
            tree: if anchored { 0 } else { index as usize & 1 },
            source,
            sink,
            input_offset,
            output_offset,
            bytes,
            partial_bytes: bytes * self.widening,
            anchored,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Determinism;

    fn fingerprint(kind: Kind, count: u64) -> Fingerprint {
        let modes = Determinism::DEFAULT;
        Fingerprint { kind, dtype: 0, element_bytes: 4, op: 0, root: 2, count, shape: 0, modes }
    }

    #[test]
    fn chunks_cover_every_byte_once() {
        for kind in [Kind::Allreduce, Kind::Broadcast, Kind::Allgather, Kind::ReduceScatter] {
            for count in [0, 1, 3, 1000, 4096, 4097, 100_000, 1 << 20, (1 << 20) + 1] {
                let geometry = Geometry::new(&fingerprint(kind, count), 5, 256 << 10);
                let blocks =
                    if matches!(kind, Kind::Allgather | Kind::ReduceScatter) { 5 } else { 1 };
                let total: usize =
                    (0..geometry.chunks()).map(|index| geometry.chunk(index).bytes).sum();
                assert_eq!(total, count as usize * 4 * blocks, "{kind:?} {count}");
                for index in 0..geometry.chunks() {
                    let chunk = geometry.chunk(index);
                    assert!(chunk.bytes <= 256 << 10 && chunk.bytes.is_multiple_of(4));
                }
            }
        }
    }

    #[test]
    fn an_empty_operation_still_has_a_chunk_for_all_ranks() {
        let geometry = Geometry::new(&fingerprint(Kind::Allgather, 0), 5, 1 << 18);
        assert_eq!(geometry.chunks(), 1);
        let chunk = geometry.chunk(0);
        assert_eq!((chunk.bytes, chunk.source, chunk.sink), (0, Ranks::All, Ranks::All));
    }

    #[test]
    fn a_stable_sum_uses_one_tree_with_one_root_for_any_chunk_size() {
        for kind in [Kind::Allreduce, Kind::Reduce, Kind::ReduceScatter, Kind::Broadcast] {
            let modes = Determinism { stable: true, wide: false };
            let fingerprint = Fingerprint { modes, ..fingerprint(kind, 1 << 20) };
            let cut = Geometry::new(&fingerprint, 5, 256 << 10);
            let chunks: Vec<Chunk> = (0..cut.chunks()).map(|index| cut.chunk(index)).collect();
            let summed = kind != Kind::Broadcast;
            assert!(chunks.iter().all(|chunk| chunk.anchored == summed));
            assert_eq!(chunks.iter().any(|chunk| chunk.tree == 1), !summed);
            assert!(!summed || chunks.iter().all(|chunk| chunk.rooted_at(Some(3)).is_none()));
        }
    }

    #[test]
    fn a_wide_partial_sum_fits_a_slot() {
        for (element_bytes, slot_bytes) in [(1, 4096), (2, 4096), (1, 256 << 10), (2, 256 << 10)] {
            let modes = Determinism { stable: false, wide: true };
            let fingerprint =
                Fingerprint { modes, element_bytes, ..fingerprint(Kind::Allreduce, 999_999) };
            let cut = Geometry::new(&fingerprint, 5, slot_bytes);
            let chunks = (0..cut.chunks()).map(|index| cut.chunk(index));
            for chunk in chunks {
                assert_eq!(chunk.partial_bytes, chunk.bytes / usize::from(element_bytes) * 4);
                assert!(chunk.partial_bytes <= slot_bytes && chunk.is_wide());
                assert_eq!(chunk.bytes_in(Stage::Down), chunk.bytes);
            }
        }
    }

    #[test]
    fn chunk_boundaries_depend_only_on_the_size() {
        let small = Geometry::new(&fingerprint(Kind::Allreduce, 1024), 5, 1 << 18);
        assert_eq!(small.chunks(), 1);
        let large = Geometry::new(&fingerprint(Kind::Allreduce, 1 << 20), 5, 1 << 18);
        assert_eq!(large.chunks(), 16);
    }
}
