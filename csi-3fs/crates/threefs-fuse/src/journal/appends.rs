//! Append leases and the place of the last append of each file, for a daemon that takes over: the
//! kernel resends an append whose daemon died, and its bytes must be written to the same place.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::SeqCst;

use threefs_core::ids::InodeId;

use super::{APPENDED, Journal, READS, Words};

/// Maximum number of files of a mount with append leases.
pub(crate) const APPENDED_MAX: usize = 1024;
/// A file, the number of its last append request, and the offset of that append.
pub(super) const APPEND_WORDS: usize = 3;

/// Indexes of the records of files with append leases.
pub(super) struct AppendedFiles {
    records: HashMap<InodeId, usize>,
    free: Vec<usize>,
}

impl AppendedFiles {
    pub(super) fn open(words: &Words) -> Self {
        let mut files = Self { records: HashMap::new(), free: Vec::new() };
        for index in (APPENDED..READS).step_by(APPEND_WORDS) {
            match words.at(index).load(SeqCst) {
                0 => files.free.push(index),
                inode => drop(files.records.insert(InodeId(inode), index)),
            }
        }
        files
    }
}

impl Journal {
    /// Records that the mount may hold the append lease of a file, before it is requested. False: the
    /// journal is full.
    pub(crate) fn add_appended(&self, inode: InodeId) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.appended.records.contains_key(&inode) {
            return true;
        }
        let Some(index) = state.appended.free.pop() else { return false };
        self.words.at(index + 1).store(0, SeqCst);
        // Stored last: it makes the record valid.
        self.words.at(index).store(inode.0, SeqCst);
        state.appended.records.insert(inode, index);
        true
    }

    /// The mount does not hold the lease any more.
    pub(crate) fn remove_appended(&self, inode: InodeId) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = state.appended.records.remove(&inode) {
            self.words.at(index).store(0, SeqCst);
            state.appended.free.push(index);
        }
    }

    /// Records where the bytes of an append request are written, before they are.
    pub(crate) fn place(&self, inode: InodeId, unique: u64, offset: u64) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = state.appended.records.get(&inode) {
            self.words.at(index + 1).store(0, SeqCst);
            self.words.at(index + 2).store(offset, SeqCst);
            self.words.at(index + 1).store(unique, SeqCst);
        }
    }

    /// Where a previous daemon may have written the bytes of an append request.
    pub(crate) fn placed(&self, inode: InodeId, unique: u64) -> Option<u64> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let index = state.appended.records.get(&inode)?;
        let same = self.words.at(index + 1).load(SeqCst) == unique;
        same.then(|| self.words.at(index + 2).load(SeqCst))
    }

    /// Files whose append leases the mount may hold.
    pub(crate) fn appended_files(&self) -> Vec<InodeId> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.appended.records.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_knows_the_leases_and_where_the_last_append_was_placed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let first = Journal::open(Some(&path), InodeId(5), true).unwrap();
        assert!(first.add_appended(InodeId(70)) && first.add_appended(InodeId(71)));
        first.place(InodeId(70), 8, 100);
        first.place(InodeId(70), 10, 200);
        first.place(InodeId(72), 12, 300);
        first.remove_appended(InodeId(71));
        let second = Journal::open(Some(&path), InodeId(5), false).unwrap();
        assert_eq!(second.appended_files(), [InodeId(70)]);
        assert_eq!(second.placed(InodeId(70), 10), Some(200));
        assert_eq!(second.placed(InodeId(70), 8), None, "it was answered");
        assert_eq!(second.placed(InodeId(72), 12), None, "no lease");
        second.remove_appended(InodeId(70));
        assert!(second.add_appended(InodeId(70)));
        assert_eq!(second.placed(InodeId(70), 10), None, "of an earlier lease");
    }

    #[test]
    fn the_leases_of_a_mount_are_bounded() {
        let journal = Journal::open(None, InodeId(1), true).unwrap();
        let max = APPENDED_MAX as u64;
        assert!((1..=max).all(|inode| journal.add_appended(InodeId(inode))));
        assert!(!journal.add_appended(InodeId(max + 1)));
        assert!(journal.add_appended(InodeId(max)), "it is recorded already");
        journal.remove_appended(InodeId(3));
        assert!(journal.add_appended(InodeId(max + 1)));
    }
}
