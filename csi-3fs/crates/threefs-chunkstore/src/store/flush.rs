//! Flushes of the log: by a thread that waits for its record, or of several stores together.

use std::io;
use std::sync::{Arc, PoisonError};

use threefs_core::error::StoreError;

use super::{AHEAD_BYTES, FileChunkStore};
use crate::blocks::Extent;
use crate::disk::{Disk, DiskFile};
use crate::flush::{LogFlush, Started};
use crate::index::Inner;
use crate::log;

/// The next frame of a log. Until it is written, the store flushes nothing else.
struct Frame<F> {
    log: Arc<F>,
    bytes: Vec<u8>,
    at: u64,
    /// It overwrites blocks that were written and flushed before.
    in_place: bool,
    /// Blocks of the data file to be flushed first.
    unflushed: Vec<Extent>,
    /// The last record of the frame.
    upto: u64,
}

impl<D: Disk> FileChunkStore<D> {
    /// Waits until record `number` is durable; one waiting thread flushes for all.
    pub(super) fn wait_durable(&self, number: u64) -> Result<(), StoreError> {
        let mut inner = self.lock();
        loop {
            if inner.durable >= number {
                return Ok(());
            }
            inner.check()?;
            if inner.flushing {
                inner = self.flushed.wait(inner).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let frame = Self::take_frame(&mut inner);
            drop(inner);
            let written = self.write_frame(&frame);
            self.end_frame(frame, written);
            inner = self.lock();
        }
    }

    /// The next frame, with all records so far. [`Self::end_frame`] must follow.
    fn take_frame(inner: &mut Inner<D::File>) -> Frame<D::File> {
        inner.flushing = true;
        let body = std::mem::take(&mut inner.body);
        let mut bytes = log::frame(inner.next_frame, &body);
        let at = inner.log_end;
        inner.next_frame += 1;
        inner.log_end += bytes.len() as u64;
        let in_place = inner.log_end <= inner.log_written;
        if !in_place {
            let written = inner.log_end.max(inner.log_room.min(inner.log_end + AHEAD_BYTES));
            bytes.resize((written - at) as usize, 0);
            inner.log_written = written;
        }
        let unflushed = std::mem::take(&mut inner.unflushed);
        let (log, upto) = (Arc::clone(&inner.log), inner.appended);
        Frame { log, bytes, at, in_place, unflushed, upto }
    }

    /// Writes a frame and makes it durable, after the data of its records.
    fn write_frame(&self, frame: &Frame<D::File>) -> io::Result<()> {
        if !frame.unflushed.is_empty() {
            self.data.sync_data()?;
        }
        frame.log.write_at(&frame.bytes, frame.at)?;
        frame.log.sync_data()
    }

    fn end_frame(&self, frame: Frame<D::File>, written: io::Result<()>) {
        let mut inner = self.lock();
        inner.flushing = false;
        match written {
            Ok(()) => {
                for run in frame.unflushed {
                    inner.unwritten.remove(run.start, u64::from(run.blocks));
                }
                inner.became_durable(frame.upto);
            }
            Err(error) => inner.failed = Some(format!("flush: {error}")),
        }
        drop(inner);
        self.flushed.notify_all();
        self.truncate_free_tail();
    }

    /// Starts a flush of all records so far, if `number` is not durable yet.
    pub(super) fn start_frame(&self, number: u64) -> Started<'_> {
        let mut inner = self.lock();
        if inner.durable >= number {
            return Started::Ended(Ok(()));
        }
        if let Err(error) = inner.check() {
            return Started::Ended(Err(error));
        }
        if inner.flushing {
            return Started::Busy;
        }
        let frame = Self::take_frame(&mut inner);
        drop(inner);
        Started::Flush(Box::new(StoreFlush { store: self, frame: Some(frame) }))
    }
}

/// A flush of one store as a part of a common one.
struct StoreFlush<'a, D: Disk> {
    store: &'a FileChunkStore<D>,
    frame: Option<Frame<D::File>>,
}

impl<D: Disk> LogFlush for StoreFlush<'_, D> {
    fn device(&self) -> Option<u64> {
        let frame = self.frame.as_ref()?;
        let is_shared = self.store.shared_flush && frame.in_place && frame.unflushed.is_empty();
        if is_shared { self.store.device } else { None }
    }

    fn write(&self) -> io::Result<()> {
        self.frame.as_ref().map_or(Ok(()), |frame| self.store.write_frame(frame))
    }

    fn start_writing(&self) -> io::Result<()> {
        self.frame.as_ref().map_or(Ok(()), |frame| frame.log.start_writing(&frame.bytes, frame.at))
    }

    fn finish_writing(&self) -> io::Result<()> {
        self.frame.as_ref().map_or(Ok(()), |frame| frame.log.finish_writing(&frame.bytes, frame.at))
    }

    fn flush_device(&self) -> io::Result<()> {
        self.frame.as_ref().map_or(Ok(()), |frame| frame.log.sync_data())
    }

    fn end(mut self: Box<Self>, written: io::Result<()>) -> Result<(), StoreError> {
        if let Some(frame) = self.frame.take() {
            self.store.end_frame(frame, written);
        }
        self.store.lock().check()
    }
}

impl<D: Disk> Drop for StoreFlush<'_, D> {
    /// After a panic: whether the frame was written is unknown.
    fn drop(&mut self) {
        if let Some(frame) = self.frame.take() {
            self.store.end_frame(frame, Err(io::Error::other("the flush was abandoned")));
        }
    }
}
