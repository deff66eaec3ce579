//! Updates: data is written to free blocks, then a record is appended to the log.

use threefs_core::checksum::Checksum;
use threefs_core::chunk::{ChunkState, StoreUpdate};
use threefs_core::error::StoreError;

use super::append::Encoded;
use super::{FileChunkStore, LOGGED_BYTES_MAX};
use crate::budget::Reservation;
use crate::disk::{Disk, DiskFile};
use crate::log::Record;
use crate::plan;

impl<D: Disk> FileChunkStore<D> {
    /// Writes the data of an update and appends its record; returns the number of the record, with
    /// which the update is durable.
    pub(super) fn append_change(
        &self,
        update: &StoreUpdate,
        payload: &[u8],
        payload_checksum: Checksum,
        mut reservation: Reservation,
        accepted: &mut dyn FnMut(),
    ) -> Result<(ChunkState, u64), StoreError> {
        let base = self.committed(update.chunk);
        let plan = plan::plan(update, &base, payload, |from, to| {
            self.read_blocks(update.chunk, &base, from, to)
        })?;
        plan.verify_payload(update.chunk, payload, payload_checksum)?;
        let parts = plan.parts(&base);
        let runs = match plan::stored_blocks(&parts) {
            0 => Vec::new(),
            blocks => self.allocate_blocks(blocks, &mut reservation)?,
        };
        accepted();
        let placed = plan::locate(&parts, &runs);
        let small = runs.is_empty();
        let logged = !small && plan.write.len() <= LOGGED_BYTES_MAX && placed == runs;
        let joint = !small && !logged && self.is_flushed_with_log(&runs);
        // Otherwise the flush of the data file would write the data of all updates in turn.
        let cached = logged || !(self.shared_flush || self.data.bypasses_cache());
        let appended = self.write_runs(&placed, &plan.write, cached).and_then(|()| {
            let (state, content) = plan.finish(update, &base, &placed);
            let (chunk, pending) = (update.chunk, state.clone());
            let (mut unflushed, runs) = (Vec::new(), runs.clone());
            let record = if logged {
                Record::Written { chunk, state, content, runs, data: plan.write.to_vec() }
            } else if joint {
                Record::Verified { chunk, state, content, runs }
            } else {
                unflushed = runs;
                Record::Pending { chunk, state, content }
            };
            let mut record = Encoded::of(record)?;
            let number = self.append_with(|inner| {
                if inner.forgotten.contains(chunk.inode) {
                    return Err(StoreError::NotFound { chunk });
                }
                let number = self.append_encoded(inner, &mut record, small, &mut reservation)?;
                inner.unflushed.append(&mut unflushed);
                Ok(number)
            })?;
            Ok((pending, number))
        });
        if appended.is_err() {
            self.release_blocks(&runs, reservation);
        }
        appended
    }
}
