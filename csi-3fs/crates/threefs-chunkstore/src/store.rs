//! [`FileChunkStore`]: a data file of 4 KiB blocks and a log of the changes of its index.
//!
//! Updates are copy on write in units of blocks, so data is written once. Order of an update: data
//! is written to free blocks, on the device; then one flush serves all waiting updates (the log
//! frame is written, the log is flushed, and with it the cache of the device); then the update is
//! acknowledged. The data file itself is flushed before the frame if blocks are written for the
//! first time. Zeros are not stored, and the data of a small update is in the log as well. Opening
//! the store writes the data in the log to the data file; before a log is discarded, the data file
//! is flushed.
//!
//! Blocks released by a commit or a removal become free only when its record is durable: after a
//! crash the log may still point at them.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};

use threefs_core::checksum::Checksum;
use threefs_core::chunk::{BLOCK_BYTES, ChunkState, StoreUpdate, Which};
use threefs_core::error::StoreError;
use threefs_core::forgotten::InodeRange;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, StoreId};

use crate::accounting::ReserveWait;
use crate::budget::{Reservation, ReserveCallback};
use crate::disk::{Disk, Folder};
use crate::flush::Started;
use crate::index::Inner;
use crate::log::Record;
use crate::{ChunkStore, DiskBudget, ReadOutcome, Space, Staged, Verified};
use compaction::LogCopy;

mod append;
mod apply;
mod compaction;
mod data;
mod flush;
mod forgetting;
mod metas;
mod open;
mod read;
mod space;

/// Settings of a store.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Space budget shared with the other stores of the disk.
    pub budget: Arc<DiskBudget>,
    /// Growth step of the data file.
    pub grow_bytes: u64,
    /// Size at which the log is compacted: this, or twice the size after the last compaction if
    /// that is larger.
    pub log_bytes: u64,
    /// Id of the store if it is created now. Must be random.
    pub new_id: StoreId,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            budget: Arc::default(),
            grow_bytes: 64 << 20,
            log_bytes: 16 << 20,
            new_id: StoreId(0),
        }
    }
}

impl StoreConfig {
    /// Log space reserved for commits, removals and truncations.
    fn small_records_bytes(&self) -> u64 {
        self.log_bytes / 16
    }

    /// Allocation step of the log.
    fn log_step_bytes(&self) -> u64 {
        self.log_bytes / 8
    }

    /// Allocated size of a log that is compacted at `compact_at` bytes.
    fn log_room_bytes(&self, compact_at: u64) -> u64 {
        compact_at + self.small_records_bytes() + self.log_step_bytes()
    }
}

/// Chunk store on files, see the module.
pub struct FileChunkStore<D: Disk = Folder> {
    disk: D,
    config: StoreConfig,
    data: D::File,
    /// See [`Disk::shares_flushes`].
    shared_flush: bool,
    /// The device of the log; see [`Disk::device`].
    device: Option<u64>,
    /// Id of this store in the budget.
    name: u64,
    inner: Mutex<Inner<D::File>>,
    flushed: Condvar,
    resized: Condvar,
    // Taken before `inner`.
    compaction: Mutex<Option<LogCopy<D::File>>>,
}

/// Size at which records without a waiting thread are flushed, because a frame is bounded.
const UNFLUSHED_BYTES_MAX: usize = 1 << 20;
/// First writes of log blocks make the flush update file system metadata, so the log is written
/// with zeros ahead in steps of this size.
const AHEAD_BYTES: u64 = 256 << 10;
/// Maximum size of an update whose data is also in the log: one flush instead of two.
const LOGGED_BYTES_MAX: usize = 2 * BLOCK_BYTES;
/// Maximum number of index entries processed while the lock is held.
const SLICE_ENTRIES: usize = 256;

impl<D: Disk> FileChunkStore<D> {
    /// Shares the store: from now on, other stores of the disk may reclaim its free blocks.
    #[must_use]
    pub fn shared(self) -> Arc<Self> {
        let store = Arc::new(self);
        let reclaimable: Weak<Self> = Arc::downgrade(&store);
        store.config.budget.add_reclaimable(store.name, reclaimable);
        store
    }

    fn publish_usage(&self, inner: &Inner<D::File>) {
        self.config.budget.set_usage(self.name, inner.usage());
    }

    fn lock(&self) -> MutexGuard<'_, Inner<D::File>> {
        // A panic under the lock leaves consistent values: each is changed as a whole.
        self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn commit_in(
        &self,
        inner: &mut Inner<D::File>,
        chunk: ChunkId,
        version: ChunkVersion,
        chain_version: ChainVersion,
    ) -> Result<ChunkState, StoreError> {
        let entry = inner.entry(chunk).ok_or(StoreError::NotFound { chunk })?;
        match &entry.pending {
            Some(pending) if pending.state.version == version => {}
            None if entry.committed.state.version == version => {
                return Ok(entry.committed.state.clone());
            }
            _ => return Err(StoreError::NotFound { chunk }),
        }
        self.append(inner, Record::Commit { chunk, version, chain_version }, true)?;
        let entry = inner.index.get(&chunk).ok_or(StoreError::NotFound { chunk })?;
        Ok(entry.committed.state.clone())
    }
}

impl<D: Disk> ChunkStore for FileChunkStore<D> {
    fn read(
        &self,
        chunk: ChunkId,
        which: Which,
        offset: u32,
        length: u32,
    ) -> Result<ReadOutcome, StoreError> {
        self.read_range(chunk, which, offset, length)
    }

    fn verify(&self, chunk: ChunkId, offset: u32, length: u32) -> Result<Verified, StoreError> {
        self.verify_range(chunk, offset, length)
    }

    fn reserve(
        &self,
        update: &StoreUpdate,
        payload_bytes: usize,
        class: u8,
        ready: ReserveCallback,
    ) -> Option<ReserveWait> {
        self.request_space(update, payload_bytes, class, ready)
    }

    fn expire(&self, wait: ReserveWait) {
        self.config.budget.expire(wait);
    }

    fn apply(&self, update: &StoreUpdate, payload: &[u8]) -> Result<ChunkState, StoreError> {
        let reservation = self.wait_for_space(update, payload.len())?;
        self.apply_in(update, payload, Checksum::of(payload), reservation, &mut || ())
    }

    fn apply_in(
        &self,
        update: &StoreUpdate,
        payload: &[u8],
        payload_checksum: Checksum,
        reservation: Reservation,
        accepted: &mut dyn FnMut(),
    ) -> Result<ChunkState, StoreError> {
        let appended = self.append_change(update, payload, payload_checksum, reservation, accepted);
        let (state, number) = appended?;
        self.wait_durable(number)?;
        self.compact_if_due();
        Ok(state)
    }

    fn stage(
        &self,
        update: &StoreUpdate,
        payload: &[u8],
        payload_checksum: Checksum,
        reservation: Reservation,
        accepted: &mut dyn FnMut(),
    ) -> Result<Staged, StoreError> {
        // The callers do not bound the size of a frame.
        if self.lock().body.len() > UNFLUSHED_BYTES_MAX {
            self.flush()?;
        }
        let appended = self.append_change(update, payload, payload_checksum, reservation, accepted);
        appended.map(|(state, number)| Staged { state, number })
    }

    fn start_flush(&self, number: u64) -> Started<'_> {
        self.start_frame(number)
    }

    fn settle(&self, number: u64) -> Result<(), StoreError> {
        self.wait_durable(number)
    }

    fn compaction_is_due(&self) -> bool {
        let inner = self.lock();
        inner.copying.is_some() || inner.log_end >= inner.compact_at
    }

    fn compact(&self) {
        self.compact_if_due();
    }

    fn commit(
        &self,
        chunk: ChunkId,
        version: ChunkVersion,
        chain_version: ChainVersion,
    ) -> Result<ChunkState, StoreError> {
        let step = |inner: &mut Inner<D::File>| {
            let committed = self.commit_in(inner, chunk, version, chain_version)?;
            Ok((committed, inner.body.len() > UNFLUSHED_BYTES_MAX))
        };
        let (committed, many_wait) = self.append_with(step)?;
        if many_wait {
            self.flush()?;
        }
        Ok(committed)
    }

    fn commit_at_once(
        &self,
        chunk: ChunkId,
        version: ChunkVersion,
        chain_version: ChainVersion,
    ) -> Option<Result<ChunkState, StoreError>> {
        let mut inner = self.lock();
        if inner.body.len() > UNFLUSHED_BYTES_MAX {
            return None;
        }
        let committed = self.commit_in(&mut inner, chunk, version, chain_version);
        drop(inner);
        // The log must grow or be compacted.
        if matches!(committed, Err(StoreError::NoSpace { .. })) {
            return None;
        }
        self.config.budget.grant_waiting();
        Some(committed)
    }

    fn forget(&self, chunk: ChunkId) -> Result<(), StoreError> {
        self.drop_entry(chunk, ChunkVersion(0))?;
        self.flush()?;
        self.compact_if_due();
        Ok(())
    }

    fn purge(&self, chunk: ChunkId, version: ChunkVersion) -> Result<(), StoreError> {
        self.drop_entry(chunk, version)?;
        self.compact_if_due();
        Ok(())
    }

    fn forget_inodes(
        &self,
        inodes: &[InodeRange],
        version_floor: ChunkVersion,
    ) -> Result<(), StoreError> {
        self.drop_inodes(inodes, version_floor)
    }

    fn flush(&self) -> Result<(), StoreError> {
        let number = self.lock().appended;
        self.wait_durable(number)?;
        // Chunks of forgotten inodes may have been dropped after their record became durable.
        let mut inner = self.lock();
        let durable = inner.durable;
        inner.became_durable(durable);
        Ok(())
    }

    fn id(&self) -> StoreId {
        self.lock().id.unwrap_or(self.config.new_id)
    }

    fn chunks(&self) -> u64 {
        self.lock().index.len() as u64
    }

    fn used_bytes(&self) -> u64 {
        let inner = self.lock();
        (inner.data_blocks - inner.free.free() - inner.holes.free()) * BLOCK_BYTES as u64
    }

    fn space(&self) -> Space {
        let used_bytes = self.used_bytes();
        let capacity_bytes = self.config.budget.capacity(self.disk.free_bytes().unwrap_or(0));
        Space { used_bytes, capacity_bytes }
    }
}

impl<D: Disk> Drop for FileChunkStore<D> {
    /// A clean shutdown leaves nothing to roll forward. A failure here loses no acknowledged
    /// update.
    fn drop(&mut self) {
        if let Err(error) = self.flush().and_then(|()| self.seal_last_frame()) {
            tracing::warn!(%error, "could not flush the last commits");
        }
        let blocks = {
            let inner = self.lock();
            inner.data_blocks - inner.holes.free()
        };
        self.config.budget.remove_store(self.name);
        self.config.budget.closed(blocks * BLOCK_BYTES as u64);
        self.config.budget.grant_waiting();
    }
}

pub(crate) fn io_error(operation: &str, error: &std::io::Error) -> StoreError {
    StoreError::Io { operation: operation.to_owned(), reason: error.to_string() }
}
