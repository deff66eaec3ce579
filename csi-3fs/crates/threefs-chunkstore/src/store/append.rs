//! Appending records to the log.

use std::sync::Arc;

use threefs_core::error::StoreError;

use super::{FileChunkStore, io_error};
use crate::blocks::Extent;
use crate::budget::Reservation;
use crate::disk::{Disk, DiskFile};
use crate::index::{Copying, Inner};
use crate::log::{self, Record};

impl<D: Disk> FileChunkStore<D> {
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
        self.append_encoded(inner, &mut Encoded::of(record)?, small, &mut Reservation::default())
    }

    /// Appends the record of the update that holds `reservation`.
    pub(super) fn append_encoded(
        &self,
        inner: &mut Inner<D::File>,
        encoded: &mut Encoded,
        small: bool,
        reservation: &mut Reservation,
    ) -> Result<u64, StoreError> {
        inner.check()?;
        self.check_log_room(inner, encoded.bytes.len(), small)?;
        // Absent once it was appended: only a refused attempt is repeated.
        let Some(record) = encoded.record.take() else { return Ok(inner.appended) };
        inner.body.extend_from_slice(&encoded.bytes);
        if let Some(copying) = &mut inner.copying {
            copying.appended(&record, &encoded.bytes);
        }
        inner.appended += 1;
        inner.install(record);
        self.config.budget.update_finished(self.name, inner.usage(), reservation);
        Ok(inner.appended)
    }
}

/// A record and its encoding, which needs no lock.
pub(super) struct Encoded {
    record: Option<Record>,
    bytes: Vec<u8>,
}

impl Encoded {
    pub(super) fn of(record: Record) -> Result<Self, StoreError> {
        let mut bytes = Vec::new();
        log::encode(&record, &mut bytes).map_err(|error| io_error("encode record", &error))?;
        Ok(Self { record: Some(record), bytes })
    }
}
