//! Redo at opening: blocks whose data is in the log and may not be in the data file.

use std::collections::BTreeMap;
use std::io;

use threefs_core::chunk::BLOCK_BYTES;

use crate::blocks::Extent;
use crate::disk::DiskFile;

/// Content of each block by the records so far. A record reuses a block only after another record
/// has released it.
#[derive(Debug, Default)]
pub(crate) struct Redo(BTreeMap<u64, Vec<u8>>);

impl Redo {
    /// A record contains the data of these runs.
    pub(crate) fn written(&mut self, runs: &[Extent], data: &[u8]) {
        let blocks = runs.iter().flat_map(|run| run.start..run.end());
        for (block, bytes) in blocks.zip(data.chunks(BLOCK_BYTES)) {
            // Whole blocks, as every write to the data file.
            let mut bytes = bytes.to_vec();
            bytes.resize(BLOCK_BYTES, 0);
            self.0.insert(block, bytes);
        }
    }

    /// A record releases these runs: their content is now unknown.
    pub(crate) fn released(&mut self, runs: &[Extent]) {
        for run in runs {
            let blocks: Vec<u64> = self.0.range(run.start..run.end()).map(|it| *it.0).collect();
            blocks.iter().for_each(|block| drop(self.0.remove(block)));
        }
    }

    /// Writes all blocks, durably.
    pub(crate) fn apply(&self, data: &impl DiskFile) -> io::Result<()> {
        for (block, bytes) in &self.0 {
            data.write_at(bytes, block * BLOCK_BYTES as u64)?;
        }
        if self.0.is_empty() { Ok(()) } else { data.sync_data() }
    }
}
