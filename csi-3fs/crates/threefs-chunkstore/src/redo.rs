//! Blocks whose bytes are in the log and may not be in the data file: written again at the opening.

use std::collections::BTreeMap;
use std::io;

use threefs_core::chunk::BLOCK_BYTES;

use crate::blocks::Extent;
use crate::disk::DiskFile;

/// The bytes that each block has by the records so far. A block is written by another record only
/// after a record that releases it.
#[derive(Debug, Default)]
pub(crate) struct Redo(BTreeMap<u64, Vec<u8>>);

impl Redo {
    /// A record has the bytes of these runs.
    pub(crate) fn written(&mut self, runs: &[Extent], data: &[u8]) {
        let blocks = runs.iter().flat_map(|run| run.start..run.end());
        for (block, bytes) in blocks.zip(data.chunks(BLOCK_BYTES)) {
            self.0.insert(block, bytes.to_vec());
        }
    }

    /// A record releases these runs: what is in them now is not known.
    pub(crate) fn released(&mut self, runs: &[Extent]) {
        for run in runs {
            let blocks: Vec<u64> = self.0.range(run.start..run.end()).map(|it| *it.0).collect();
            blocks.iter().for_each(|block| drop(self.0.remove(block)));
        }
    }

    /// Writes all of them, durably.
    pub(crate) fn apply(&self, data: &impl DiskFile) -> io::Result<()> {
        for (block, bytes) in &self.0 {
            data.write_at(bytes, block * BLOCK_BYTES as u64)?;
        }
        if self.0.is_empty() { Ok(()) } else { data.sync_data() }
    }
}
