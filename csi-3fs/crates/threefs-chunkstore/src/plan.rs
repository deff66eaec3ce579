//! What an update writes: which blocks are new, which are kept, and the new checksums.

use threefs_core::chunk::{BLOCK_BYTES, ChunkState, ContentChange, StoreUpdate};
use threefs_core::error::StoreError;

use crate::blocks::{Extent, blocks_in, push_extent, slice};
use crate::checksums::{blocks_of, of_blocks, of_whole};
use crate::disk::Disk;
use crate::index::Version;
use crate::log::Content;
use crate::store::{FileChunkStore, RUNS_MAX};

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

/// Blocks that an update of `payload_bytes` writes, and those of `base` that its commit frees.
pub(crate) fn blocks_needed(
    update: &StoreUpdate,
    base: &Version,
    payload_bytes: usize,
) -> (u64, u64) {
    let old = base.state.length as usize;
    let held = blocks_in(&base.content.extents);
    let patch = |offset: usize, end: usize| {
        let (first, last) = if base.content.extents.len() >= RUNS_MAX {
            (0, blocks_of(old.max(end)))
        } else {
            (offset.min(old) / BLOCK_BYTES, blocks_of(end))
        };
        let written = last.saturating_sub(first) as u64;
        (written, (last as u64).min(held).saturating_sub(first as u64))
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
    /// The new state and its content, once `runs` hold the written bytes.
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
