//! Blocks of the data file: taken, written, given back; and how the file grows.

use std::sync::{MutexGuard, PoisonError};

use threefs_core::chunk::BLOCK_BYTES;
use threefs_core::error::StoreError;

use super::{FileChunkStore, RUNS_MAX, failed};
use crate::ChunkStore;
use crate::blocks::Extent;
use crate::disk::{Disk, DiskFile};
use crate::index::Inner;

impl<D: Disk> FileChunkStore<D> {
    /// Takes `blocks` free blocks; grows the file, or waits for blocks that are about to be free.
    pub(super) fn take_blocks(&self, blocks: u32) -> Result<Vec<Extent>, StoreError> {
        let needed_bytes = u64::from(blocks) * BLOCK_BYTES as u64;
        let mut waited = false;
        loop {
            let mut inner = self.lock();
            inner.check()?;
            // Fragments are worth putting together once they are a quarter of the file.
            let runs_max = if inner.free.free() * 4 > inner.data_blocks { RUNS_MAX / 4 } else { 1 };
            if let Some(runs) = inner.free.take(blocks, runs_max) {
                return Ok(runs);
            }
            if inner.resizing {
                drop(self.resized.wait(inner).unwrap_or_else(PoisonError::into_inner));
                continue;
            }
            let before = inner.data_blocks;
            inner.resizing = true;
            drop(inner);
            let more = self.grow(before, blocks);
            let mut inner = self.end_resize();
            if let Some(more) = more {
                inner.free.release(before, more);
                inner.data_blocks = before + more;
                continue;
            }
            if let Some(runs) = inner.free.take(blocks, RUNS_MAX) {
                return Ok(runs);
            }
            let hopeful = !inner.leaving.is_empty() && !waited;
            drop(inner);
            if !hopeful {
                return Err(StoreError::NoSpace { needed_bytes });
            }
            self.flush()?;
            waited = true;
        }
    }

    fn end_resize(&self) -> MutexGuard<'_, Inner<D::File>> {
        let mut inner = self.lock();
        inner.resizing = false;
        self.resized.notify_all();
        inner
    }

    /// Makes the data file longer than `before`, for `blocks` at least; by how many blocks.
    fn grow(&self, before: u64, blocks: u32) -> Option<u64> {
        let block_bytes = BLOCK_BYTES as u64;
        let step = (self.config.grow_bytes / block_bytes).max(u64::from(blocks));
        let free_bytes = self.disk.free_bytes().unwrap_or(0);
        let room = self.config.budget.room(step * block_bytes, free_bytes) / block_bytes;
        for more in [room, u64::from(blocks)] {
            let fits = more > 0 && more <= room;
            if fits && self.data.allocate((before + more) * block_bytes).is_ok() {
                self.config.budget.take(more * block_bytes);
                return Some(more);
            }
        }
        None
    }

    /// A long free end of the file goes back to the file system, where other stores find it. Free
    /// are only blocks that no durable record holds.
    pub(super) fn give_tail_back(&self) {
        let block_bytes = BLOCK_BYTES as u64;
        let keep = self.config.grow_bytes / block_bytes;
        let mut inner = self.lock();
        if inner.resizing {
            return;
        }
        let before = inner.data_blocks;
        let Some(blocks) = inner.free.cut_tail(before, keep) else { return };
        inner.resizing = true;
        drop(inner);
        let cut = self.data.cut(blocks * block_bytes);
        let mut inner = self.end_resize();
        match cut {
            Ok(()) => {
                inner.data_blocks = blocks;
                self.config.budget.give((before - blocks) * block_bytes);
            }
            Err(error) => {
                tracing::warn!(%error, "free blocks could not be given back");
                inner.free.release(blocks, before - blocks);
            }
        }
    }

    pub(super) fn release_blocks(&self, runs: &[Extent]) {
        let mut inner = self.lock();
        for run in runs {
            inner.free.release(run.start, u64::from(run.blocks));
        }
    }

    /// Writes `bytes` where `runs` says, holes left out.
    pub(super) fn write_runs(&self, runs: &[Extent], bytes: &[u8]) -> Result<(), StoreError> {
        let mut at = 0;
        for run in runs {
            let take = (run.blocks as usize * BLOCK_BYTES).min(bytes.len() - at);
            if run.is_hole() {
                at += take;
                continue;
            }
            self.data.write_at(&bytes[at..at + take], run.start * BLOCK_BYTES as u64).map_err(
                |error| {
                    if is_full(&error) {
                        StoreError::NoSpace { needed_bytes: bytes.len() as u64 }
                    } else {
                        failed("write data", &error)
                    }
                },
            )?;
            at += take;
        }
        Ok(())
    }
}

/// No room, for whichever reason the system names.
fn is_full(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}
