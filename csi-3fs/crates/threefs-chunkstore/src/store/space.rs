//! Block allocation of the data file: reservation, allocation, release, growth and truncation.

use std::sync::{MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use threefs_core::chunk::{BLOCK_BYTES, StoreUpdate};
use threefs_core::error::StoreError;
use threefs_core::message::class;

use super::FileChunkStore;
use crate::accounting::{ReserveWait, SpaceRequest};
use crate::blocks::{ALLOCATED_RUNS_MAX, Extent, blocks_in};
use crate::budget::{Reclaim, Reservation, ReserveCallback};
use crate::disk::{Disk, DiskFile};
use crate::index::Inner;
use crate::{ChunkStore, plan};

/// Divisor of the remaining disk space that bounds a growth step.
const STEP_PARTS: u64 = 16;
/// How long [`ChunkStore::apply`] waits for space.
const RESERVE_TIMEOUT: Duration = Duration::from_secs(8);
/// Maximum number of attempts to allocate blocks; each failed one frees some.
const ALLOCATE_STEPS_MAX: usize = 64;

impl<D: Disk> FileChunkStore<D> {
    /// Reserves space for an update's copy.
    pub(super) fn request_space(
        &self,
        update: &StoreUpdate,
        payload_bytes: usize,
        class: u8,
        ready: ReserveCallback,
    ) -> Option<ReserveWait> {
        let base = self.committed(update.chunk);
        let (written_blocks, freed_blocks) = plan::blocks_needed(update, &base, payload_bytes);
        let whole = plan::blocks_after(update, &base, payload_bytes);
        let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        let request = SpaceRequest {
            class,
            bytes: bytes(written_blocks),
            freed_bytes: bytes(freed_blocks),
            whole: bytes(whole),
        };
        if request.bytes == 0 {
            ready(Ok(Reservation::default()));
            return None;
        }
        let free_bytes = self.disk.free_bytes().unwrap_or(0);
        self.config.budget.request(self.name, request, free_bytes, ready)
    }

    /// Waits for the space of a client's update, up to `RESERVE_TIMEOUT`.
    pub(super) fn wait_for_space(
        &self,
        update: &StoreUpdate,
        payload_bytes: usize,
    ) -> Result<Reservation, StoreError> {
        let (ready, reservation) = mpsc::channel();
        // The receiver lives until the end of this call.
        let ready: ReserveCallback = Box::new(move |reservation| drop(ready.send(reservation)));
        let wait = self.request_space(update, payload_bytes, class::UPDATE, ready);
        let reservation = reservation.recv_timeout(RESERVE_TIMEOUT).or_else(|_| {
            wait.into_iter().for_each(|wait| self.expire(wait));
            reservation.recv()
        });
        let needed_bytes = payload_bytes as u64;
        reservation.unwrap_or(Err(StoreError::NoSpace { needed_bytes }))
    }

    /// Allocates `blocks` blocks: from free blocks of the file, from the file system, from blocks
    /// that are about to become free, or from free blocks of other stores of the disk.
    pub(super) fn allocate_blocks(
        &self,
        blocks: u32,
        reservation: &mut Reservation,
    ) -> Result<Vec<Extent>, StoreError> {
        let needed_bytes = u64::from(blocks) * BLOCK_BYTES as u64;
        // Concurrent updates may take the blocks that one step has freed.
        let (mut steps, mut reclaimed_nothing) = (0, false);
        while steps < ALLOCATE_STEPS_MAX {
            let mut inner = self.lock();
            inner.check()?;
            // Fragments are used once they are a quarter of the file.
            let runs_max =
                if inner.free.free() * 4 > inner.data_blocks { ALLOCATED_RUNS_MAX / 4 } else { 1 };
            if let Some(runs) = self.take_free(&mut inner, blocks, runs_max, reservation) {
                return Ok(runs);
            }
            if inner.resizing {
                drop(self.resized.wait(inner).unwrap_or_else(PoisonError::into_inner));
                continue;
            }
            steps += 1;
            inner.resizing = true;
            let (before, missing) = (inner.data_blocks, u64::from(blocks));
            let holes = inner.holes.take_largest(missing);
            drop(inner);
            let filled_blocks = self.fill(holes);
            let more = if filled_blocks >= missing { None } else { self.grow(before, blocks) };
            let mut inner = self.end_resize();
            if let Some(more) = more {
                inner.free.release(before, more);
                inner.unwritten.insert(before, more);
                inner.data_blocks = before + more;
            }
            let progress = filled_blocks > 0 || more.is_some();
            let runs_max = if progress { ALLOCATED_RUNS_MAX } else { usize::MAX };
            if let Some(runs) = self.take_free(&mut inner, blocks, runs_max, reservation) {
                return Ok(runs);
            }
            let releasing = !inner.releasing.is_empty();
            drop(inner);
            if progress {
                continue;
            }
            if releasing {
                self.flush()?;
            } else if self.config.budget.reclaim_for(self.name, needed_bytes) > 0 {
                reclaimed_nothing = false;
            } else if std::mem::replace(&mut reclaimed_nothing, true) {
                // Two failures in a row: after the first, blocks may have been in transit.
                break;
            }
        }
        Err(StoreError::NoSpace { needed_bytes })
    }

    fn take_free(
        &self,
        inner: &mut Inner<D::File>,
        blocks: u32,
        runs_max: usize,
        reservation: &mut Reservation,
    ) -> Option<Vec<Extent>> {
        let runs = inner.free.take(blocks, runs_max)?;
        inner.held_blocks += u64::from(blocks);
        self.config.budget.blocks_allocated(self.name, inner.usage(), reservation);
        Some(runs)
    }

    /// Allocates space for holes as far as possible; returns the number of blocks.
    fn fill(&self, holes: Vec<Extent>) -> u64 {
        let block_bytes = BLOCK_BYTES as u64;
        let mut filled_blocks = 0;
        for hole in holes {
            let bytes = u64::from(hole.blocks) * block_bytes;
            let free_bytes = self.disk.free_bytes().unwrap_or(0);
            let available = self.config.budget.available(bytes, free_bytes) / block_bytes;
            let (offset, length) = (hole.start * block_bytes, available * block_bytes);
            let allocated =
                if available > 0 && self.data.fill(offset, length).is_ok() { available } else { 0 };
            self.config.budget.allocate(allocated * block_bytes);
            let mut inner = self.lock();
            inner.free.release(hole.start, allocated);
            inner.unwritten.insert(hole.start, allocated);
            inner.holes.release(hole.start + allocated, u64::from(hole.blocks) - allocated);
            filled_blocks += allocated;
        }
        filled_blocks
    }

    /// Returns the space of free runs to the file system, turning them into holes; returns the
    /// number of bytes.
    fn punch(&self, runs: Vec<Extent>) -> u64 {
        let block_bytes = BLOCK_BYTES as u64;
        let mut released = 0;
        for run in runs {
            let (start, blocks) = (run.start, u64::from(run.blocks));
            let punched = self.data.punch(start * block_bytes, blocks * block_bytes);
            let mut inner = self.lock();
            if let Err(error) = punched {
                tracing::debug!(%error, "could not return free blocks to the file system");
                inner.free.release(start, blocks);
                // Part of them may be holes now.
                inner.unwritten.insert(start, blocks);
                continue;
            }
            inner.holes.release(start, blocks);
            drop(inner);
            self.config.budget.release(blocks * block_bytes);
            released += blocks * block_bytes;
        }
        released
    }

    /// When a file with holes is opened, it is unknown which of its free blocks are holes, so all
    /// become holes.
    pub(super) fn find_holes(&self) {
        if self.data.has_holes().unwrap_or(false) {
            let mut inner = self.lock();
            // A copy of the file may have holes in place of used blocks, too.
            let all = inner.data_blocks;
            inner.unwritten.insert(0, all);
            let free = inner.free.take_largest(u64::MAX);
            drop(inner);
            self.punch(free);
        }
    }

    fn end_resize(&self) -> MutexGuard<'_, Inner<D::File>> {
        let mut inner = self.lock();
        inner.resizing = false;
        self.resized.notify_all();
        inner
    }

    /// Extends the data file beyond `before` by at least `blocks`; returns the number of blocks.
    fn grow(&self, before: u64, blocks: u32) -> Option<u64> {
        let block_bytes = BLOCK_BYTES as u64;
        let free_bytes = self.disk.free_bytes().unwrap_or(0);
        let available = self.config.budget.available(u64::MAX, free_bytes);
        // Small steps if little space is left: the other stores of the disk need it as well.
        let step_bytes = self.config.grow_bytes.min(available / STEP_PARTS);
        let step = (step_bytes / block_bytes).max(u64::from(blocks));
        let available = (available / block_bytes).min(step);
        for more in [available, u64::from(blocks)] {
            let fits = more > 0 && more <= available;
            if fits && self.data.allocate((before + more) * block_bytes).is_ok() {
                self.config.budget.allocate(more * block_bytes);
                return Some(more);
            }
        }
        None
    }

    /// Truncates a long free tail of the file, so that other stores can use its space. Only blocks
    /// that no durable record refers to are free.
    pub(super) fn truncate_free_tail(&self) {
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
                self.config.budget.release((before - blocks) * block_bytes);
            }
            Err(error) => {
                tracing::warn!(%error, "could not return free blocks to the file system");
                inner.free.release(blocks, before - blocks);
                inner.unwritten.insert(blocks, before - blocks);
            }
        }
    }

    /// Releases the blocks and the reservation of a failed update.
    pub(super) fn release_blocks(&self, runs: &[Extent], mut reservation: Reservation) {
        let mut inner = self.lock();
        for run in runs {
            inner.free.release(run.start, u64::from(run.blocks));
        }
        inner.held_blocks -= blocks_in(runs);
        self.config.budget.update_finished(self.name, inner.usage(), &mut reservation);
        drop(inner);
        self.config.budget.grant_waiting();
    }
}

impl<D: Disk> Reclaim for FileChunkStore<D> {
    fn reclaim(&self, bytes: u64) -> u64 {
        // Blocks released by a commit are free once its record is durable.
        let flush = {
            let mut inner = self.lock();
            while inner.resizing {
                inner = self.resized.wait(inner).unwrap_or_else(PoisonError::into_inner);
            }
            !inner.releasing.is_empty() && inner.free.free() * (BLOCK_BYTES as u64) < bytes
        };
        if flush && let Err(error) = self.flush() {
            tracing::warn!(%error, "could not free blocks for other stores of the disk");
        }
        let runs = self.lock().free.take_largest(bytes.div_ceil(BLOCK_BYTES as u64));
        self.punch(runs)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use threefs_core::chunk::{ContentChange, TagWindow};
    use threefs_core::forgotten::InodeRange;
    use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};

    use super::*;
    use crate::log::Record;
    use crate::store::SLICE_ENTRIES;
    use crate::{DiskBudget, StoreConfig};

    fn put(
        store: &FileChunkStore,
        chunk: ChunkId,
        version: u64,
        payload: &[u8],
    ) -> Result<(), StoreError> {
        let update = StoreUpdate {
            chunk,
            version: ChunkVersion(version),
            chain_version: ChainVersion(1),
            tags: TagWindow::default(),
            change: ContentChange::Replace,
        };
        store.apply(&update, payload)?;
        store.commit(chunk, update.version, update.chain_version).map(drop)
    }

    /// Admission must not see half a step: an overwrite would be rejected, or growth would get the
    /// space that overwrites need.
    #[test]
    fn overwrites_in_flight_never_change_the_free_space() {
        const WRITERS: u32 = 3;
        const UPDATES: u64 = 500;
        let budget = DiskBudget::new(64 * BLOCK_BYTES as u64, 0);
        let folder = tempfile::tempdir().unwrap();
        let config = StoreConfig { budget: Arc::clone(&budget), ..StoreConfig::default() };
        let store = FileChunkStore::open(folder.path(), config).unwrap();
        let content = [1; 8 * BLOCK_BYTES];
        for index in 0..WRITERS {
            put(&store, ChunkId::new(InodeId(7), index), 1, &content).unwrap();
        }
        let alone = || budget.accounting().free_space().1;
        let expected = alone();
        let write = |index| {
            for version in 2..UPDATES {
                put(&store, ChunkId::new(InodeId(7), index), version, &content).unwrap();
            }
        };
        let write = &write;
        std::thread::scope(|scope| {
            let writers: Vec<_> =
                (0..WRITERS).map(|index| scope.spawn(move || write(index))).collect();
            while !writers.iter().all(|writer| writer.is_finished()) {
                assert_eq!(alone(), expected, "free bytes");
            }
        });
    }

    /// The record is durable, but not all chunks are dropped yet.
    #[test]
    fn blocks_of_forgotten_chunks_are_reused_while_others_are_dropped() {
        const CHUNKS: u32 = SLICE_ENTRIES as u32 + 30;
        let capacity_bytes = u64::from(CHUNKS + 20) * BLOCK_BYTES as u64;
        let budget = DiskBudget::new(capacity_bytes, 0);
        let folder = tempfile::tempdir().unwrap();
        let config = StoreConfig { budget, ..StoreConfig::default() };
        let store = FileChunkStore::open(folder.path(), config).unwrap();
        for index in 0..CHUNKS {
            put(&store, ChunkId::new(InodeId(7), index), 1, b"x").unwrap();
        }
        let inodes = vec![InodeRange::one(InodeId(7))];
        store.append(&mut store.lock(), Record::Gone { inodes }, true).unwrap();
        store.flush().unwrap();
        assert!(store.lock().drop_forgotten(SLICE_ENTRIES));
        store.publish_usage(&store.lock());
        put(&store, ChunkId::new(InodeId(8), 0), 1, &[1; 80 * BLOCK_BYTES]).unwrap();
    }
}
