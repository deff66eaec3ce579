//! Plan of an update: new blocks, kept blocks and new checksums.

use std::borrow::Cow;

use threefs_core::checksum::Checksum;
use threefs_core::chunk::{BLOCK_BYTES, ChunkState, ContentChange, StoreUpdate};
use threefs_core::error::StoreError;
use threefs_core::ids::ChunkId;

use crate::blocks::{Extent, RUNS_MAX, blocks_in, push_extent, slice};
use crate::checksums::{blocks_of, is_zeros, of_blocks, of_whole};
use crate::index::Version;
use crate::log::Content;

/// Minimum number of consecutive zero blocks that are not stored.
const HOLE_BLOCKS_MIN: usize = 4;
/// Maximum number of holes of a chunk that is rewritten because it has too many runs: with the data
/// between them, about half the runs that trigger a rewrite.
const HOLES_MAX: usize = RUNS_MAX / 4;

/// Blocks `first ..` of the new content are `write`; the blocks before, and those of the old
/// content after it, are kept.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) write: Cow<'a, [u8]>,
    /// Of the blocks of `write`.
    checksums: Vec<u32>,
    first: usize,
    length: usize,
    /// Checksum of the last block, if the content was truncated within it.
    cut: Option<u32>,
}

/// Consecutive blocks of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Zeros, which are not stored.
    pub(crate) zeros: bool,
    pub(crate) blocks: u32,
}

/// Number of blocks that the parts need.
pub(crate) fn stored_blocks(parts: &[Part]) -> u32 {
    parts.iter().filter(|part| !part.zeros).map(|part| part.blocks).sum()
}

/// Location of the parts, whose stored blocks are in `runs`.
pub(crate) fn locate(parts: &[Part], runs: &[Extent]) -> Vec<Extent> {
    let mut located = Vec::new();
    let mut at = 0;
    for part in parts {
        if part.zeros {
            push_extent(&mut located, Extent::hole(part.blocks));
            continue;
        }
        let end = at + part.blocks as usize;
        slice(runs, at, end).into_iter().for_each(|run| push_extent(&mut located, run));
        at = end;
    }
    located
}

/// Maximum number of blocks that an update of `payload_bytes` writes, and the number of blocks of
/// `base` that its commit frees.
pub(crate) fn blocks_needed(
    update: &StoreUpdate,
    base: &Version,
    payload_bytes: usize,
) -> (u64, u64) {
    let old = base.state.length as usize;
    let base_blocks = blocks_in(&base.content.extents);
    let patch = |offset: usize, end: usize| {
        let (first, last, written_blocks) = if base.content.extents.len() >= RUNS_MAX {
            let all = blocks_of(old.max(end));
            (0, all, all)
        } else {
            let (first, last) = (offset.min(old) / BLOCK_BYTES, blocks_of(end));
            // A long gap is not stored.
            let gap = (offset / BLOCK_BYTES - first).min(HOLE_BLOCKS_MIN);
            (first, last, gap + last.saturating_sub(offset / BLOCK_BYTES))
        };
        (written_blocks as u64, blocks_in(&slice(&base.content.extents, first, last)))
    };
    match update.change {
        ContentChange::Remove => (0, base_blocks),
        ContentChange::Replace => (blocks_of(payload_bytes) as u64, base_blocks),
        ContentChange::Truncate { length } if length as usize <= old => (0, 0),
        ContentChange::Truncate { length } => patch(length as usize, length as usize),
        ContentChange::Write { offset: 0 } if payload_bytes >= old => {
            (blocks_of(payload_bytes) as u64, base_blocks)
        }
        ContentChange::Write { offset } => patch(offset as usize, offset as usize + payload_bytes),
    }
}

/// Number of blocks of the chunk after an update, including holes.
pub(crate) fn blocks_after(update: &StoreUpdate, base: &Version, payload_bytes: usize) -> u64 {
    let old = base.state.length as usize;
    let length = match update.change {
        ContentChange::Remove => 0,
        ContentChange::Replace => payload_bytes,
        ContentChange::Truncate { length } => length as usize,
        ContentChange::Write { offset } => old.max(offset as usize + payload_bytes),
    };
    blocks_of(length) as u64
}

/// Lays out the new content. `read_old` reads blocks `from .. to` of the old content, verified.
pub(crate) fn plan<'a>(
    update: &StoreUpdate,
    base: &Version,
    payload: &'a [u8],
    read_old: impl Fn(usize, usize) -> Result<Vec<u8>, StoreError>,
) -> Result<Plan<'a>, StoreError> {
    let old = base.state.length as usize;
    let whole = |write: Cow<'a, [u8]>| {
        let length = write.len();
        Ok(Plan::new(write, 0, length))
    };
    match update.change {
        ContentChange::Remove => whole(Cow::Borrowed(&[])),
        ContentChange::Replace => whole(payload.into()),
        ContentChange::Truncate { length } if (length as usize) < old => {
            truncate(length as usize, read_old)
        }
        ContentChange::Truncate { length } if length as usize == old => {
            Ok(Plan::new(Cow::default(), blocks_of(old), old))
        }
        ContentChange::Truncate { length } => patch(base, length as usize, &[], read_old),
        ContentChange::Write { offset: 0 } if payload.len() >= old => whole(payload.into()),
        ContentChange::Write { offset } => patch(base, offset as usize, payload, read_old),
    }
}

fn truncate<'a>(
    length: usize,
    read_old: impl Fn(usize, usize) -> Result<Vec<u8>, StoreError>,
) -> Result<Plan<'a>, StoreError> {
    let keep = blocks_of(length);
    let cut = match length % BLOCK_BYTES {
        0 => None,
        within => {
            let last = read_old(keep - 1, keep)?;
            Some(crc32c::crc32c(&last[..within]))
        }
    };
    Ok(Plan { cut, ..Plan::new(Cow::default(), keep, length) })
}

/// `payload` goes to `offset`; a gap after the old end is zeros.
fn patch<'a>(
    base: &Version,
    offset: usize,
    payload: &'a [u8],
    read_old: impl Fn(usize, usize) -> Result<Vec<u8>, StoreError>,
) -> Result<Plan<'a>, StoreError> {
    let old = base.state.length as usize;
    let end = offset + payload.len();
    let length = old.max(end);
    let fragmented = base.content.extents.len() >= RUNS_MAX;
    let first = if fragmented { 0 } else { offset.min(old) / BLOCK_BYTES };
    let last = if fragmented { blocks_of(length) } else { blocks_of(end) };
    let (from, to) = (first * BLOCK_BYTES, (last * BLOCK_BYTES).min(length));
    if from == offset && to == end {
        return Ok(Plan::new(payload.into(), first, length));
    }
    let mut write = vec![0; to - from];
    for (low, high) in kept_parts(fragmented, from, to, offset, end, old) {
        let (a, b) = (low / BLOCK_BYTES, blocks_of(high));
        let bytes = read_old(a, b)?;
        let skip = low - a * BLOCK_BYTES;
        write[low - from..high - from].copy_from_slice(&bytes[skip..skip + (high - low)]);
    }
    write[offset - from..end - from].copy_from_slice(payload);
    Ok(Plan::new(write.into(), first, length))
}

/// Byte ranges of the old content that the new blocks contain: before and after the payload.
fn kept_parts(
    fragmented: bool,
    from: usize,
    to: usize,
    offset: usize,
    end: usize,
    old: usize,
) -> Vec<(usize, usize)> {
    let before = (from, offset.min(old));
    let after = (end, if fragmented { old } else { to.min(old) });
    [before, after].into_iter().filter(|(low, high)| low < high).collect()
}

impl<'a> Plan<'a> {
    fn new(write: Cow<'a, [u8]>, first: usize, length: usize) -> Self {
        Self { checksums: of_blocks(&write), write, first, length, cut: None }
    }

    /// Compares the payload with its checksum. The checksums of the blocks are used if they are of
    /// exactly the payload, so that it is read once, and what is stored as the checksum of the data
    /// is what its sender has computed.
    pub(crate) fn verify_payload(
        &self,
        chunk: ChunkId,
        payload: &[u8],
        expected: Checksum,
    ) -> Result<(), StoreError> {
        let computed = match &self.write {
            Cow::Borrowed(write) if write.len() == payload.len() => {
                of_whole(&self.checksums, payload.len())
            }
            _ => Checksum::of(payload),
        };
        if computed == expected {
            return Ok(());
        }
        Err(StoreError::PayloadDamaged { chunk, expected, computed })
    }

    /// The written blocks as runs in the order of the content: holes, and blocks to be allocated.
    /// `base`: the previous content.
    pub(crate) fn parts(&self, base: &Version) -> Vec<Part> {
        let total = blocks_of(self.length);
        let fragmented = base.content.extents.len() >= RUNS_MAX;
        let blocks_min = HOLE_BLOCKS_MIN.max(if fragmented { total / HOLES_MAX } else { 0 });
        let mut parts: Vec<Part> = Vec::new();
        for block in self.write.chunks(BLOCK_BYTES) {
            let zeros = is_zeros(block);
            match parts.last_mut() {
                Some(last) if last.zeros == zeros => last.blocks += 1,
                _ => parts.push(Part { zeros, blocks: 1 }),
            }
        }
        for part in &mut parts {
            part.zeros &= part.blocks as usize >= blocks_min;
        }
        parts
    }

    /// The new state and its content; `runs`: location of the written blocks.
    pub(crate) fn finish(
        &self,
        update: &StoreUpdate,
        base: &Version,
        runs: &[Extent],
    ) -> (ChunkState, Content) {
        let total = blocks_of(self.length);
        let written = blocks_of(self.write.len());
        let after = (self.first + written).min(total);
        let mut extents = slice(&base.content.extents, 0, self.first.min(total));
        for run in runs {
            push_extent(&mut extents, *run);
        }
        for run in slice(&base.content.extents, after, total) {
            push_extent(&mut extents, run);
        }
        let old = &base.content.checksums;
        let mut checksums = Vec::with_capacity(total);
        checksums.extend_from_slice(&old[..self.first.min(total)]);
        checksums.extend_from_slice(&self.checksums);
        checksums.extend_from_slice(old.get(after..total).unwrap_or_default());
        if let (Some(cut), Some(last)) = (self.cut, checksums.last_mut()) {
            *last = cut;
        }
        let state = ChunkState {
            version: update.version,
            chain_version: update.chain_version,
            length: self.length as u32,
            checksum: of_whole(&checksums, self.length),
            removed: update.change == ContentChange::Remove,
            tags: update.tags.clone(),
        };
        (state, Content { extents, checksums })
    }
}
