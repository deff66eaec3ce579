//! Data of the last frame of a log. It is flushed together with the frame, so a loss of power may
//! leave the frame without its data: then the frame was not acknowledged, and is void.

use std::collections::BTreeMap;

use threefs_core::chunk::BLOCK_BYTES;
use threefs_core::ids::ChunkId;

use crate::blocks::Extent;
use crate::disk::DiskFile;
use crate::log::{Content, Record};

/// Content of one block.
struct Block {
    chunk: ChunkId,
    bytes: usize,
    checksum: u32,
}

/// Whether the data file has the data that was flushed together with these records of one frame.
pub(crate) fn has_data(records: &[Record], data: &impl DiskFile) -> bool {
    let mut bytes = [0; BLOCK_BYTES];
    blocks_of(records).into_iter().all(|(block, expected)| {
        let bytes = &mut bytes[..expected.bytes];
        match data.read_at(bytes, block * BLOCK_BYTES as u64) {
            Ok(()) if crc32c::crc32c(bytes) == expected.checksum => true,
            Ok(()) => {
                tracing::warn!(block, chunk = %expected.chunk, "new data differs from its checksum");
                false
            }
            Err(error) => {
                // The frame may have been acknowledged: a read reports the damage.
                tracing::warn!(%error, block, chunk = %expected.chunk, "could not read new data");
                true
            }
        }
    })
}

/// The blocks that still belong to their chunks after the last of the records: others may have been
/// reused since the frame became durable.
fn blocks_of(records: &[Record]) -> BTreeMap<u64, Block> {
    let mut blocks: BTreeMap<u64, Block> = BTreeMap::new();
    for record in records {
        match record {
            Record::Verified { chunk, state, content, runs } => {
                blocks.retain(|block, it| it.chunk != *chunk || holds(content, *block));
                let length = state.length as usize;
                for (position, block) in content.blocks() {
                    let start = position * BLOCK_BYTES;
                    let checksum = content.checksums.get(position);
                    if let Some(checksum) = checksum.filter(|_| any_holds(runs, block)) {
                        let bytes = length.saturating_sub(start).min(BLOCK_BYTES);
                        blocks.insert(block, Block { chunk: *chunk, bytes, checksum: *checksum });
                    }
                }
            }
            Record::Pending { chunk, content, .. } | Record::Written { chunk, content, .. } => {
                blocks.retain(|block, it| it.chunk != *chunk || holds(content, *block));
            }
            Record::Forget { chunk } => blocks.retain(|_, it| it.chunk != *chunk),
            Record::Gone { inodes } => {
                let gone = |inode| inodes.iter().any(|it| it.first <= inode && inode <= it.last);
                blocks.retain(|_, it| !gone(it.chunk.inode));
            }
            Record::Commit { .. }
            | Record::Committed { .. }
            | Record::Store { .. }
            | Record::Floor { .. } => {}
        }
    }
    blocks
}

fn holds(content: &Content, block: u64) -> bool {
    any_holds(&content.extents, block)
}

fn any_holds(runs: &[Extent], block: u64) -> bool {
    runs.iter().any(|run| !run.is_hole() && (run.start..run.end()).contains(&block))
}

#[cfg(test)]
mod tests {
    use threefs_core::chunk::ChunkState;
    use threefs_core::forgotten::InodeRange;
    use threefs_core::ids::{ChainVersion, ChunkVersion, InodeId};

    use super::*;

    const CHUNK: ChunkId = ChunkId::new(InodeId(1), 0);
    const OTHER: ChunkId = ChunkId::new(InodeId(2), 0);

    fn run(start: u64, blocks: u32) -> Extent {
        Extent { start, blocks }
    }

    /// A record of a chunk with these extents, of which `runs` are new; block n has checksum n.
    fn verified(chunk: ChunkId, extents: &[Extent], runs: &[Extent]) -> Record {
        let mut content = Content { extents: extents.to_vec(), checksums: Vec::new() };
        let blocks: u32 = extents.iter().map(|extent| extent.blocks).sum();
        content.checksums = vec![0; blocks as usize];
        for (position, block) in content.clone().blocks() {
            content.checksums[position] = block as u32;
        }
        let length = blocks * BLOCK_BYTES as u32 - 96;
        let state = ChunkState { length, ..ChunkState::default() };
        Record::Verified { chunk, state, content, runs: runs.to_vec() }
    }

    /// Number and length of each block that must have its data.
    fn expected(records: &[Record]) -> Vec<(u64, usize)> {
        let blocks = blocks_of(records);
        assert!(blocks.iter().all(|(block, expected)| *block == u64::from(expected.checksum)));
        blocks.into_iter().map(|(block, expected)| (block, expected.bytes)).collect()
    }

    #[test]
    fn only_new_blocks_are_expected_and_the_last_one_up_to_the_end_of_the_chunk() {
        let extents = [run(10, 2), Extent::hole(4), run(20, 3)];
        let record = verified(CHUNK, &extents, &[run(11, 1), run(21, 2)]);
        assert_eq!(expected(&[record]), [(11, 4096), (21, 4096), (22, 4000)]);
    }

    #[test]
    fn blocks_that_a_later_record_of_the_frame_releases_are_not_expected() {
        let first = verified(CHUNK, &[run(10, 2)], &[run(10, 2)]);
        let other = verified(OTHER, &[run(5, 1)], &[run(5, 1)]);
        let both = [first.clone(), other.clone()];
        assert_eq!(expected(&both), [(5, 4000), (10, 4096), (11, 4000)]);
        let commit = Record::Commit {
            chunk: CHUNK,
            version: ChunkVersion(1),
            chain_version: ChainVersion(1),
        };
        assert_eq!(expected(&[first.clone(), commit]).len(), 2);
        let again = verified(CHUNK, &[run(10, 1), run(30, 1)], &[run(30, 1)]);
        assert_eq!(expected(&[first.clone(), again]), [(10, 4096), (30, 4000)]);
        let state = ChunkState::default();
        let pending = Record::Pending { chunk: CHUNK, state, content: Content::default() };
        for release in [
            pending,
            Record::Forget { chunk: CHUNK },
            Record::Gone { inodes: vec![InodeRange::one(CHUNK.inode)] },
        ] {
            let records = [first.clone(), other.clone(), release];
            assert_eq!(expected(&records), [(5, 4000)]);
        }
    }
}
