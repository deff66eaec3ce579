//! [`FileChunkStore`]: one data file of 4 KiB blocks, one log of what the blocks mean.
//!
//! An update never touches the blocks of the state before it (copy on write, in units of blocks),
//! so data is written once. Order of an update: data into free blocks; then one flush for all
//! updates that wait (data flushed if any was written, log frame written, log flushed); then it is
//! promised. Zeros are not stored, and the bytes of a small update are in the log as well: a cut, a
//! hole and a small write cost the flush of the log alone. At an opening the data file gets what the
//! log has; before a log is given up the data file is flushed.
//! A commit only appends a record: lost by a crash, it leaves the update pending.
//!
//! Blocks that a commit or a drop leaves behind are free for others only when its record is
//! durable: after a crash the log may still point at them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};

use threefs_core::chunk::{BLOCK_BYTES, ChunkState, StoreUpdate, Which};
use threefs_core::error::StoreError;
use threefs_core::forgotten::{ForgottenInodes, InodeRange};
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, StoreId};

use crate::blocks::FreeBlocks;
use crate::disk::{Disk, DiskFile, Folder};
use crate::index::{Copying, Inner, Version};
use crate::log::{self, Record};
use crate::plan;
use crate::redo::Redo;
use crate::room::{Room, RoomReady, RoomWait};
use crate::{ChunkStore, DiskBudget, ReadOutcome, Space};
use compaction::{LogCopy, find_log, log_file};

mod compaction;
mod forgetting;
mod metas;
mod space;

/// A chunk in more runs than this is written anew as a whole.
pub(crate) const RUNS_MAX: usize = 32;

/// Settings of a store.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// What this store shares with the others of its disk.
    pub budget: Arc<DiskBudget>,
    /// The data file grows in steps of this many bytes.
    pub grow_bytes: u64,
    /// The log is compacted when it has this many bytes, and twice what it had afterwards the
    /// last time.
    pub log_bytes: u64,
    /// Id of the store if it is made now. To be drawn at random by the caller.
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
    /// Room in the log that only commits, removes and cuts may use.
    fn small_records_bytes(&self) -> u64 {
        self.log_bytes / 16
    }

    /// The log takes room from the file system in such steps.
    fn log_step_bytes(&self) -> u64 {
        self.log_bytes / 8
    }

    /// Room of a log that is compacted at `compact_at` bytes.
    fn log_room_bytes(&self, compact_at: u64) -> u64 {
        compact_at + self.small_records_bytes() + self.log_step_bytes()
    }
}

/// See the module.
pub struct FileChunkStore<D: Disk = Folder> {
    disk: D,
    config: StoreConfig,
    data: D::File,
    /// What the budget calls this store.
    name: u64,
    inner: Mutex<Inner<D::File>>,
    flushed: Condvar,
    resized: Condvar,
    // Taken before `inner`.
    compaction: Mutex<Option<LogCopy<D::File>>>,
}

/// Records that nobody waits for are flushed when they have so many bytes: a frame is bounded.
const UNFLUSHED_BYTES_MAX: usize = 1 << 20;
/// Blocks of the log that are written for the first time cost their flush a change of the file
/// system's own metadata, so they are written with zeros in steps of this size.
const AHEAD_BYTES: u64 = 256 << 10;
/// Updates that write at most so many bytes have them in the log too: one flush in place of two.
const LOGGED_BYTES_MAX: usize = 2 * BLOCK_BYTES;
/// A reader meets blocks that were reused under it at most so often before it takes the lock.
const READ_RETRIES: usize = 16;
/// Entries of the index that are looked at while the lock is held once.
const SLICE_ENTRIES: usize = 256;

impl FileChunkStore<Folder> {
    /// Opens the store in `folder`, creating it if need be, and replays its log.
    ///
    /// # Errors
    /// `Io`: another process has it open, or the disk fails. `Damaged`: its log is.
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
    /// As [`FileChunkStore::open`], on any disk.
    ///
    /// # Errors
    /// `Io`, `Damaged`.
    pub fn open_on(disk: D, config: StoreConfig) -> Result<Self, StoreError> {
        let data = disk.open("data").map_err(|error| failed("open data", &error))?;
        let found = find_log(&disk).map_err(|error| failed("list logs", &error))?;
        let name = found.unwrap_or(1);
        let log = disk.open(&log_file(name)).map_err(|error| failed("open log", &error))?;
        disk.sync_names().map_err(|error| failed("sync folder", &error))?;
        // Whoever opens a store may find what a killed process wrote and never flushed. Whatever is
        // answered from must be durable first: both files are flushed before they are read, from the
        // disk, because an earlier flush may have failed.
        data.sync_data().map_err(|error| failed("flush data", &error))?;
        log.sync_data().map_err(|error| failed("flush log", &error))?;
        for file in [&data, &log] {
            file.drop_cache().map_err(|error| failed("drop the page cache", &error))?;
        }
        let data_blocks =
            data.length().map_err(|error| failed("length of data", &error))? / BLOCK_BYTES as u64;
        let (budget, bytes) = (Arc::clone(&config.budget), data_blocks * BLOCK_BYTES as u64);
        budget.opened(bytes);
        let store = Self::replayed(disk, config, data, data_blocks, log, name)
            .inspect_err(|_| budget.closed(bytes))?;
        store.find_holes();
        store.publish_holding(&store.lock());
        store.take_log_room()?;
        store.take_id()?;
        Ok(store)
    }

    /// What the log says is so, in the data file too.
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
            data_blocks,
            held_blocks: 0,
            returning_blocks: 0,
            resizing: false,
            leaving: Vec::new(),
            log: Arc::clone(&log),
            log_name,
            log_end: 0,
            log_room: 0,
            log_written: 0,
            compact_at: config.log_bytes,
            next_frame: 1,
            body: Vec::new(),
            data_written: false,
            appended: 0,
            durable: 0,
            flushing: false,
            copying: None,
            failed: None,
        };
        let mut redo = Redo::default();
        let replay = log::replay(&*log, |record| {
            if let Record::Written { runs, data, .. } = &record {
                redo.written(runs, data);
            }
            inner.install(record);
            while inner.drop_forgotten(SLICE_ENTRIES) {}
            // Which blocks are free follows from what is held at the end.
            inner.leaving.drain(..).for_each(|(_, runs)| redo.released(&runs));
        });
        let replay = replay.map_err(|error| match error.kind() {
            std::io::ErrorKind::InvalidData => StoreError::Damaged { reason: error.to_string() },
            _ => failed("replay log", &error),
        })?;
        redo.apply(&data).map_err(|error| failed("write data of the log", &error))?;
        (inner.log_end, inner.next_frame) = (replay.end, replay.next_number);
        inner.log_written = replay.end;
        inner.claim_blocks()?;
        config.budget.opened((inner.data_blocks - data_blocks) * BLOCK_BYTES as u64);
        config.budget.holds_chunk(inner.largest_chunk());
        Ok(Self {
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

    /// Shared with the other stores of its disk, which may use its free blocks from now on.
    #[must_use]
    pub fn shared(self) -> Arc<Self> {
        let store = Arc::new(self);
        let lender: Weak<Self> = Arc::downgrade(&store);
        store.config.budget.add_lender(store.name, lender);
        store
    }

    fn publish_holding(&self, inner: &Inner<D::File>) {
        self.config.budget.holds(self.name, inner.holding());
    }

    /// A new store, or one of a version without ids, gets its id before anything else happens.
    fn take_id(&self) -> Result<(), StoreError> {
        let mut inner = self.lock();
        if inner.id.is_some() {
            return Ok(());
        }
        let number = self.append(&mut inner, Record::Store { id: self.config.new_id }, true)?;
        drop(inner);
        self.wait_durable(number)
    }

    fn lock(&self) -> MutexGuard<'_, Inner<D::File>> {
        // A panic while the lock was held leaves values that were each changed as a whole.
        self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Waits until record `number` is durable; one of those who wait does the flush for all.
    fn wait_durable(&self, number: u64) -> Result<(), StoreError> {
        let mut inner = self.lock();
        loop {
            if inner.durable >= number {
                return Ok(());
            }
            inner.check()?;
            if inner.flushing {
                inner = self.flushed.wait(inner).unwrap_or_else(std::sync::PoisonError::into_inner);
                continue;
            }
            inner.flushing = true;
            let body = std::mem::take(&mut inner.body);
            let data_written = std::mem::take(&mut inner.data_written);
            let upto = inner.appended;
            let mut frame = log::frame(inner.next_frame, &body);
            let (log, at) = (Arc::clone(&inner.log), inner.log_end);
            inner.next_frame += 1;
            inner.log_end += frame.len() as u64;
            if inner.log_end > inner.log_written {
                let written = inner.log_end.max(inner.log_room.min(inner.log_end + AHEAD_BYTES));
                frame.resize((written - at) as usize, 0);
                inner.log_written = written;
            }
            drop(inner);
            let flushed = if data_written { self.data.sync_data() } else { Ok(()) };
            let written =
                flushed.and_then(|()| log.write_at(&frame, at)).and_then(|()| log.sync_data());
            inner = self.lock();
            inner.flushing = false;
            match written {
                Ok(()) => inner.became_durable(upto),
                Err(error) => inner.failed = Some(format!("flush: {error}")),
            }
            self.flushed.notify_all();
            drop(inner);
            self.give_tail_back();
            inner = self.lock();
        }
    }

    /// Is there room in the log for a record of `bytes`? Small records (commit, remove) may use what
    /// is kept for them, so that a full disk can still be emptied.
    fn check_log_room(
        &self,
        inner: &Inner<D::File>,
        bytes: usize,
        small: bool,
    ) -> Result<(), StoreError> {
        let kept = if small { 0 } else { self.config.small_records_bytes() };
        let needed = inner.log_end + log::padded(inner.body.len() + bytes) as u64 + kept;
        if needed > inner.log_room {
            let needed_bytes = needed + self.config.log_step_bytes();
            return Err(StoreError::NoSpace { needed_bytes });
        }
        if let Some(Copying { tail, tail_bytes_max: Some(tail_bytes_max), .. }) = &inner.copying
            && log::padded(tail.len() + bytes) as u64 > *tail_bytes_max
        {
            return Err(StoreError::NoSpace { needed_bytes: inner.log_room });
        }
        Ok(())
    }

    /// Takes room for the log from the file system; false if there is none.
    fn grow_log(&self, room_bytes: u64) -> bool {
        let log = Arc::clone(&self.lock().log);
        let grown = log.allocate(room_bytes).is_ok();
        let mut inner = self.lock();
        if grown && Arc::ptr_eq(&log, &inner.log) {
            inner.log_room = inner.log_room.max(room_bytes);
        }
        grown
    }

    /// Appends what `step` makes of the state under the lock. Where the log has no room for it, it
    /// grows, or is compacted: the room for that is set aside, so that removing works on a full disk.
    fn append_with<T>(
        &self,
        mut step: impl FnMut(&mut Inner<D::File>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut done = step(&mut self.lock());
        for compact in [false, true, false] {
            let Err(StoreError::NoSpace { needed_bytes }) = done else { break };
            if compact {
                self.compact_now()?;
            } else if !self.grow_log(needed_bytes) {
                continue;
            }
            done = step(&mut self.lock());
        }
        // A commit or a removal may have made room that others wait for.
        self.config.budget.settle();
        done
    }

    fn append(
        &self,
        inner: &mut Inner<D::File>,
        record: Record,
        small: bool,
    ) -> Result<u64, StoreError> {
        self.append_update(inner, record, small, &mut Room::default())
    }

    /// As [`Self::append`], of the update that has `room`.
    fn append_update(
        &self,
        inner: &mut Inner<D::File>,
        record: Record,
        small: bool,
        room: &mut Room,
    ) -> Result<u64, StoreError> {
        inner.check()?;
        let mut bytes = Vec::new();
        log::encode(&record, &mut bytes).map_err(|error| failed("encode record", &error))?;
        self.check_log_room(inner, bytes.len(), small)?;
        inner.body.extend_from_slice(&bytes);
        if let Some(copying) = &mut inner.copying {
            copying.appended(&record, &bytes);
        }
        inner.appended += 1;
        inner.install(record);
        self.config.budget.holds_all(self.name, inner.holding(), room);
        Ok(inner.appended)
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

    /// Bytes of blocks `from .. from + checksums.len()` of a content, verified.
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
        let mut bytes = vec![0; end.saturating_sub(start)];
        let mut at = 0;
        for run in crate::blocks::slice(&version.content.extents, from, to) {
            let take = (run.blocks as usize * BLOCK_BYTES).min(bytes.len() - at);
            if run.is_hole() {
                at += take;
                continue;
            }
            self.data
                .read_at(&mut bytes[at..at + take], run.start * BLOCK_BYTES as u64)
                .map_err(|error| failed("read data", &error))?;
            at += take;
        }
        for (block, content) in (from..to).zip(bytes.chunks(BLOCK_BYTES)) {
            let expected = version.content.checksums.get(block);
            if expected != Some(&crc32c::crc32c(content)) {
                return Err(StoreError::Corrupt { chunk, block: block as u32 });
            }
        }
        Ok(bytes)
    }

    fn committed(&self, chunk: ChunkId) -> Version {
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

impl<D: Disk> ChunkStore for FileChunkStore<D> {
    fn read(
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
                return Ok(ReadOutcome { state: version.state, bytes: Vec::new() });
            }
            let (from, to) = (start / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
            match self.read_blocks(chunk, &version, from, to) {
                Ok(mut bytes) => {
                    bytes.truncate(end - from * BLOCK_BYTES);
                    bytes.drain(..start - from * BLOCK_BYTES);
                    return Ok(ReadOutcome { state: version.state, bytes });
                }
                Err(error) => {
                    // The blocks may have been reused since the look into the index: then the
                    // index has another content now, and reading that one is right.
                    let now = self.version(chunk, which)?;
                    if Arc::ptr_eq(&now.content, &version.content) || retries == READ_RETRIES {
                        return Err(error);
                    }
                    retries += 1;
                }
            }
        }
    }

    fn reserve(
        &self,
        update: &StoreUpdate,
        payload_bytes: usize,
        class: u8,
        ready: RoomReady,
    ) -> Option<RoomWait> {
        self.ask_room(update, payload_bytes, class, ready)
    }

    fn expire(&self, wait: RoomWait) {
        self.config.budget.expire(wait);
    }

    fn apply(&self, update: &StoreUpdate, payload: &[u8]) -> Result<ChunkState, StoreError> {
        let room = self.await_room(update, payload.len())?;
        self.apply_in(update, payload, room)
    }

    fn apply_in(
        &self,
        update: &StoreUpdate,
        payload: &[u8],
        mut room: Room,
    ) -> Result<ChunkState, StoreError> {
        let base = self.committed(update.chunk);
        let plan = plan::plan(self, update, &base, payload)?;
        let parts = plan.parts(&base);
        let runs = match plan::stored(&parts) {
            0 => Vec::new(),
            blocks => self.take_blocks(blocks, &mut room)?,
        };
        let placed = plan::place(&parts, &runs);
        let done = self.write_runs(&placed, &plan.write).and_then(|()| {
            let (state, content) = plan.finish(update, &base, &placed);
            let small = runs.is_empty();
            let logged = !small && plan.write.len() <= LOGGED_BYTES_MAX && placed == runs;
            let (chunk, kept) = (update.chunk, state.clone());
            let record = match logged {
                true => {
                    let (runs, data) = (runs.clone(), plan.write.to_vec());
                    Record::Written { chunk, state: kept, content, runs, data }
                }
                false => Record::Pending { chunk, state: kept, content },
            };
            let number = self.append_with(|inner| {
                if inner.forgotten.contains(update.chunk.inode) {
                    return Err(StoreError::NotFound { chunk: update.chunk });
                }
                let number = self.append_update(inner, record.clone(), small, &mut room)?;
                inner.data_written |= !small && !logged;
                Ok(number)
            })?;
            Ok((state, number))
        });
        match done {
            Ok((state, number)) => {
                self.wait_durable(number)?;
                self.compact_if_due();
                Ok(state)
            }
            Err(error) => {
                self.release_blocks(&runs, room);
                Err(error)
            }
        }
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
        // The log has to grow, or to be compacted.
        if matches!(committed, Err(StoreError::NoSpace { .. })) {
            return None;
        }
        self.config.budget.settle();
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
        // Chunks of forgotten inodes may have been dropped after their record was durable.
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
    /// An orderly end leaves nothing to roll forward. A failure here loses no promise.
    fn drop(&mut self) {
        if let Err(error) = self.flush() {
            tracing::warn!(%error, "the last commits were not flushed");
        }
        let blocks = {
            let inner = self.lock();
            inner.data_blocks - inner.holes.free()
        };
        self.config.budget.remove_store(self.name);
        self.config.budget.closed(blocks * BLOCK_BYTES as u64);
        self.config.budget.settle();
    }
}

pub(crate) fn failed(operation: &str, error: &std::io::Error) -> StoreError {
    StoreError::Io { operation: operation.to_owned(), reason: error.to_string() }
}
