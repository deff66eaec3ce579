//! Writes to the data file.

use std::borrow::Cow;

use threefs_core::chunk::BLOCK_BYTES;
use threefs_core::error::StoreError;

use super::{FileChunkStore, io_error};
use crate::blocks::Extent;
use crate::disk::{Disk, DiskFile};

impl<D: Disk> FileChunkStore<D> {
    /// Writes `bytes` to `runs`, skipping holes; `cached`: only to the page cache. Whole blocks are
    /// written: a file system may have smaller blocks, and would not overwrite the rest in place.
    pub(super) fn write_runs(
        &self,
        runs: &[Extent],
        bytes: &[u8],
        cached: bool,
    ) -> Result<(), StoreError> {
        let mut at = 0;
        for run in runs {
            let take = (run.blocks as usize * BLOCK_BYTES).min(bytes.len() - at);
            if run.is_hole() {
                at += take;
                continue;
            }
            let (part, offset) = (padded(&bytes[at..at + take]), run.start * BLOCK_BYTES as u64);
            let written = match cached {
                true => self.data.write_at(&part, offset),
                false => self.data.write_to_device(&part, offset),
            };
            written.map_err(|error| match is_full(&error) {
                true => StoreError::NoSpace { needed_bytes: bytes.len() as u64 },
                false => io_error("write data", &error),
            })?;
            at += take;
        }
        Ok(())
    }
}

/// The bytes, padded with zeros to whole blocks.
fn padded(bytes: &[u8]) -> Cow<'_, [u8]> {
    let length = bytes.len().next_multiple_of(BLOCK_BYTES);
    if length == bytes.len() {
        return bytes.into();
    }
    let mut padded = Vec::with_capacity(length);
    padded.extend_from_slice(bytes);
    padded.resize(length, 0);
    padded.into()
}

/// Whether the error means that space is exhausted.
fn is_full(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}
