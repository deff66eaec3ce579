//! Opening a store: replay of the log into the index and the data file.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};

use threefs_core::chunk::BLOCK_BYTES;
use threefs_core::error::StoreError;
use threefs_core::forgotten::ForgottenInodes;
use threefs_core::ids::ChunkVersion;

use super::compaction::{find_log, log_file};
use super::{FileChunkStore, SLICE_ENTRIES, StoreConfig, io_error};
use crate::block_set::BlockSet;
use crate::blocks::FreeBlocks;
use crate::disk::{Disk, DiskFile, Folder};
use crate::index::Inner;
use crate::log::{self, Record};
use crate::redo::Redo;
use crate::unverified;

impl FileChunkStore<Folder> {
    /// Opens the store in `folder`, creating it if necessary, and replays its log.
    ///
    /// # Errors
    /// `Io`: another process has it open, or the disk fails. `Damaged`: the log is damaged.
    pub fn open(folder: &Path, config: StoreConfig) -> Result<Self, StoreError> {
        let disk = Folder::open(folder).map_err(|error| {
            let reason = if error.kind() == std::io::ErrorKind::WouldBlock {
                "another process has this store open: stop it first".to_owned()
            } else {
                error.to_string()
            };
            StoreError::Io { operation: format!("open {}", folder.display()), reason }
        })?;
        Self::open_on(disk, config)
    }
}

impl<D: Disk> FileChunkStore<D> {
    /// As [`FileChunkStore::open`], on any [`Disk`].
    ///
    /// # Errors
    /// `Io`, `Damaged`.
    pub fn open_on(disk: D, config: StoreConfig) -> Result<Self, StoreError> {
        let data = disk.open("data").map_err(|error| io_error("open data", &error))?;
        let newest = find_log(&disk).map_err(|error| io_error("list logs", &error))?;
        let name = newest.unwrap_or(1);
        let log = disk.open(&log_file(name)).map_err(|error| io_error("open log", &error))?;
        disk.sync_names().map_err(|error| io_error("sync folder", &error))?;
        // A killed process may have written data without flushing it. What is served must be
        // durable, so both files are flushed, then read from the disk, because an earlier flush may
        // have failed.
        data.sync_data().map_err(|error| io_error("flush data", &error))?;
        log.sync_data().map_err(|error| io_error("flush log", &error))?;
        for file in [&data, &log] {
            file.drop_cache().map_err(|error| io_error("drop the page cache", &error))?;
        }
        let data_blocks =
            data.length().map_err(|error| io_error("length of data", &error))? / BLOCK_BYTES as u64;
        let (budget, bytes) = (Arc::clone(&config.budget), data_blocks * BLOCK_BYTES as u64);
        budget.add_data_file(bytes);
        let store = Self::replayed(disk, config, data, data_blocks, log, name)
            .inspect_err(|_| budget.closed(bytes))?;
        store.find_holes();
        store.publish_usage(&store.lock());
        store.allocate_logs()?;
        store.ensure_id()?;
        if let Err(error) = store.seal_last_frame() {
            tracing::warn!(%error, "could not seal the last frame of the log");
        }
        Ok(store)
    }

    /// Replays the log into the index and the data file.
    fn replayed(
        disk: D,
        config: StoreConfig,
        data: D::File,
        data_blocks: u64,
        log: D::File,
        log_name: u64,
    ) -> Result<Self, StoreError> {
        let log = Arc::new(log);
        let mut inner = Inner {
            index: BTreeMap::new(),
            with_pending: BTreeSet::new(),
            forgotten: ForgottenInodes::default(),
            version_floor: ChunkVersion(0),
            dropping: VecDeque::new(),
            id: None,
            free: FreeBlocks::default(),
            holes: FreeBlocks::default(),
            unwritten: BlockSet::default(),
            data_blocks,
            held_blocks: 0,
            returning_blocks: 0,
            resizing: false,
            releasing: Vec::new(),
            log: Arc::clone(&log),
            log_name,
            log_end: 0,
            log_room: 0,
            log_written: 0,
            compact_at: config.log_bytes,
            next_frame: 1,
            body: Vec::new(),
            unflushed: Vec::new(),
            appended: 0,
            durable: 0,
            sealed: None,
            flushing: false,
            copying: None,
            failed: None,
        };
        let mut redo = Redo::default();
        let has_data = |records: &[Record]| unverified::has_data(records, &data);
        let replay = log::replay(&*log, has_data, |record| {
            if let Record::Written { runs, data, .. } = &record {
                redo.written(runs, data);
            }
            inner.install(record);
            while inner.drop_forgotten(SLICE_ENTRIES) {}
            // Free blocks are derived from the final state.
            inner.releasing.drain(..).for_each(|(_, runs)| redo.released(&runs));
        });
        let replay = replay.map_err(|error| match error.kind() {
            std::io::ErrorKind::InvalidData => StoreError::Damaged { reason: error.to_string() },
            _ => io_error("replay log", &error),
        })?;
        if replay.void {
            // Later writes may restore its data by chance: the frame must not become valid then.
            tracing::warn!(frame = replay.next_number, "the last frame of the log has no data");
            let cleared = log.write_at(&[0; BLOCK_BYTES], replay.end);
            cleared
                .and_then(|()| log.sync_data())
                .map_err(|error| io_error("clear the last frame of the log", &error))?;
        }
        redo.apply(&data).map_err(|error| io_error("write data of the log", &error))?;
        (inner.log_end, inner.next_frame) = (replay.end, replay.next_number);
        inner.log_written = replay.end;
        inner.claim_blocks()?;
        config.budget.add_data_file((inner.data_blocks - data_blocks) * BLOCK_BYTES as u64);
        config.budget.holds_chunk(inner.largest_chunk());
        Ok(Self {
            shared_flush: disk.shares_flushes(&data, &log),
            device: disk.device(&log),
            disk,
            name: config.budget.add_store(),
            config,
            data,
            inner: Mutex::new(inner),
            flushed: Condvar::new(),
            resized: Condvar::new(),
            compaction: Mutex::new(None),
        })
    }

    /// A new store, or one of a version without ids, gets its id before any other change.
    fn ensure_id(&self) -> Result<(), StoreError> {
        let mut inner = self.lock();
        if inner.id.is_some() {
            return Ok(());
        }
        let number = self.append(&mut inner, Record::Store { id: self.config.new_id }, true)?;
        drop(inner);
        self.wait_durable(number)
    }
}
