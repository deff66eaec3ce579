//! Files with locks, for a daemon that takes over: one word per file.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::SeqCst;

use threefs_core::ids::InodeId;

use super::{APPENDED, Journal, LOCK_SESSION, LOCKED, Words};

/// Maximum number of files of a mount with locks.
pub(crate) const LOCKED_MAX: usize = 4096;
/// Set if the locks were lost: the file has errors until it is closed.
const LOST: u64 = 1 << 63;

/// Indexes of the words of files with locks.
pub(super) struct LockedFiles {
    words: HashMap<InodeId, usize>,
    free: Vec<usize>,
}

impl LockedFiles {
    pub(super) fn open(words: &Words) -> Self {
        let mut files = Self { words: HashMap::new(), free: Vec::new() };
        for index in LOCKED..APPENDED {
            match words.at(index).load(SeqCst) & !LOST {
                0 => files.free.push(index),
                inode => drop(files.words.insert(InodeId(inode), index)),
            }
        }
        files
    }

    /// All files, and whether their locks were lost.
    pub(super) fn all(&self, words: &Words) -> Vec<(InodeId, bool)> {
        let lost = |index: usize| words.at(index).load(SeqCst) & LOST != 0;
        self.words.iter().map(|(inode, index)| (*inode, lost(*index))).collect()
    }

    /// False: the journal is full.
    pub(super) fn add(&mut self, words: &Words, inode: InodeId) -> bool {
        if self.words.contains_key(&inode) {
            return true;
        }
        let Some(index) = self.free.pop() else { return false };
        words.at(index).store(inode.0, SeqCst);
        self.words.insert(inode, index);
        true
    }

    pub(super) fn remove(&mut self, words: &Words, inode: InodeId) {
        if let Some(index) = self.words.remove(&inode) {
            words.at(index).store(0, SeqCst);
            self.free.push(index);
        }
    }

    pub(super) fn lose_all(&self, words: &Words) {
        for (inode, index) in &self.words {
            words.at(*index).store(inode.0 | LOST, SeqCst);
        }
    }
}

impl Journal {
    /// The mount's lock session.
    pub(crate) fn lock_session(&self) -> Option<u64> {
        Some(self.words.at(LOCK_SESSION).load(SeqCst)).filter(|number| *number != 0)
    }

    pub(crate) fn set_lock_session(&self, number: Option<u64>) {
        self.words.at(LOCK_SESSION).store(number.unwrap_or_default(), SeqCst);
    }

    /// Records that a file may have locks, before one is requested. False: the journal is full.
    pub(crate) fn add_locked(&self, inode: InodeId) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.locked.add(&self.words, inode)
    }

    /// The file has no locks any more, and no lost ones.
    pub(crate) fn remove_locked(&self, inode: InodeId) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.locked.remove(&self.words, inode);
    }

    /// All locks were lost.
    pub(crate) fn lose_locked(&self) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.locked.lose_all(&self.words);
    }

    /// Files with locks, and whether these were lost.
    pub(crate) fn locked_files(&self) -> Vec<(InodeId, bool)> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.locked.all(&self.words)
    }
}
