//! Slots for writes that are answered and not durable yet: their bytes are in the state file, so a
//! successor writes them. See [`crate::write_behind`].

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::SeqCst;

use rustix::fs::FallocateFlags;
use threefs_core::ids::InodeId;

use super::{Journal, SLOT_RECORDS, SLOTS_OFFSET, Words};
use crate::wire::WRITE_BYTES_MAX;

/// Number of slots of a mount.
pub(crate) const WRITE_SLOTS: usize = 32;
/// Maximum length of the bytes in a slot.
pub(crate) const SLOT_BYTES: usize = WRITE_BYTES_MAX;
/// Words of a slot's record: the inode (0: free), the offset in the file, the length, the order of
/// the write, and the index of the chunk.
pub(super) const SLOT_WORDS: usize = 5;

/// The bytes of all slots.
pub(super) struct SlotBytes(Option<File>);

/// A write that a predecessor has answered.
pub(crate) struct FormerWrite {
    pub(crate) slot: usize,
    pub(crate) inode: InodeId,
    pub(crate) offset: u64,
    pub(crate) order: u64,
    pub(crate) chunk: u32,
    pub(crate) bytes: Vec<u8>,
}

/// What the record of a slot states, except for the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotRecord {
    pub(crate) inode: InodeId,
    pub(crate) chunk: u32,
    pub(crate) offset: u64,
    pub(crate) order: u64,
}

impl SlotBytes {
    /// Without a file, no daemon takes over.
    pub(super) fn new(file: Option<File>) -> Self {
        Self(file)
    }

    fn at(slot: usize) -> u64 {
        (SLOTS_OFFSET + slot * SLOT_BYTES) as u64
    }
}

impl Journal {
    /// Writes that predecessors have answered and not completed.
    ///
    /// # Errors
    /// The state file cannot be read.
    pub(crate) fn former_writes(&self) -> io::Result<Vec<FormerWrite>> {
        let mut writes = Vec::new();
        for slot in 0..WRITE_SLOTS {
            let [inode, offset, length, order, chunk] = record(&self.words, slot);
            let Some(file) = self.slot_bytes.0.as_ref().filter(|_| inode != 0) else { continue };
            let mut bytes = vec![0; (length as usize).min(SLOT_BYTES)];
            file.read_exact_at(&mut bytes, SlotBytes::at(slot))?;
            let (inode, chunk) = (InodeId(inode), chunk as u32);
            writes.push(FormerWrite { slot, inode, offset, order, chunk, bytes });
        }
        Ok(writes)
    }

    /// Copies bytes to a free slot, which stays free.
    ///
    /// # Errors
    /// The state file has no space.
    pub(crate) fn fill_slot(&self, slot: usize, bytes: &[u8]) -> io::Result<()> {
        self.write_slot(slot, 0, bytes)
    }

    /// Records that a slot that was filled with `length` bytes is in use: a successor writes it.
    pub(crate) fn use_slot(&self, slot: usize, record: SlotRecord, length: usize) {
        let index = SLOT_RECORDS + slot * SLOT_WORDS;
        self.words.at(index + 1).store(record.offset, SeqCst);
        self.words.at(index + 2).store(length as u64, SeqCst);
        self.words.at(index + 3).store(record.order, SeqCst);
        self.words.at(index + 4).store(record.chunk.into(), SeqCst);
        // Stored last: it makes the record valid.
        self.words.at(index).store(record.inode.0, SeqCst);
    }

    /// Appends bytes to a slot that has `length` bytes.
    ///
    /// # Errors
    /// As [`Journal::fill_slot`]; the slot is unchanged.
    pub(crate) fn extend_slot(&self, slot: usize, length: usize, bytes: &[u8]) -> io::Result<()> {
        self.write_slot(slot, length, bytes)?;
        let longer = (length + bytes.len()) as u64;
        self.words.at(SLOT_RECORDS + slot * SLOT_WORDS + 2).store(longer, SeqCst);
        Ok(())
    }

    /// The write is durable and recorded, or has failed.
    pub(crate) fn free_slot(&self, slot: usize) {
        self.words.at(SLOT_RECORDS + slot * SLOT_WORDS).store(0, SeqCst);
    }

    /// Returns the memory of all slots, which must be free, to the system.
    pub(crate) fn release_slot_memory(&self) {
        let Some(file) = &self.slot_bytes.0 else { return };
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let length = (WRITE_SLOTS * SLOT_BYTES) as u64;
        if let Err(error) = rustix::fs::fallocate(file, flags, SLOTS_OFFSET as u64, length) {
            tracing::debug!(%error, "could not release the memory of written data");
        }
    }

    fn write_slot(&self, slot: usize, at: usize, bytes: &[u8]) -> io::Result<()> {
        match &self.slot_bytes.0 {
            Some(file) => file.write_all_at(bytes, SlotBytes::at(slot) + at as u64),
            None => Ok(()),
        }
    }
}

fn record(words: &Words, slot: usize) -> [u64; SLOT_WORDS] {
    std::array::from_fn(|word| words.at(SLOT_RECORDS + slot * SLOT_WORDS + word).load(SeqCst))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_has_the_writes_that_are_not_durable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let first = Journal::open(Some(&path), InodeId(5), false).unwrap();
        let use_slot = |slot, inode, offset, order, bytes: &[u8]| {
            first.fill_slot(slot, bytes).unwrap();
            let record = SlotRecord { inode: InodeId(inode), chunk: 6, offset, order };
            first.use_slot(slot, record, bytes.len());
        };
        use_slot(3, 70, 1 << 40, 9, b"abc");
        first.extend_slot(3, 3, b"de").unwrap();
        use_slot(4, 71, 0, 10, &[1; SLOT_BYTES]);
        use_slot(31, 71, 7, 11, b"x");
        first.fill_slot(5, b"not answered").unwrap();
        first.free_slot(4);
        let second = Journal::open(Some(&path), InodeId(5), false).unwrap();
        let former = second.former_writes().unwrap();
        let fields: Vec<_> =
            former.iter().map(|it| (it.slot, it.inode.0, it.offset, it.order)).collect();
        assert_eq!(fields, [(3, 70, 1 << 40, 9), (31, 71, 7, 11)]);
        assert_eq!((former[0].chunk, &former[0].bytes[..]), (6, &b"abcde"[..]));
        second.free_slot(3);
        second.free_slot(31);
        second.release_slot_memory();
        assert!(second.former_writes().unwrap().is_empty());
        assert!(second.dirty().is_empty() && second.locked_files().is_empty());
    }
}
