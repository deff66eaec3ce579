//! The log written anew, without what is not so any more, and which of the logs counts.

use std::sync::Arc;

use threefs_core::error::StoreError;
use threefs_core::forgotten::{FORGET_INODES_MAX, InodeRange};
use threefs_core::ids::ChunkId;

use super::FileChunkStore;
use crate::disk::{Disk, DiskFile};
use crate::index::{Entry, Inner, Version};
use crate::log::{self, FRAME_BYTES_MAX, Record};

impl<D: Disk> FileChunkStore<D> {
    /// Writes the live state into a new log, when the old one has grown enough.
    pub(super) fn compact_if_due(&self) -> Result<(), StoreError> {
        let mut inner = self.lock();
        if inner.flushing || inner.failed.is_some() || inner.log_end < inner.compact_at {
            return Ok(());
        }
        match self.compact(&mut inner) {
            Ok(()) => Ok(()),
            // The old log is as good as before: try again when it has grown further.
            Err(error) => {
                tracing::warn!(%error, "the log could not be compacted");
                inner.compact_at = inner.log_end.saturating_mul(2);
                Ok(())
            }
        }
    }

    fn compact(&self, inner: &mut Inner<D::File>) -> std::io::Result<()> {
        let name = inner.log_name + 1;
        let draft = format!("{}.draft", log_file(name));
        let file = self.disk.open(&draft)?;
        let mut writer = LogWriter { file: &file, at: 0, number: 1, body: Vec::new() };
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
        let room = end + self.config.small_records_bytes() + self.config.log_step_bytes();
        file.allocate(room)?;
        file.sync_data()?;
        self.disk.rename(&draft, &log_file(name))?;
        self.disk.sync_names()?;
        let old = log_file(inner.log_name);
        inner.log = Arc::new(file);
        inner.log_name = name;
        inner.log_end = end;
        inner.compact_at = self.config.log_bytes.max(end.saturating_mul(2));
        inner.log_room = room;
        inner.next_frame = number;
        inner.body.clear();
        let upto = inner.appended;
        inner.became_durable(upto);
        self.flushed.notify_all();
        self.disk.remove(&old)
    }
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
