//! Reads, verified against the checksums in the index.

use std::sync::Arc;

use threefs_core::checksum::Checksum;
use threefs_core::chunk::{BLOCK_BYTES, Which};
use threefs_core::error::StoreError;
use threefs_core::ids::ChunkId;

use super::{FileChunkStore, io_error};
use crate::blocks::Extent;
use crate::disk::{Disk, DiskFile};
use crate::index::Version;
use crate::{ReadOutcome, Verified, checksums};

/// Maximum number of retries of a read whose blocks were reused meanwhile.
const READ_RETRIES: usize = 16;

/// More runs are read from the disk at the same time, instead of one after the other.
const READ_AHEAD_RUNS: usize = 8;

impl<D: Disk> FileChunkStore<D> {
    /// See [`crate::ChunkStore::read`].
    pub(super) fn read_range(
        &self,
        chunk: ChunkId,
        which: Which,
        offset: u32,
        length: u32,
    ) -> Result<ReadOutcome, StoreError> {
        let mut retries = 0;
        loop {
            let version = self.version(chunk, which)?;
            let total = version.state.length as usize;
            let start = (offset as usize).min(total);
            let end = start.saturating_add(length as usize).min(total);
            if start == end {
                let (bytes, checksum) = (Vec::new(), Checksum(0));
                return Ok(ReadOutcome { state: version.state, bytes, checksum });
            }
            let (from, to) = (start / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
            match self.read_blocks(chunk, &version, from, to) {
                Ok(mut bytes) => {
                    bytes.truncate(end - from * BLOCK_BYTES);
                    bytes.drain(..start - from * BLOCK_BYTES);
                    let is_whole = start.is_multiple_of(BLOCK_BYTES)
                        && (end.is_multiple_of(BLOCK_BYTES) || end == total);
                    // Those of the blocks have just been verified.
                    let checksum = match version.content.checksums.get(from..to) {
                        Some(blocks) if is_whole => checksums::of_whole(blocks, bytes.len()),
                        _ => Checksum::of(&bytes),
                    };
                    return Ok(ReadOutcome { state: version.state, bytes, checksum });
                }
                Err(error) => {
                    // The blocks may have been reused since the index lookup: then the index has
                    // new content, which must be read instead.
                    let now = self.version(chunk, which)?;
                    if Arc::ptr_eq(&now.content, &version.content) || retries == READ_RETRIES {
                        return Err(error);
                    }
                    retries += 1;
                }
            }
        }
    }

    /// See [`crate::ChunkStore::verify`].
    pub(super) fn verify_range(
        &self,
        chunk: ChunkId,
        offset: u32,
        length: u32,
    ) -> Result<Verified, StoreError> {
        // Blocks that are replaced meanwhile are read from the page cache.
        let version = self.version(chunk, Which::Committed)?;
        let (from, to) = (offset as usize / BLOCK_BYTES, offset.saturating_add(length) as usize);
        let blocks = crate::blocks::slice(&version.content.extents, from, to.div_ceil(BLOCK_BYTES));
        self.drop_cached(&blocks)?;
        let outcome = self.read_range(chunk, Which::Committed, offset, length)?;
        // The bytes are not used again.
        self.drop_cached(&blocks)?;
        let (bytes, chunk_length) = (outcome.bytes.len() as u32, outcome.state.length);
        Ok(Verified { bytes, chunk_length })
    }

    fn drop_cached(&self, blocks: &[Extent]) -> Result<(), StoreError> {
        for run in blocks.iter().filter(|run| !run.is_hole()) {
            let (start, length) = (run.start, u64::from(run.blocks));
            self.data
                .drop_cache_of(start * BLOCK_BYTES as u64, length * BLOCK_BYTES as u64)
                .map_err(|error| io_error("drop the page cache", &error))?;
        }
        Ok(())
    }

    /// Reads blocks `from .. to` of a content, verified.
    pub(crate) fn read_blocks(
        &self,
        chunk: ChunkId,
        version: &Version,
        from: usize,
        to: usize,
    ) -> Result<Vec<u8>, StoreError> {
        let length = version.state.length as usize;
        let end = (to * BLOCK_BYTES).min(length);
        let start = from * BLOCK_BYTES;
        let total = end.saturating_sub(start);
        let mut bytes = Vec::with_capacity(total);
        let runs = crate::blocks::slice(&version.content.extents, from, to);
        if runs.len() > READ_AHEAD_RUNS {
            for run in runs.iter().filter(|run| !run.is_hole()) {
                let (start, length) = (run.start, u64::from(run.blocks));
                self.data.read_ahead(start * BLOCK_BYTES as u64, length * BLOCK_BYTES as u64);
            }
        }
        for run in runs {
            let take = (run.blocks as usize * BLOCK_BYTES).min(total - bytes.len());
            if run.is_hole() {
                bytes.resize(bytes.len() + take, 0);
                continue;
            }
            self.data
                .append_to(&mut bytes, take, run.start * BLOCK_BYTES as u64)
                .map_err(|error| io_error("read data", &error))?;
        }
        bytes.resize(total, 0);
        for (block, content) in (from..to).zip(bytes.chunks(BLOCK_BYTES)) {
            let expected = version.content.checksums.get(block);
            if expected != Some(&crc32c::crc32c(content)) {
                return Err(StoreError::Corrupt { chunk, block: block as u32 });
            }
        }
        Ok(bytes)
    }

    pub(super) fn committed(&self, chunk: ChunkId) -> Version {
        let inner = self.lock();
        inner.index.get(&chunk).map(|entry| entry.committed.clone()).unwrap_or_default()
    }

    fn version(&self, chunk: ChunkId, which: Which) -> Result<Version, StoreError> {
        let inner = self.lock();
        let entry = inner.entry(chunk).ok_or(StoreError::NotFound { chunk })?;
        let version = match (&entry.pending, which) {
            (Some(pending), Which::Newest) => pending,
            _ => &entry.committed,
        };
        if version.state.exists() {
            Ok(version.clone())
        } else {
            Err(StoreError::NotFound { chunk })
        }
    }
}
