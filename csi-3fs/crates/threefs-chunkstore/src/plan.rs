//! What an update writes: which blocks are new, which are kept, and the new checksums.

use threefs_core::chunk::{BLOCK_BYTES, ChunkState, ContentChange, StoreUpdate};
use threefs_core::error::StoreError;

use crate::blocks::{Extent, blocks_in, push_extent, slice};
use crate::checksums::{blocks_of, is_zeros, of_blocks, of_whole};
use crate::disk::Disk;
use crate::index::Version;
use crate::log::Content;
use crate::store::{FileChunkStore, RUNS_MAX};

/// Zeros of at least so many blocks in a row are not stored.
const HOLE_BLOCKS_MIN: usize = 4;
/// Holes of a chunk that is written anew because it is in too many runs: with what lies between
/// them they are about half as many runs as make it be written anew.
const HOLES_MAX: usize = RUNS_MAX / 4;

/// Blocks `first ..` of the new content are `write`; those before, and those of the old content
/// after it, are kept.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) write: std::borrow::Cow<'a, [u8]>,
    first: usize,
    length: usize,
    /// Checksum of the last block where the content was cut within it.
    cut: Option<u32>,
}

/// Blocks of one kind that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// They are not stored.
    pub(crate) zeros: bool,
    pub(crate) blocks: u32,
}

/// How many blocks the parts need.
pub(crate) fn stored(parts: &[Part]) -> u32 {
    parts.iter().filter(|part| !part.zeros).map(|part| part.blocks).sum()
}

/// Where the parts are once `runs` hold those that are stored.
pub(crate) fn place(parts: &[Part], runs: &[Extent]) -> Vec<Extent> {
    let mut placed = Vec::new();
    let mut at = 0;
    for part in parts {
        if part.zeros {
            push_extent(&mut placed, Extent::hole(part.blocks));
            continue;
        }
        let end = at + part.blocks as usize;
        slice(runs, at, end).into_iter().for_each(|run| push_extent(&mut placed, run));
        at = end;
    }
    placed
}

/// Blocks that an update of `payload_bytes` writes at most, and those of `base` that its commit frees.
pub(crate) fn blocks_needed(
    update: &StoreUpdate,
    base: &Version,
    payload_bytes: usize,
) -> (u64, u64) {
    let old = base.state.length as usize;
    let held = blocks_in(&base.content.extents);
    let patch = |offset: usize, end: usize| {
        let (first, last, written) = if base.content.extents.len() >= RUNS_MAX {
            let all = blocks_of(old.max(end));
            (0, all, all)
        } else {
            let (first, last) = (offset.min(old) / BLOCK_BYTES, blocks_of(end));
            // A long gap is not stored.
            let gap = (offset / BLOCK_BYTES - first).min(HOLE_BLOCKS_MIN);
            (first, last, gap + last.saturating_sub(offset / BLOCK_BYTES))
        };
        (written as u64, blocks_in(&slice(&base.content.extents, first, last)))
    };
    match update.change {
        ContentChange::Remove => (0, held),
        ContentChange::Replace => (blocks_of(payload_bytes) as u64, held),
        ContentChange::Truncate { length } if length as usize <= old => (0, 0),
        ContentChange::Truncate { length } => patch(length as usize, length as usize),
        ContentChange::Write { offset: 0 } if payload_bytes >= old => {
            (blocks_of(payload_bytes) as u64, held)
        }
        ContentChange::Write { offset } => patch(offset as usize, offset as usize + payload_bytes),
    }
}

/// Blocks that the chunk has after an update, holes included.
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

/// Reads what it needs of the old content (verified) and lays out the new one.
pub(crate) fn plan<'a, D: Disk>(
    store: &FileChunkStore<D>,
    update: &StoreUpdate,
    base: &Version,
    payload: &'a [u8],
) -> Result<Plan<'a>, StoreError> {
    let old = base.state.length as usize;
    let whole = |write: std::borrow::Cow<'a, [u8]>| {
        let length = write.len();
        Ok(Plan { write, first: 0, length, cut: None })
    };
    match update.change {
        ContentChange::Remove => whole(std::borrow::Cow::Borrowed(&[])),
        ContentChange::Replace => whole(payload.into()),
        ContentChange::Truncate { length } if (length as usize) < old => {
            cut(store, update, base, length as usize)
        }
        ContentChange::Truncate { length } if length as usize == old => {
            Ok(Plan { write: Vec::new().into(), first: blocks_of(old), length: old, cut: None })
        }
        ContentChange::Truncate { length } => patch(store, update, base, length as usize, &[]),
        ContentChange::Write { offset: 0 } if payload.len() >= old => whole(payload.into()),
        ContentChange::Write { offset } => patch(store, update, base, offset as usize, payload),
    }
}

fn cut<'a, D: Disk>(
    store: &FileChunkStore<D>,
    update: &StoreUpdate,
    base: &Version,
    length: usize,
) -> Result<Plan<'a>, StoreError> {
    let keep = blocks_of(length);
    let cut = match length % BLOCK_BYTES {
        0 => None,
        within => {
            let last = store.read_blocks(update.chunk, base, keep - 1, keep)?;
            Some(crc32c::crc32c(&last[..within]))
        }
    };
    Ok(Plan { write: Vec::new().into(), first: keep, length, cut })
}

/// `payload` goes to `offset`; a gap after the old end is zeros.
fn patch<'a, D: Disk>(
    store: &FileChunkStore<D>,
    update: &StoreUpdate,
    base: &Version,
    offset: usize,
    payload: &'a [u8],
) -> Result<Plan<'a>, StoreError> {
    let old = base.state.length as usize;
    let end = offset + payload.len();
    let length = old.max(end);
    let fragmented = base.content.extents.len() >= RUNS_MAX;
    let first = if fragmented { 0 } else { offset.min(old) / BLOCK_BYTES };
    let last = if fragmented { blocks_of(length) } else { blocks_of(end) };
    let (from, to) = (first * BLOCK_BYTES, (last * BLOCK_BYTES).min(length));
    if from == offset && to == end {
        return Ok(Plan { write: payload.into(), first, length, cut: None });
    }
    let mut write = vec![0; to - from];
    for (low, high) in kept_parts(fragmented, from, to, offset, end, old) {
        let (a, b) = (low / BLOCK_BYTES, blocks_of(high));
        let bytes = store.read_blocks(update.chunk, base, a, b)?;
        let skip = low - a * BLOCK_BYTES;
        write[low - from..high - from].copy_from_slice(&bytes[skip..skip + (high - low)]);
    }
    write[offset - from..end - from].copy_from_slice(payload);
    Ok(Plan { write: write.into(), first, length, cut: None })
}

/// Byte ranges of the old content that the new blocks need: before and after the payload.
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

impl Plan<'_> {
    /// What is written as runs in the order of the content: holes, and blocks that are still to be
    /// taken. `base`: the content that it is built on.
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

    /// The new state and its content; `runs`: where the written bytes are.
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
        checksums.extend(of_blocks(&self.write));
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
