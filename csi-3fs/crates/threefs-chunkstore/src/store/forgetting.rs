//! Removal of chunks and inodes, and the version floor.

use threefs_core::error::StoreError;
use threefs_core::forgotten::InodeRange;
use threefs_core::ids::{ChunkId, ChunkVersion};

use super::{FileChunkStore, SLICE_ENTRIES};
use crate::disk::Disk;
use crate::index::Inner;
use crate::log::Record;

impl<D: Disk> FileChunkStore<D> {
    /// Appends, not durably, that versions of new chunks start above `version`.
    fn raise_floor(
        &self,
        inner: &mut Inner<D::File>,
        version: ChunkVersion,
    ) -> Result<(), StoreError> {
        if inner.version_floor < version {
            self.append(inner, Record::Floor { version }, true)?;
        }
        Ok(())
    }

    /// Appends, not durably, the removal of a chunk and the version floor.
    pub(super) fn drop_entry(
        &self,
        chunk: ChunkId,
        version_floor: ChunkVersion,
    ) -> Result<(), StoreError> {
        self.append_with(|inner| {
            self.raise_floor(inner, version_floor)?;
            if inner.entry(chunk).is_some() {
                self.append(inner, Record::Forget { chunk }, true)?;
            }
            Ok(())
        })
    }

    /// See [`crate::ChunkStore::forget_inodes`].
    pub(super) fn drop_inodes(
        &self,
        inodes: &[InodeRange],
        version_floor: ChunkVersion,
    ) -> Result<(), StoreError> {
        let record = Record::Gone { inodes: inodes.to_vec() };
        let number = self.append_with(|inner| {
            self.raise_floor(inner, version_floor)?;
            self.append(inner, record.clone(), true)
        })?;
        while self.lock().drop_forgotten(SLICE_ENTRIES) {}
        self.wait_durable(number)?;
        // Blocks may have been released after the record became durable.
        let mut inner = self.lock();
        let durable = inner.durable;
        inner.became_durable(durable);
        self.publish_usage(&inner);
        drop(inner);
        self.config.budget.grant_waiting();
        self.compact_if_due();
        Ok(())
    }
}
