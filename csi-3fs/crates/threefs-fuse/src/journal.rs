//! Mount journal: the state that a daemon leaves to its successor, namely the identity of the
//! mount, changes in flight, writes that are answered and not durable, and files whose length or chunks
//! are not reported yet. It is a file on tmpfs, so it survives any exit of the process. It need not survive a reboot, because the
//! mount does not either.
//!
//! A change that the kernel resends after a crash must be made only once. So before a change is
//! sent, the number of its FUSE request is written here together with its sequence number for the
//! metadata service. The successor sends it with the same sequence number, and
//! the service returns the stored reply if the change was made.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags};
use threefs_core::ids::{ClientId, InodeId};
use threefs_meta::{RequestId, Written};

mod appends;
mod locks;
mod ranges;
mod reads;
mod slots;

pub(crate) use appends::APPENDED_MAX;
use appends::{APPEND_WORDS, AppendedFiles};
pub(crate) use locks::LOCKED_MAX;
use locks::LockedFiles;
use ranges::{RECORD_WORDS, Ranges};
pub use reads::READS_OFFSET;
pub(crate) use slots::{FormerWrite, SLOT_BYTES, SlotRecord, WRITE_SLOTS};
use slots::{SLOT_WORDS, SlotBytes};

const MAGIC: u64 = u64::from_le_bytes(*b"3FSMNT\x01\0");
/// Maximum number of changes in flight.
pub(crate) const SLOTS: usize = 1024;
/// Words before the slots of changes in flight.
const HEADER_WORDS: usize = 8;
/// Maximum number of files with an unreported length; beyond it, writes report the length before
/// they return.
const DIRTY_MAX: usize = 4096;
const DIRTY: usize = HEADER_WORDS + 2 * SLOTS;
/// Maximum number of unreported ranges of chunks, over all files; beyond it, writes report them
/// before they return.
const RECORDS: usize = 8192;
const RANGES: usize = DIRTY + DIRTY_MAX;
/// Files of earlier daemons end here, or with the files that have locks.
const LOCKED: usize = RANGES + RECORDS * RECORD_WORDS;
const APPENDED: usize = LOCKED + LOCKED_MAX;
/// Files of daemons that did not count reads end here, or earlier.
const READS: usize = APPENDED + APPENDED_MAX * APPEND_WORDS;
/// Files of daemons whose writes were durable when they were answered end here, or earlier.
const SLOT_RECORDS: usize = READS + reads::DISTANCES;
const WORDS: usize = SLOT_RECORDS + WRITE_SLOTS * SLOT_WORDS;
/// Offset of the bytes of the slots, after the words, at the start of a page.
const SLOTS_OFFSET: usize = (WORDS * size_of::<u64>()).next_multiple_of(4096);
/// A predecessor's change that the kernel has not resent within this time was answered.
const FORMER_RETENTION: Duration = Duration::from_secs(120);

/// Word indexes of the header.
const CLIENT_LOW: usize = 1;
const CLIENT_HIGH: usize = 2;
const NEXT: usize = 3;
const ROOT: usize = 4;
const GENERATION: usize = 5;
/// Number of the mount's lock session; 0: none.
const LOCK_SESSION: usize = 6;

pub(crate) struct Journal {
    words: Words,
    slot_bytes: SlotBytes,
    client: ClientId,
    generation: u64,
    state: Mutex<State>,
}

struct State {
    free: Vec<usize>,
    in_flight: BTreeSet<u64>,
    /// Changes of previous daemons: request to (slot, sequence).
    former: HashMap<u64, (usize, u64)>,
    opened_at: Instant,
    /// Files with an unreported length, and the index of their word.
    dirty: HashMap<InodeId, usize>,
    free_dirty: Vec<usize>,
    ranges: Ranges,
    locked: LockedFiles,
    appended: AppendedFiles,
}

enum Words {
    Mapped(*const AtomicU64),
    Owned(Box<[AtomicU64]>),
}

// SAFETY: the mapping is shared memory of atomics that lives as long as the process.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    fn at(&self, index: usize) -> &AtomicU64 {
        match self {
            Self::Owned(words) => &words[index],
            // SAFETY: indexes are below WORDS, for which the file has room; it is never unmapped.
            Self::Mapped(words) => unsafe { &*words.add(index.min(WORDS - 1)) },
        }
    }
}

/// A change in flight; dropping it ends it.
pub(crate) struct Ticket<'a> {
    journal: &'a Journal,
    slot: Option<usize>,
    sequence: u64,
}

impl Journal {
    /// Opens or creates the journal of a mount; `fresh` if no daemon has served the mount before.
    /// Without a path the journal is lost with this process.
    ///
    /// # Errors
    /// The file cannot be used, or it belongs to another root.
    pub(crate) fn open(path: Option<&Path>, root: InodeId, fresh: bool) -> io::Result<Self> {
        let (words, slot_bytes) = match path {
            None => {
                let words = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
                (Words::Owned(words), SlotBytes::new(None))
            }
            Some(path) => {
                let (words, file) = map(path, fresh)?;
                (Words::Mapped(words), SlotBytes::new(Some(file)))
            }
        };
        if words.at(0).load(SeqCst) != MAGIC {
            let client: u128 = rand::random();
            words.at(CLIENT_LOW).store(client as u64, SeqCst);
            words.at(CLIENT_HIGH).store((client >> 64) as u64, SeqCst);
            words.at(NEXT).store(1, SeqCst);
            words.at(ROOT).store(root.0, SeqCst);
            words.at(0).store(MAGIC, SeqCst);
        }
        let recorded = words.at(ROOT).load(SeqCst);
        if recorded != root.0 {
            return Err(io::Error::other(format!(
                "the state file belongs to a mount of inode {recorded}, this mount is of inode {}; use a \
                 separate state file for each mount",
                root.0
            )));
        }
        let generation = words.at(GENERATION).fetch_add(1, SeqCst) + 1;
        let client = u128::from(words.at(CLIENT_HIGH).load(SeqCst)) << 64
            | u128::from(words.at(CLIENT_LOW).load(SeqCst));
        let mut state = State {
            free: Vec::with_capacity(SLOTS),
            in_flight: BTreeSet::new(),
            former: HashMap::new(),
            opened_at: Instant::now(),
            dirty: HashMap::new(),
            free_dirty: Vec::with_capacity(DIRTY_MAX),
            ranges: Ranges::open(&words),
            locked: LockedFiles::open(&words),
            appended: AppendedFiles::open(&words),
        };
        for index in DIRTY..RANGES {
            match words.at(index).load(SeqCst) {
                0 => state.free_dirty.push(index),
                inode => drop(state.dirty.insert(InodeId(inode), index)),
            }
        }
        for slot in 0..SLOTS {
            let index = HEADER_WORDS + 2 * slot;
            let (unique, sequence) =
                (words.at(index).load(SeqCst), words.at(index + 1).load(SeqCst));
            if unique == 0 {
                state.free.push(slot);
            } else {
                state.former.insert(unique, (slot, sequence));
                state.in_flight.insert(sequence);
            }
        }
        let client = ClientId(client);
        Ok(Self { words, slot_bytes, client, generation, state: Mutex::new(state) })
    }

    /// Identity of the mount, the same for all its daemons.
    pub(crate) fn client(&self) -> ClientId {
        self.client
    }

    /// Number of this daemon among those of the mount, from 1.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Records that the length of a file is not reported yet, before the write that changed it is
    /// answered. False: the journal is full, and the length must be reported now.
    pub(crate) fn mark_dirty(&self, inode: InodeId) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.dirty.contains_key(&inode) {
            return true;
        }
        let Some(index) = state.free_dirty.pop() else { return false };
        state.dirty.insert(inode, index);
        self.words.at(index).store(inode.0, SeqCst);
        true
    }

    /// Whether the length of a file may be unreported.
    pub(crate) fn is_dirty(&self, inode: InodeId) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.dirty.contains_key(&inode)
    }

    /// Records chunks written under a truncate version, before the write is answered. False: the
    /// journal is full, and they must be reported now.
    pub(crate) fn add_written(
        &self,
        inode: InodeId,
        truncate_version: u64,
        written: &Written,
    ) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let ranges = &mut state.ranges;
        written.iter().all(|range| ranges.add(&self.words, inode, truncate_version, range))
    }

    /// Chunks written under this truncate version and not reported yet.
    pub(crate) fn written(&self, inode: InodeId, truncate_version: u64) -> Written {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ranges.of(&self.words, inode, truncate_version)
    }

    /// Removes chunks that were reported.
    pub(crate) fn remove_written(&self, inode: InodeId, truncate_version: u64, written: &Written) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ranges.remove(&self.words, inode, truncate_version, written);
    }

    /// The length of the file and all its chunks were reported.
    pub(crate) fn mark_clean(&self, inode: InodeId) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = state.dirty.remove(&inode) {
            self.words.at(index).store(0, SeqCst);
            state.free_dirty.push(index);
        }
        state.ranges.clear(&self.words, inode);
    }

    /// Files with an unreported length.
    pub(crate) fn dirty(&self) -> Vec<InodeId> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.dirty.keys().copied().collect()
    }

    /// Records a change for a request (its number without [`crate::wire::RESENT`]; 0: none).
    /// `None`: too many changes are in flight.
    pub(crate) fn start(&self, unique: u64, resent: bool) -> Option<Ticket<'_>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let (true, Some((slot, sequence))) = (resent, state.former.remove(&unique)) {
            return Some(Ticket { journal: self, slot: Some(slot), sequence });
        }
        if resent && unique != 0 {
            tracing::debug!(unique, "the kernel resent a change that was never started");
        }
        if state.opened_at.elapsed() > FORMER_RETENTION && !state.former.is_empty() {
            for (_, (slot, sequence)) in std::mem::take(&mut state.former) {
                self.words.at(HEADER_WORDS + 2 * slot).store(0, SeqCst);
                state.in_flight.remove(&sequence);
                state.free.push(slot);
            }
        }
        let sequence = self.words.at(NEXT).fetch_add(1, SeqCst);
        let slot = if unique == 0 { None } else { Some(state.free.pop()?) };
        state.in_flight.insert(sequence);
        if let Some(slot) = slot {
            let index = HEADER_WORDS + 2 * slot;
            self.words.at(index + 1).store(sequence, SeqCst);
            // Stored last: it makes the slot valid.
            self.words.at(index).store(unique, SeqCst);
        }
        Some(Ticket { journal: self, slot, sequence })
    }
}

impl Ticket<'_> {
    /// Identity of the change at the metadata service.
    pub(crate) fn id(&self) -> RequestId {
        let state = self.journal.state.lock().unwrap_or_else(PoisonError::into_inner);
        let finished_below = state.in_flight.first().copied().unwrap_or(self.sequence);
        RequestId { client: self.journal.client, sequence: self.sequence, finished_below }
    }
}

impl Drop for Ticket<'_> {
    /// The request is answered.
    fn drop(&mut self) {
        let mut state = self.journal.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.in_flight.remove(&self.sequence);
        if let Some(slot) = self.slot {
            self.journal.words.at(HEADER_WORDS + 2 * slot).store(0, SeqCst);
            state.free.push(slot);
        }
    }
}

fn map(path: &Path, fresh: bool) -> io::Result<(*const AtomicU64, File)> {
    let file = File::options().read(true).write(true).create(true).truncate(fresh).open(path)?;
    let length = WORDS * size_of::<u64>();
    file.set_len((SLOTS_OFFSET + WRITE_SLOTS * SLOT_BYTES) as u64)?;
    // SAFETY: a new mapping of a file of this length, at an address that the kernel chooses; never
    // unmapped.
    let memory = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            length,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            &file,
            0,
        )
    }?;
    Ok((memory.cast_const().cast(), file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_knows_the_changes_in_flight_and_their_sequence_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let first = Journal::open(Some(&path), InodeId(5), false).unwrap();
        let finished = first.start(2, false).unwrap();
        drop(finished);
        assert!(first.mark_dirty(InodeId(70)) && first.mark_dirty(InodeId(71)));
        first.mark_clean(InodeId(70));
        let in_flight = first.start(4, false).unwrap();
        let id = in_flight.id();
        std::mem::forget(in_flight); // As a crash does.
        let second = Journal::open(Some(&path), InodeId(5), false).unwrap();
        assert_eq!((first.generation(), second.generation()), (1, 2));
        assert_eq!(second.dirty(), [InodeId(71)]);
        let fresh = second.start(6, false).unwrap();
        assert_eq!(fresh.id().client, id.client);
        assert!(fresh.id().sequence > id.sequence);
        assert_eq!(fresh.id().finished_below, id.sequence, "its reply is still needed");
        drop(fresh);
        let again = second.start(4, true).unwrap();
        assert_eq!(again.id().sequence, id.sequence);
        drop(again);
        let next = second.start(8, false).unwrap();
        assert_eq!(next.id().finished_below, next.id().sequence);
        let other = Journal::open(Some(&path), InodeId(7), true).unwrap();
        assert_ne!(other.client(), second.client(), "another mount is another client");
    }

    fn chunks(ranges: &[(u32, u32)]) -> Written {
        let mut written = Written::default();
        ranges.iter().for_each(|(first, last)| written.add(*first, *last));
        written
    }

    #[test]
    fn a_successor_knows_which_written_chunks_are_unreported() {
        const FILE: InodeId = InodeId(70);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let first = Journal::open(Some(&path), InodeId(5), true).unwrap();
        assert!(first.add_written(FILE, 1, &chunks(&[(3, 3)])));
        for index in [7, 9, 8, 30] {
            assert!(first.add_written(FILE, 2, &chunks(&[(index, index)])));
        }
        assert!(first.add_written(InodeId(71), 2, &chunks(&[(1, 1)])));
        first.remove_written(FILE, 2, &chunks(&[(30, 30), (7, 7)]));
        first.mark_clean(InodeId(71));
        let second = Journal::open(Some(&path), InodeId(5), false).unwrap();
        assert_eq!(second.written(FILE, 2), chunks(&[(7, 9)]));
        assert!(second.written(FILE, 1).is_empty(), "a truncation came after it");
        assert!(second.written(InodeId(71), 2).is_empty());
        second.remove_written(FILE, 2, &chunks(&[(0, 40)]));
        assert!(second.written(FILE, 2).is_empty());
    }

    #[test]
    fn a_full_journal_refuses_chunks_and_accepts_them_once_others_are_reported() {
        let journal = Journal::open(None, InodeId(1), true).unwrap();
        let separate = |number: usize| chunks(&[(2 * number as u32, 2 * number as u32)]);
        assert!((0..RECORDS).all(|number| journal.add_written(InodeId(7), 0, &separate(number))));
        assert!(!journal.add_written(InodeId(8), 0, &separate(0)));
        assert!(journal.add_written(InodeId(7), 0, &separate(3)), "it is recorded already");
        journal.mark_clean(InodeId(7));
        assert!((0..RECORDS).all(|number| journal.add_written(InodeId(8), 0, &separate(number))));
    }

    #[test]
    fn a_state_of_another_mount_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        Journal::open(Some(&path), InodeId(5), false).unwrap();
        let error = Journal::open(Some(&path), InodeId(6), false).err().unwrap().to_string();
        assert!(error.contains("mount of inode 5"), "{error}");
    }

    #[test]
    fn changes_in_flight_are_bounded() {
        let journal = Journal::open(None, InodeId(1), true).unwrap();
        let all: Vec<_> = (1..=SLOTS as u64).map(|unique| journal.start(unique, false)).collect();
        assert!(all.iter().all(Option::is_some));
        assert!(journal.start(5000, false).is_none());
        drop(all);
        assert!(journal.start(5000, false).is_some());
    }
}
