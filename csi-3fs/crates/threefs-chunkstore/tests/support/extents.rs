//! Sectors of the files of a disk that have been written since they were allocated: only those are
//! overwritten in place.

use std::collections::BTreeMap;

use super::SECTOR_BYTES;

/// State of the allocated sectors of all files.
#[derive(Default)]
pub struct Extents {
    /// Written since they were allocated.
    written: BTreeMap<usize, Vec<bool>>,
    /// Written and flushed since they were allocated.
    initialized: BTreeMap<usize, Vec<bool>>,
}

impl Extents {
    pub fn write(&mut self, file: usize, offset: u64, length: u64) {
        let written = self.written.entry(file).or_default();
        let to = (offset + length).div_ceil(SECTOR_BYTES as u64) as usize;
        written.resize(written.len().max(to), false);
        written[offset as usize / SECTOR_BYTES..to].fill(true);
    }

    pub fn sync(&mut self, file: usize) {
        let written = self.written.entry(file).or_default().clone();
        self.initialized.insert(file, written);
    }

    /// A range is allocated again, or deallocated.
    pub fn reset(&mut self, file: usize, offset: u64, length: u64) {
        for sectors in [&mut self.written, &mut self.initialized] {
            let sectors = sectors.entry(file).or_default();
            let to = sectors.len().min((offset.saturating_add(length)) as usize / SECTOR_BYTES);
            let from = to.min(offset as usize / SECTOR_BYTES);
            sectors[from..to].fill(false);
        }
    }

    pub fn is_initialized(&self, file: usize, offset: u64, length: u64) -> bool {
        let to = (offset + length).div_ceil(SECTOR_BYTES as u64) as usize;
        let range = offset as usize / SECTOR_BYTES..to;
        let initialized = self.initialized.get(&file).and_then(|sectors| sectors.get(range));
        initialized.is_some_and(|sectors| sectors.iter().all(|sector| *sector))
    }
}
