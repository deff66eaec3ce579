//! Appending records to the log, and flushing it.

use std::sync::{Arc, PoisonError};

use threefs_core::error::StoreError;

use super::{AHEAD_BYTES, FileChunkStore, io_error};
use crate::blocks::Extent;
use crate::budget::Reservation;
use crate::disk::{Disk, DiskFile};
use crate::index::{Copying, Inner};
use crate::log::{self, Record};

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
            inner.flushing = true;
            let body = std::mem::take(&mut inner.body);
            let unflushed = std::mem::take(&mut inner.unflushed);
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
            let flushed = if unflushed.is_empty() { Ok(()) } else { self.data.sync_data() };
            let written =
                flushed.and_then(|()| log.write_at(&frame, at)).and_then(|()| log.sync_data());
            inner = self.lock();
            inner.flushing = false;
            match written {
                Ok(()) => {
                    for run in unflushed {
                        inner.unwritten.remove(run.start, u64::from(run.blocks));
                    }
                    inner.became_durable(upto);
                }
                Err(error) => inner.failed = Some(format!("flush: {error}")),
            }
            self.flushed.notify_all();
            drop(inner);
            self.truncate_free_tail();
            inner = self.lock();
        }
    }

    /// Whether a flush of the log makes these runs durable, too, once they are on the device. The
    /// first write of a block changes file system metadata, which only a flush of the data file
    /// makes durable.
    pub(super) fn is_flushed_with_log(&self, runs: &[Extent]) -> bool {
        let inner = self.lock();
        let unwritten = |run: &Extent| inner.unwritten.intersects(run.start, run.blocks.into());
        self.shared_flush && !runs.iter().any(unwritten)
    }

    /// Appends a frame after the last one, whose data is then never taken for lost: the data of the
    /// last frame is there, and damage to it from now on must be reported.
    pub(super) fn seal_last_frame(&self) -> Result<(), StoreError> {
        let is_sealed = |inner: &Inner<D::File>| inner.sealed == Some(inner.appended);
        if !self.shared_flush || is_sealed(&self.lock()) {
            return Ok(());
        }
        let number = self.append_with(|inner| {
            // Changes nothing.
            let floor = Record::Floor { version: inner.version_floor };
            self.append(inner, floor, true)
        })?;
        self.wait_durable(number)?;
        self.lock().sealed = Some(number);
        Ok(())
    }

    /// Checks the log space for a record of `bytes`. Small records (commit, remove) may use the
    /// reserved space, so that space can be freed on a full disk.
    pub(super) fn check_log_room(
        &self,
        inner: &Inner<D::File>,
        bytes: usize,
        small: bool,
    ) -> Result<(), StoreError> {
        let reserved = if small { 0 } else { self.config.small_records_bytes() };
        let needed_end = inner.log_end + log::padded(inner.body.len() + bytes) as u64 + reserved;
        if needed_end > inner.log_room {
            let needed_bytes = needed_end + self.config.log_step_bytes();
            return Err(StoreError::NoSpace { needed_bytes });
        }
        if let Some(Copying { tail, tail_bytes_max: Some(tail_bytes_max), .. }) = &inner.copying
            && log::padded(tail.len() + bytes) as u64 > *tail_bytes_max
        {
            return Err(StoreError::NoSpace { needed_bytes: inner.log_room });
        }
        Ok(())
    }

    /// Allocates log space from the file system; false if there is none.
    pub(super) fn grow_log(&self, room_bytes: u64) -> bool {
        let log = Arc::clone(&self.lock().log);
        let is_grown = log.allocate(room_bytes).is_ok();
        let mut inner = self.lock();
        if is_grown && Arc::ptr_eq(&log, &inner.log) {
            inner.log_room = inner.log_room.max(room_bytes);
        }
        is_grown
    }

    /// Runs `step`, which appends under the lock. If the log is full, grows or compacts it and
    /// retries; space for a compaction is reserved, so that removals work on a full disk.
    pub(super) fn append_with<T>(
        &self,
        mut step: impl FnMut(&mut Inner<D::File>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut result = step(&mut self.lock());
        for compact in [false, true, false] {
            let Err(StoreError::NoSpace { needed_bytes }) = result else { break };
            if compact {
                self.compact_now()?;
            } else if !self.grow_log(needed_bytes) {
                continue;
            }
            result = step(&mut self.lock());
        }
        // A commit or a removal may have freed space that others wait for.
        self.config.budget.grant_waiting();
        result
    }

    pub(super) fn append(
        &self,
        inner: &mut Inner<D::File>,
        record: Record,
        small: bool,
    ) -> Result<u64, StoreError> {
        self.append_update(inner, record, small, &mut Reservation::default())
    }

    /// As [`Self::append`], for the update that holds `reservation`.
    pub(super) fn append_update(
        &self,
        inner: &mut Inner<D::File>,
        record: Record,
        small: bool,
        reservation: &mut Reservation,
    ) -> Result<u64, StoreError> {
        inner.check()?;
        let mut bytes = Vec::new();
        log::encode(&record, &mut bytes).map_err(|error| io_error("encode record", &error))?;
        self.check_log_room(inner, bytes.len(), small)?;
        inner.body.extend_from_slice(&bytes);
        if let Some(copying) = &mut inner.copying {
            copying.appended(&record, &bytes);
        }
        inner.appended += 1;
        inner.install(record);
        self.config.budget.update_finished(self.name, inner.usage(), reservation);
        Ok(inner.appended)
    }
}
