//! The log written anew, without what is not so any more, and which of the logs counts.

use std::sync::Arc;

use threefs_core::error::StoreError;
use threefs_core::forgotten::{FORGET_INODES_MAX, InodeRange};
use threefs_core::ids::ChunkId;

use super::{FileChunkStore, failed};
use crate::disk::{Disk, DiskFile};
use crate::index::{Entry, Inner, Version};
use crate::log::{self, FRAME_BYTES_MAX, Record};

impl<D: Disk> FileChunkStore<D> {
    /// Takes the room of the log and of the next one before there is anything in them.
    pub(super) fn take_log_room(&self) -> Result<(), StoreError> {
        let spare = self.disk.open(SPARE).map_err(|error| failed("open spare log", &error))?;
        let mut inner = self.lock();
        let room = self.config.log_room_bytes(inner.compact_at);
        // A disk that is full already has no room to set aside: the store works as far as it gets.
        if let Err(error) = inner.log.allocate(room) {
            tracing::warn!(%error, "no room for the log to grow: the disk is full");
        }
        inner.log_room = inner.log.length().map_err(|error| failed("length of log", &error))?;
        self.clear_spare(&spare, room);
        self.disk.sync_names().map_err(|error| failed("sync folder", &error))
    }

    /// Frames of a former log, or of an attempt that failed, must not follow those of the next.
    fn clear_spare(&self, spare: &D::File, room: u64) {
        let cleared = spare.zero().and_then(|()| spare.sync_data());
        if let Err(error) = cleared {
            tracing::warn!(%error, "the spare log could not be cleared");
            self.remove_file(SPARE);
        } else if let Err(error) = spare.allocate(room) {
            tracing::warn!(%error, "no room for another log: the disk is full");
        }
    }

    fn remove_file(&self, name: &str) {
        if let Err(error) = self.disk.remove(name)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(%error, name, "a file of the store could not be removed");
        }
    }

    /// Writes the live state into a new log, when the old one has grown enough.
    pub(super) fn compact_if_due(&self) -> Result<(), StoreError> {
        let mut inner = self.lock();
        if !inner.flushing && inner.failed.is_none() && inner.log_end >= inner.compact_at {
            self.compact(&mut inner);
        }
        Ok(())
    }

    /// The log has no room left: it is compacted now.
    pub(super) fn compact_now(&self) -> Result<(), StoreError> {
        let mut inner = self.lock();
        while inner.flushing {
            inner = self.flushed.wait(inner).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        inner.check()?;
        self.compact(&mut inner);
        inner.check()
    }

    fn compact(&self, inner: &mut Inner<D::File>) {
        match self.write_spare(inner) {
            Ok(written) => self.switch_log(inner, written),
            // The old log is as good as before: try again when it has grown further.
            Err(error) => {
                tracing::warn!(%error, "the log could not be compacted");
                inner.compact_at = inner.log_end + self.config.log_step_bytes();
            }
        }
    }

    /// Writes the live state into the spare log, durably.
    fn write_spare(&self, inner: &Inner<D::File>) -> std::io::Result<Written<D::File>> {
        let file = self.disk.open(SPARE)?;
        match self.write_live_state(inner, &file) {
            Ok((end, next_frame)) => Ok(Written { room: file.length()?, file, end, next_frame }),
            Err(error) => {
                self.clear_spare(&file, 0);
                Err(error)
            }
        }
    }

    fn write_live_state(
        &self,
        inner: &Inner<D::File>,
        file: &D::File,
    ) -> std::io::Result<(u64, u64)> {
        let mut writer = LogWriter { file, at: 0, number: 1, body: Vec::new() };
        if let Some(id) = inner.id {
            writer.record(&Record::Store { id })?;
        }
        let gone: Vec<InodeRange> = inner.forgotten.by_age().collect();
        for inodes in gone.chunks(FORGET_INODES_MAX) {
            writer.record(&Record::Gone { inodes: inodes.to_vec() })?;
        }
        for (chunk, entry) in &inner.index {
            writer.entry(*chunk, entry)?;
        }
        writer.finish_frame()?;
        let (end, number) = (writer.at, writer.number);
        // The records that are not flushed yet are in the new log too: their data goes first.
        self.data.sync_data()?;
        let compact_at = self.config.log_bytes.max(end.saturating_mul(2));
        // On a full disk it has the room that was set aside, which is enough while something else
        // than the live state was in the old one.
        if file.allocate(self.config.log_room_bytes(compact_at)).is_err()
            && file.length()? < end + log::padded(0) as u64
        {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        file.sync_data()?;
        Ok((end, number))
    }

    /// The spare becomes the log. From the rename on either log may be the one that the next
    /// opening finds, until the folder is flushed: if that fails, nothing may be promised in either.
    fn switch_log(&self, inner: &mut Inner<D::File>, written: Written<D::File>) {
        let name = inner.log_name + 1;
        let (new, old) = (log_file(name), log_file(inner.log_name));
        let renamed = self.disk.rename(SPARE, &new);
        if let Err(error) = renamed.and_then(|()| self.disk.sync_names()) {
            inner.failed = Some(format!("switch to {new}: {error}"));
            self.flushed.notify_all();
            return;
        }
        let former = std::mem::replace(&mut inner.log, Arc::new(written.file));
        inner.log_name = name;
        inner.log_end = written.end;
        inner.compact_at = self.config.log_bytes.max(written.end.saturating_mul(2));
        inner.log_room = written.room;
        inner.next_frame = written.next_frame;
        inner.body.clear();
        let upto = inner.appended;
        inner.became_durable(upto);
        self.flushed.notify_all();
        // The former log is the room for the next one.
        match self.disk.rename(&old, SPARE) {
            Ok(()) => self.clear_spare(&former, written.room),
            Err(error) => {
                tracing::warn!(%error, old, "the former log could not be kept as the spare one");
                self.remove_file(&old);
            }
        }
    }
}

/// The room for the next log, all zeros.
const SPARE: &str = "spare";

/// A log that is written and flushed, under the name of the spare.
struct Written<F> {
    file: F,
    end: u64,
    room: u64,
    next_frame: u64,
}

struct LogWriter<'a, F> {
    file: &'a F,
    at: u64,
    number: u64,
    body: Vec<u8>,
}

impl<F: DiskFile> LogWriter<'_, F> {
    fn entry(&mut self, chunk: ChunkId, entry: &Entry) -> std::io::Result<()> {
        let Version { state, content } = &entry.committed;
        let (state, content) = (state.clone(), (**content).clone());
        self.record(&Record::Committed { chunk, state, content })?;
        if let Some(Version { state, content }) = &entry.pending {
            let (state, content) = (state.clone(), (**content).clone());
            self.record(&Record::Pending { chunk, state, content })?;
        }
        Ok(())
    }

    fn record(&mut self, record: &Record) -> std::io::Result<()> {
        log::encode(record, &mut self.body)?;
        if self.body.len() > FRAME_BYTES_MAX / 8 {
            self.finish_frame()?;
        }
        Ok(())
    }

    fn finish_frame(&mut self) -> std::io::Result<()> {
        let frame = log::frame(self.number, &self.body);
        self.file.write_at(&frame, self.at)?;
        self.at += frame.len() as u64;
        self.number += 1;
        self.body.clear();
        Ok(())
    }
}

pub(super) fn log_file(name: u64) -> String {
    format!("log-{name:08}")
}

/// The newest whole log. What a crash during a compaction left behind is removed.
pub(super) fn find_log(disk: &impl Disk) -> std::io::Result<Option<u64>> {
    let names = disk.list()?;
    let number = |name: &str| name.strip_prefix("log-").and_then(|rest| rest.parse::<u64>().ok());
    let newest = names.iter().filter_map(|name| number(name)).max();
    for name in &names {
        if name.ends_with(".draft") || number(name).is_some_and(|found| Some(found) != newest) {
            disk.remove(name)?;
        }
    }
    Ok(newest)
}
