//! Log compaction: rewrites the log without obsolete records, and selects the valid log at opening.
//!
//! The live state is copied in slices, in the order of chunks, while updates continue. Records
//! about chunks that are already copied are added to the copy; the others are covered by the index.
//! So the new log has each change once, and equals the old one at the switch.

use std::io;
use std::ops::Bound;
use std::sync::{Arc, PoisonError, TryLockError};

use threefs_core::error::StoreError;
use threefs_core::forgotten::FORGET_INODES_MAX;
use threefs_core::ids::{ChunkId, ChunkVersion};

use super::{FileChunkStore, SLICE_ENTRIES, io_error};
use crate::disk::{Disk, DiskFile};
use crate::index::{Copying, Entry, Version};
use crate::log::{self, FRAME_BYTES_MAX, Record};

impl<D: Disk> FileChunkStore<D> {
    /// Allocates the space of the log and of the spare log before either has content.
    pub(super) fn allocate_logs(&self) -> Result<(), StoreError> {
        let spare = self.disk.open(SPARE).map_err(|error| io_error("open spare log", &error))?;
        let mut inner = self.lock();
        let bytes = self.config.log_room_bytes(inner.compact_at);
        // On a full disk no space can be reserved: the store works as far as the space allows.
        if let Err(error) = inner.log.allocate(bytes) {
            tracing::warn!(%error, "cannot allocate log space: the disk is full");
        }
        inner.log_room = inner.log.length().map_err(|error| io_error("length of log", &error))?;
        self.clear_spare(&spare, bytes);
        self.disk.sync_names().map_err(|error| io_error("sync folder", &error))
    }

    /// Frames of a previous log, or of a failed compaction, must not follow those of the next.
    fn clear_spare(&self, spare: &D::File, bytes: u64) {
        let cleared = spare.zero().and_then(|()| spare.sync_data());
        if let Err(error) = cleared {
            tracing::warn!(%error, "could not clear the spare log");
            self.remove_file(SPARE);
        } else if let Err(error) = spare.allocate(bytes) {
            tracing::warn!(%error, "cannot allocate the spare log: the disk is full");
        }
    }

    fn remove_file(&self, name: &str) {
        if let Err(error) = self.disk.remove(name)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, name, "could not remove a file of the store");
        }
    }

    /// Copies a slice of the live state into the spare log, once the log has grown enough, and
    /// switches to it after the last slice. Updates share the work: a slice is far more than an
    /// update adds, so the copy finishes.
    pub(super) fn compact_if_due(&self) {
        let mut copy = match self.compaction.try_lock() {
            Ok(copy) => copy,
            // Another update copies the next slice.
            Err(TryLockError::WouldBlock) => return,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        };
        let is_due = || {
            let inner = self.lock();
            inner.failed.is_none() && inner.log_end >= inner.compact_at
        };
        if copy.is_some() || is_due() {
            self.copy_next(&mut copy);
        }
    }

    /// Compacts the log now, because it is full.
    pub(super) fn compact_now(&self) -> Result<(), StoreError> {
        let full = self.lock().log_name;
        let mut copy = self.compaction.lock().unwrap_or_else(PoisonError::into_inner);
        // A copy in progress contains records that are obsolete by now: a new one may be smaller.
        for _ in 0..=usize::from(copy.is_some()) {
            if self.lock().log_name == full {
                while self.copy_next(&mut copy) {}
            }
        }
        self.lock().check()
    }

    /// Copies one slice, or switches after the last one; returns whether there is more to do.
    fn copy_next(&self, copy: &mut Option<LogCopy<D::File>>) -> bool {
        // After a panic the copy is lost: the next call starts a new one.
        let copy_state = copy.take().map_or_else(|| self.start_copy(), Ok);
        let result = copy_state.and_then(|mut copy| Ok((self.copy_slice(&mut copy)?, copy)));
        match result {
            Ok((true, next)) => {
                *copy = Some(next);
                return true;
            }
            Ok((false, copy)) => self.switch_log(copy),
            Err(error) => self.abandon_copy(&error),
        }
        false
    }

    fn start_copy(&self) -> io::Result<LogCopy<D::File>> {
        let mut copy = LogCopy::new(self.disk.open(SPARE)?);
        let (id, floor, removed_inodes) = {
            let mut inner = self.lock();
            inner.copying = Some(Copying::default());
            (inner.id, inner.version_floor, inner.forgotten.by_age().collect::<Vec<_>>())
        };
        if let Some(id) = id {
            copy.record(&Record::Store { id })?;
        }
        if floor > ChunkVersion(0) {
            copy.record(&Record::Floor { version: floor })?;
        }
        for inodes in removed_inodes.chunks(FORGET_INODES_MAX) {
            copy.record(&Record::Gone { inodes: inodes.to_vec() })?;
        }
        Ok(copy)
    }

    /// Copies the next index entries, after the records appended about the previous ones; returns
    /// whether there are more.
    fn copy_slice(&self, copy: &mut LogCopy<D::File>) -> io::Result<bool> {
        let (tail, entries, more) = {
            let mut inner = self.lock();
            inner.check().map_err(io::Error::other)?;
            let copying = inner.copying.take().unwrap_or_default();
            let lower = copying.upto.map_or(Bound::Unbounded, Bound::Excluded);
            let slice = inner.index.range((lower, Bound::Unbounded)).take(SLICE_ENTRIES);
            let entries: Vec<(ChunkId, Entry)> =
                slice.map(|(chunk, entry)| (*chunk, entry.clone())).collect();
            let more = entries.len() == SLICE_ENTRIES;
            let last = entries.last().map(|(chunk, _)| *chunk);
            let upto = if more { last } else { Some(ChunkId::MAX) };
            inner.copying = Some(Copying { upto, ..Copying::default() });
            let entries = entries.into_iter().filter(|(chunk, _)| !inner.is_dropping(chunk.inode));
            (copying.tail, entries.collect::<Vec<_>>(), more)
        };
        copy.records(&tail)?;
        for (chunk, entry) in entries {
            copy.entry(chunk, entry)?;
        }
        copy.sync_if_much()?;
        Ok(more)
    }

    /// The old log is still valid: retry when it has grown further.
    fn abandon_copy(&self, error: &io::Error) {
        tracing::warn!(%error, "could not compact the log");
        let mut inner = self.lock();
        inner.copying = None;
        inner.compact_at = inner.log_end + self.config.log_step_bytes();
        drop(inner);
        match self.disk.open(SPARE) {
            Ok(spare) => self.clear_spare(&spare, 0),
            Err(error) => tracing::warn!(%error, "could not open the spare log"),
        }
    }

    /// The spare log becomes the log. No flush runs meanwhile; appended records go to the new log.
    fn switch_log(&self, mut copy: LogCopy<D::File>) {
        let bytes = match self.allocate_new_log(&copy) {
            Ok(bytes) => bytes,
            Err(error) => return self.abandon_copy(&error),
        };
        let mut inner = self.lock();
        while inner.flushing {
            inner = self.flushed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        let tail = inner.copying.as_mut().map(|copying| std::mem::take(&mut copying.tail));
        let tail = tail.unwrap_or_default();
        let end = copy.end_after(&tail);
        let failure = match inner.check() {
            Err(error) => Some(io::Error::other(error)),
            Ok(()) if bytes < end + log::padded(0) as u64 => {
                Some(io::ErrorKind::StorageFull.into())
            }
            Ok(()) => None,
        };
        if let Some(error) = failure {
            drop(inner);
            return self.abandon_copy(&error);
        }
        inner.flushing = true;
        if let Some(copying) = &mut inner.copying {
            copying.tail_bytes_max = Some(bytes - end);
        }
        let (upto, name) = (inner.appended, inner.log_name);
        drop(inner);
        // The new log contains the unflushed records, too: their data is flushed first, and that of
        // small updates, which the new log lacks. After a failed flush the kernel treats unwritten
        // pages as clean: only the log has the data, for the next opening.
        if let Err(error) = self.data.sync_data() {
            let mut inner = self.lock();
            inner.flushing = false;
            inner.failed = Some(format!("flush data: {error}"));
            drop(inner);
            self.flushed.notify_all();
            return;
        }
        if let Err(error) = copy.finish(&tail) {
            self.lock().flushing = false;
            self.flushed.notify_all();
            return self.abandon_copy(&error);
        }
        // After the rename, the next opening may find either log until the folder is flushed: if
        // that fails, nothing may be acknowledged in either.
        let new = log_file(name + 1);
        let renamed = self.disk.rename(SPARE, &new).and_then(|()| self.disk.sync_names());
        let mut inner = self.lock();
        inner.flushing = false;
        let copying = inner.copying.take().unwrap_or_default();
        if let Err(error) = renamed {
            inner.failed = Some(format!("switch to {new}: {error}"));
            drop(inner);
            self.flushed.notify_all();
            return;
        }
        inner.log_name = name + 1;
        inner.log_end = copy.at;
        inner.log_written = copy.at;
        inner.compact_at = self.compact_at(copy.at);
        inner.log_room = bytes;
        inner.next_frame = copy.number;
        inner.body = copying.tail;
        inner.became_durable(upto);
        let former = std::mem::replace(&mut inner.log, Arc::new(copy.file));
        drop(inner);
        self.flushed.notify_all();
        self.keep_as_spare(name, &former, bytes);
    }

    /// Keeps the old log as the space of the next one.
    fn keep_as_spare(&self, name: u64, former: &D::File, bytes: u64) {
        let old = log_file(name);
        match self.disk.rename(&old, SPARE) {
            Ok(()) => self.clear_spare(former, bytes),
            Err(error) => {
                tracing::warn!(%error, old, "could not keep the old log as the spare log");
                self.remove_file(&old);
            }
        }
    }

    /// Allocates the space of the new log as far as possible; returns its size.
    fn allocate_new_log(&self, copy: &LogCopy<D::File>) -> io::Result<u64> {
        // On a full disk it has the reserved space, which suffices unless the old log contained
        // only live state.
        let bytes = self.config.log_room_bytes(self.compact_at(copy.end_after(&[])));
        if let Err(error) = copy.file.allocate(bytes) {
            tracing::debug!(%error, "cannot grow the new log");
        }
        copy.file.length()
    }

    fn compact_at(&self, live_bytes: u64) -> u64 {
        self.config.log_bytes.max(live_bytes.saturating_mul(2))
    }
}

/// Name of the spare log: preallocated space for the next log, all zeros.
const SPARE: &str = "spare";

/// Unflushed bytes after which the copy is flushed, so that the last flush is short.
const UNSYNCED_BYTES_MAX: u64 = 4 << 20;
/// Frame size of the copy.
const FRAME_BYTES: usize = FRAME_BYTES_MAX / 64;

/// The spare log, with the live state up to some chunk.
pub(super) struct LogCopy<F> {
    file: F,
    at: u64,
    number: u64,
    body: Vec<u8>,
    unsynced: u64,
}

impl<F: DiskFile> LogCopy<F> {
    fn new(file: F) -> Self {
        Self { file, at: 0, number: 1, body: Vec::new(), unsynced: 0 }
    }

    fn entry(&mut self, chunk: ChunkId, entry: Entry) -> io::Result<()> {
        let Version { state, content } = entry.committed;
        self.record(&Record::Committed { chunk, state, content: Arc::unwrap_or_clone(content) })?;
        if let Some(Version { state, content }) = entry.pending {
            self.record(&Record::Pending { chunk, state, content: Arc::unwrap_or_clone(content) })?;
        }
        Ok(())
    }

    fn record(&mut self, record: &Record) -> io::Result<()> {
        log::encode(record, &mut self.body)?;
        self.finish_frame_if(FRAME_BYTES)
    }

    /// Copies encoded records of the old log.
    fn records(&mut self, records: &[u8]) -> io::Result<()> {
        for record in log::split(records) {
            self.body.extend_from_slice(record?);
            self.finish_frame_if(FRAME_BYTES)?;
        }
        Ok(())
    }

    /// Upper bound of the end of the log after writing `tail`.
    fn end_after(&self, tail: &[u8]) -> u64 {
        let bytes = self.body.len() + tail.len();
        // Each full frame has a header and is padded to a block.
        let padding = (bytes / FRAME_BYTES) * 2 * log::padded(0);
        self.at + (log::padded(bytes) + padding) as u64
    }

    /// Writes the last records and makes the whole log durable.
    fn finish(&mut self, tail: &[u8]) -> io::Result<()> {
        self.records(tail)?;
        self.finish_frame_if(0)?;
        self.file.sync_data()
    }

    fn sync_if_much(&mut self) -> io::Result<()> {
        if self.unsynced >= UNSYNCED_BYTES_MAX {
            self.file.sync_data()?;
            self.unsynced = 0;
        }
        Ok(())
    }

    fn finish_frame_if(&mut self, longer_than: usize) -> io::Result<()> {
        if self.body.len() <= longer_than {
            return Ok(());
        }
        let frame = log::frame(self.number, &self.body);
        self.file.write_at(&frame, self.at)?;
        self.at += frame.len() as u64;
        self.unsynced += frame.len() as u64;
        self.number += 1;
        self.body.clear();
        Ok(())
    }
}

pub(super) fn log_file(name: u64) -> String {
    format!("log-{name:08}")
}

/// Number of the newest complete log. Removes the remains of an interrupted compaction.
pub(super) fn find_log(disk: &impl Disk) -> io::Result<Option<u64>> {
    let names = disk.list()?;
    let number = |name: &str| name.strip_prefix("log-").and_then(|rest| rest.parse::<u64>().ok());
    let newest = names.iter().filter_map(|name| number(name)).max();
    for name in &names {
        if name.ends_with(".draft") || number(name).is_some_and(|number| Some(number) != newest) {
            disk.remove(name)?;
        }
    }
    Ok(newest)
}

#[cfg(test)]
mod tests {
    use threefs_core::chunk::{ChunkMetas, ContentChange, StoreUpdate, TagWindow};
    use threefs_core::forgotten::InodeRange;
    use threefs_core::ids::{ChainVersion, ChunkVersion, InodeId};

    use super::*;
    use crate::{ChunkStore, StoreConfig};

    const CHUNKS: usize = 3 * SLICE_ENTRIES + 10;

    fn filled(folder: &std::path::Path) -> FileChunkStore {
        let store = FileChunkStore::open(folder, StoreConfig::default()).unwrap();
        for index in 0..CHUNKS as u32 {
            let chunk = ChunkId::new(InodeId(7), index);
            let version = ChunkVersion(1);
            let update = StoreUpdate {
                chunk,
                version,
                chain_version: ChainVersion(1),
                tags: TagWindow::default(),
                change: ContentChange::Replace,
            };
            store.apply(&update, b"x").unwrap();
            store.commit(chunk, version, ChainVersion(1)).unwrap();
        }
        store
    }

    #[test]
    fn an_update_copies_one_slice() {
        let folder = tempfile::tempdir().unwrap();
        let store = filled(folder.path());
        store.lock().compact_at = 0;
        let name = store.lock().log_name;
        for slices in 1..=3 {
            store.compact_if_due();
            let inner = store.lock();
            assert_eq!(inner.log_name, name);
            let upto = inner.copying.as_ref().unwrap().upto.unwrap();
            assert_eq!(upto.index as usize, slices * SLICE_ENTRIES - 1);
        }
        store.compact_if_due();
        assert_eq!(store.lock().log_name, name + 1);
        assert!(store.lock().copying.is_none());
        drop(store);
        let store = FileChunkStore::open(folder.path(), StoreConfig::default()).unwrap();
        assert_eq!(store.chunks(), CHUNKS as u64);
    }

    #[test]
    fn the_floor_of_a_chunk_that_is_purged_before_it_is_copied_is_in_the_new_log() {
        let folder = tempfile::tempdir().unwrap();
        let store = filled(folder.path());
        store.lock().compact_at = 0;
        store.compact_if_due();
        let name = store.lock().log_name;
        let last = ChunkId::new(InodeId(7), CHUNKS as u32 - 1);
        store.purge(last, ChunkVersion(5)).unwrap();
        store.compact_now().unwrap();
        assert_eq!(store.lock().log_name, name + 1);
        drop(store);
        let store = FileChunkStore::open(folder.path(), StoreConfig::default()).unwrap();
        assert_eq!(store.version_floor(), ChunkVersion(5));
        assert!(store.meta(last).is_none());
    }

    #[test]
    fn a_full_log_completes_a_copy_in_progress() {
        let folder = tempfile::tempdir().unwrap();
        let store = filled(folder.path());
        store.lock().compact_at = 0;
        store.compact_if_due();
        let name = store.lock().log_name;
        store.compact_now().unwrap();
        assert_eq!(store.lock().log_name, name + 1);
        assert!(store.compaction.lock().unwrap().is_none());
    }

    #[test]
    fn forgotten_chunks_are_dropped_in_slices_and_invisible() {
        let folder = tempfile::tempdir().unwrap();
        let store = filled(folder.path());
        let inodes = vec![InodeRange::one(InodeId(7))];
        store.append(&mut store.lock(), Record::Gone { inodes }, true).unwrap();
        for round in 1..=3 {
            assert!(store.lock().drop_forgotten(SLICE_ENTRIES));
            assert_eq!(store.lock().index.len(), CHUNKS - round * SLICE_ENTRIES);
            let last = ChunkId::new(InodeId(7), CHUNKS as u32 - 1);
            assert!(store.lock().index.contains_key(&last));
            assert!(store.meta(last).is_none());
            assert!(store.metas(None, ChunkId::MAX, 9).is_empty());
            assert!(store.last_existing(InodeId(7)).is_none());
        }
        assert!(!store.lock().drop_forgotten(SLICE_ENTRIES));
        assert_eq!(store.chunks(), 0);
    }
}
