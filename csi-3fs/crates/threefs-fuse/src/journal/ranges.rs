//! Chunks that were written and that the metadata service has not been told of: a record for each
//! range, in the state file. A successor reports them from here and not from what storage has: so a
//! chunk that was lost meanwhile is known to be lost.

use std::collections::HashMap;
use std::sync::atomic::Ordering::SeqCst;

use threefs_core::ids::InodeId;
use threefs_meta::Written;

use super::{RANGES, RECORDS, Words};

/// Words of a record: the inode (0: none), the first and the last chunk, the truncate version under
/// which they were written.
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
        for place in (0..RECORDS).map(|number| RANGES + number * RECORD_WORDS) {
            match words.at(place).load(SeqCst) {
                0 => ranges.free.push(place),
                inode => ranges.of.entry(InodeId(inode)).or_default().push(place),
            }
        }
        ranges
    }

    /// False: there is no room.
    pub(super) fn note(
        &mut self,
        words: &Words,
        inode: InodeId,
        truncate_version: u64,
        (first, last): (u32, u32),
    ) -> bool {
        let places = self.of.entry(inode).or_default();
        for place in places.iter() {
            let known = read(words, *place);
            let touches = known.first <= last.saturating_add(1)
                && first <= known.last.saturating_add(1)
                && known.truncate_version == truncate_version;
            if touches {
                let (first, last) = (known.first.min(first), known.last.max(last));
                words.at(place + 1).store(u64::from(first) << 32 | u64::from(last), SeqCst);
                return true;
            }
        }
        let Some(place) = self.free.pop() else { return false };
        places.push(place);
        words.at(place + 1).store(u64::from(first) << 32 | u64::from(last), SeqCst);
        words.at(place + 2).store(truncate_version, SeqCst);
        // Last: with it the record counts.
        words.at(place).store(inode.0, SeqCst);
        true
    }

    pub(super) fn of(&self, words: &Words, inode: InodeId, truncate_version: u64) -> Written {
        let mut written = Written::default();
        for place in self.of.get(&inode).into_iter().flatten() {
            let known = read(words, *place);
            if known.truncate_version == truncate_version {
                written.add(known.first, known.last);
            }
        }
        written
    }

    /// Drops what is in `written`, and what was written before the last truncation.
    pub(super) fn reported(
        &mut self,
        words: &Words,
        inode: InodeId,
        truncate_version: u64,
        written: &Written,
    ) {
        self.retain(words, inode, |known| {
            known.truncate_version > truncate_version
                || (known.truncate_version == truncate_version
                    && !written.contains_all(known.first, known.last))
        });
    }

    pub(super) fn clear(&mut self, words: &Words, inode: InodeId) {
        self.retain(words, inode, |_| false);
    }

    fn retain(&mut self, words: &Words, inode: InodeId, keep: impl Fn(Record) -> bool) {
        let Some(places) = self.of.get_mut(&inode) else { return };
        places.retain(|place| {
            let stays = keep(read(words, *place));
            if !stays {
                words.at(*place).store(0, SeqCst);
                self.free.push(*place);
            }
            stays
        });
        if places.is_empty() {
            self.of.remove(&inode);
        }
    }
}

fn read(words: &Words, place: usize) -> Record {
    let range = words.at(place + 1).load(SeqCst);
    Record {
        first: (range >> 32) as u32,
        last: range as u32,
        truncate_version: words.at(place + 2).load(SeqCst),
    }
}
