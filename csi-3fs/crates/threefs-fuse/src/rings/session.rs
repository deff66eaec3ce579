//! One session: the memory, rings and files that a caller has registered.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use threefs_core::ids::InodeId;
use threefs_rings::Access;

use super::region::Region;
use super::ring::Ring;

/// Maximum number of registered files of a session.
const FILES_MAX: usize = 1 << 16;

pub(crate) struct Session {
    pub user: u32,
    pub token: [u8; 16],
    state: Mutex<Tables>,
}

#[derive(Default)]
struct Tables {
    entries: HashMap<u32, Entry>,
    files: HashMap<u32, RegisteredFile>,
    next: u32,
    closed: bool,
}

#[derive(Clone)]
pub(crate) enum Entry {
    Memory(Arc<Region>),
    Ring(Arc<Ring>),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct RegisteredFile {
    pub inode: InodeId,
    pub access: Access,
}

impl Session {
    pub(crate) fn new(user: u32) -> Self {
        Self { user, token: rand::random(), state: Mutex::default() }
    }

    /// Adds memory or a ring; returns its number.
    ///
    /// # Errors
    /// `ESTALE`: the session has ended.
    pub(crate) fn add(&self, entry: Entry) -> Result<u32, Errno> {
        let mut state = self.state();
        if state.closed {
            return Err(Errno::STALE);
        }
        let number = state.next_number();
        state.entries.insert(number, entry);
        Ok(number)
    }

    /// Adds a file; returns its number.
    ///
    /// # Errors
    /// `ESTALE`: the session has ended. `EMFILE`: too many files.
    pub(crate) fn add_file(&self, file: RegisteredFile) -> Result<u32, Errno> {
        let mut state = self.state();
        if state.closed {
            return Err(Errno::STALE);
        }
        if state.files.len() >= FILES_MAX {
            return Err(Errno::MFILE);
        }
        let number = state.next_number();
        state.files.insert(number, file);
        Ok(number)
    }

    pub(crate) fn remove(&self, number: u32) -> Option<Entry> {
        let entry = self.state().entries.remove(&number);
        if let Some(Entry::Ring(ring)) = &entry {
            ring.close();
        }
        entry
    }

    pub(crate) fn remove_file(&self, number: u32) -> Option<RegisteredFile> {
        self.state().files.remove(&number)
    }

    pub(crate) fn memory(&self, number: u32) -> Option<Arc<Region>> {
        match self.state().entries.get(&number) {
            Some(Entry::Memory(region)) => Some(Arc::clone(region)),
            _ => None,
        }
    }

    pub(crate) fn ring(&self, number: u32) -> Option<Arc<Ring>> {
        match self.state().entries.get(&number) {
            Some(Entry::Ring(ring)) => Some(Arc::clone(ring)),
            _ => None,
        }
    }

    pub(crate) fn file(&self, number: u32) -> Option<RegisteredFile> {
        self.state().files.get(&number).copied()
    }

    /// Ends the session: no entry is started any more. Returns the number of memory regions and
    /// rings, and the files, whose registration the caller must end.
    pub(crate) fn close(&self) -> (usize, Vec<RegisteredFile>) {
        let mut state = self.state();
        state.closed = true;
        let (entries, files) =
            (std::mem::take(&mut state.entries), std::mem::take(&mut state.files));
        drop(state);
        for entry in entries.values() {
            match entry {
                Entry::Memory(region) => region.unlink(),
                Entry::Ring(ring) => {
                    ring.close();
                    ring.region().unlink();
                }
            }
        }
        (entries.len(), files.into_values().collect())
    }

    fn state(&self) -> MutexGuard<'_, Tables> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tables {
    fn next_number(&mut self) -> u32 {
        loop {
            self.next = self.next.wrapping_add(1);
            let in_use =
                self.entries.contains_key(&self.next) || self.files.contains_key(&self.next);
            if self.next != 0 && !in_use {
                return self.next;
            }
        }
    }
}
