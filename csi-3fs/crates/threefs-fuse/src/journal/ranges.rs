//! Unreported written chunks: one record per range in the journal. A successor reports them from
//! here rather than from what the storage services hold, so that the loss of a chunk in between is
//! detected.

use std::collections::HashMap;
use std::sync::atomic::Ordering::SeqCst;

use threefs_core::ids::InodeId;
use threefs_meta::Written;

use super::{RANGES, RECORDS, Words};

/// Words of a record: the inode (0: none), the first and the last chunk, and the truncate version
/// under which they were written.
pub(super) const RECORD_WORDS: usize = 3;

pub(super) struct Ranges {
    free: Vec<usize>,
    of: HashMap<InodeId, Vec<usize>>,
}

#[derive(Clone, Copy)]
struct Record {
    first: u32,
    last: u32,
    truncate_version: u64,
}

impl Ranges {
    pub(super) fn open(words: &Words) -> Self {
        let mut ranges = Self { free: Vec::with_capacity(RECORDS), of: HashMap::new() };
        for index in (0..RECORDS).map(|number| RANGES + number * RECORD_WORDS) {
            match words.at(index).load(SeqCst) {
                0 => ranges.free.push(index),
                inode => ranges.of.entry(InodeId(inode)).or_default().push(index),
            }
        }
        ranges
    }

    /// False: the journal is full.
    pub(super) fn add(
        &mut self,
        words: &Words,
        inode: InodeId,
        truncate_version: u64,
        (first, last): (u32, u32),
    ) -> bool {
        let indexes = self.of.entry(inode).or_default();
        for index in indexes.iter() {
            let record = read(words, *index);
            let touches = record.first <= last.saturating_add(1)
                && first <= record.last.saturating_add(1)
                && record.truncate_version == truncate_version;
            if touches {
                let (first, last) = (record.first.min(first), record.last.max(last));
                words.at(index + 1).store(u64::from(first) << 32 | u64::from(last), SeqCst);
                return true;
            }
        }
        let Some(index) = self.free.pop() else { return false };
        indexes.push(index);
        words.at(index + 1).store(u64::from(first) << 32 | u64::from(last), SeqCst);
        words.at(index + 2).store(truncate_version, SeqCst);
        // Stored last: it makes the record valid.
        words.at(index).store(inode.0, SeqCst);
        true
    }

    pub(super) fn of(&self, words: &Words, inode: InodeId, truncate_version: u64) -> Written {
        let mut written = Written::default();
        for index in self.of.get(&inode).into_iter().flatten() {
            let record = read(words, *index);
            if record.truncate_version == truncate_version {
                written.add(record.first, record.last);
            }
        }
        written
    }

    /// Removes `written`, and everything written before the last truncation.
    pub(super) fn remove(
        &mut self,
        words: &Words,
        inode: InodeId,
        truncate_version: u64,
        written: &Written,
    ) {
        self.retain(words, inode, |record| {
            record.truncate_version > truncate_version
                || (record.truncate_version == truncate_version
                    && !written.contains_all(record.first, record.last))
        });
    }

    pub(super) fn clear(&mut self, words: &Words, inode: InodeId) {
        self.retain(words, inode, |_| false);
    }

    fn retain(&mut self, words: &Words, inode: InodeId, keep: impl Fn(Record) -> bool) {
        let Some(indexes) = self.of.get_mut(&inode) else { return };
        indexes.retain(|index| {
            let stays = keep(read(words, *index));
            if !stays {
                words.at(*index).store(0, SeqCst);
                self.free.push(*index);
            }
            stays
        });
        if indexes.is_empty() {
            self.of.remove(&inode);
        }
    }
}

fn read(words: &Words, index: usize) -> Record {
    let range = words.at(index + 1).load(SeqCst);
    Record {
        first: (range >> 32) as u32,
        last: range as u32,
        truncate_version: words.at(index + 2).load(SeqCst),
    }
}
