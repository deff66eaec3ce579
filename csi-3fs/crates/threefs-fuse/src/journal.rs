//! What a daemon leaves to the one that replaces it: who the mount is, and which changes are under
//! way. A small file in memory, so that it survives the process, however that ends; nothing of it
//! matters over a restart of the machine, because the mount does not survive that either.
//!
//! A change that the kernel sends again after a crash must be made once. So before a change goes
//! out, the number of its request is written here beside the number under which the metadata
//! service knows it, and the successor asks with the same number: the service has the answer if the
//! change was made.

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

mod ranges;

use ranges::{RECORD_WORDS, Ranges};

const MAGIC: u64 = u64::from_le_bytes(*b"3FSMNT\x01\0");
/// Changes under way at most.
pub(crate) const SLOTS: usize = 1024;
/// Words before the slots.
const HEADER_WORDS: usize = 8;
/// Files whose length the metadata service does not know at most; further writes tell it at once.
const UNTOLD_MAX: usize = 4096;
const UNTOLD: usize = HEADER_WORDS + 2 * SLOTS;
/// Ranges of chunks that the metadata service was not told of, of all files; further writes tell it
/// at once.
const RECORDS: usize = 8192;
const RANGES: usize = UNTOLD + UNTOLD_MAX;
const WORDS: usize = RANGES + RECORDS * RECORD_WORDS;
/// What a former daemon had under way and the kernel has not sent again by then had its answer.
const FORMER_KEPT: Duration = Duration::from_secs(120);

/// Places of the header.
const CLIENT_LOW: usize = 1;
const CLIENT_HIGH: usize = 2;
const NEXT: usize = 3;
const ROOT: usize = 4;
const LIVES: usize = 5;

pub(crate) struct Journal {
    words: Words,
    client: ClientId,
    life: u64,
    state: Mutex<State>,
}

struct State {
    free: Vec<usize>,
    under_way: BTreeSet<u64>,
    /// Request to (slot, sequence), of former daemons.
    former: HashMap<u64, (usize, u64)>,
    opened: Instant,
    /// Files whose length was not told, with their places.
    untold: HashMap<InodeId, usize>,
    untold_free: Vec<usize>,
    ranges: Ranges,
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
    fn at(&self, place: usize) -> &AtomicU64 {
        match self {
            Self::Owned(words) => &words[place],
            // SAFETY: places are below WORDS, for which the file has room; it is never unmapped.
            Self::Mapped(words) => unsafe { &*words.add(place.min(WORDS - 1)) },
        }
    }
}

/// One change on its way; not under way any more once dropped.
pub(crate) struct Ticket<'a> {
    journal: &'a Journal,
    slot: Option<usize>,
    sequence: u64,
}

impl Journal {
    /// Opens the journal of a mount, or makes it; `fresh` if nobody has served the mount before.
    /// Without a path it ends with this process.
    ///
    /// # Errors
    /// The file cannot be used, or belongs to another root.
    pub(crate) fn open(path: Option<&Path>, root: InodeId, fresh: bool) -> io::Result<Self> {
        let words = match path {
            None => Words::Owned((0..WORDS).map(|_| AtomicU64::new(0)).collect()),
            Some(path) => Words::Mapped(map(path, fresh)?),
        };
        if words.at(0).load(SeqCst) != MAGIC {
            let client: u128 = rand::random();
            words.at(CLIENT_LOW).store(client as u64, SeqCst);
            words.at(CLIENT_HIGH).store((client >> 64) as u64, SeqCst);
            words.at(NEXT).store(1, SeqCst);
            words.at(ROOT).store(root.0, SeqCst);
            words.at(0).store(MAGIC, SeqCst);
        }
        let known = words.at(ROOT).load(SeqCst);
        if known != root.0 {
            return Err(io::Error::other(format!(
                "the state is of a mount of inode {known}, this is one of {}; give each mount a \
                 state file of its own",
                root.0
            )));
        }
        let life = words.at(LIVES).fetch_add(1, SeqCst) + 1;
        let client = u128::from(words.at(CLIENT_HIGH).load(SeqCst)) << 64
            | u128::from(words.at(CLIENT_LOW).load(SeqCst));
        let mut state = State {
            free: Vec::with_capacity(SLOTS),
            under_way: BTreeSet::new(),
            former: HashMap::new(),
            opened: Instant::now(),
            untold: HashMap::new(),
            untold_free: Vec::with_capacity(UNTOLD_MAX),
            ranges: Ranges::open(&words),
        };
        for place in UNTOLD..RANGES {
            match words.at(place).load(SeqCst) {
                0 => state.untold_free.push(place),
                inode => drop(state.untold.insert(InodeId(inode), place)),
            }
        }
        for slot in 0..SLOTS {
            let place = HEADER_WORDS + 2 * slot;
            let (unique, sequence) =
                (words.at(place).load(SeqCst), words.at(place + 1).load(SeqCst));
            if unique == 0 {
                state.free.push(slot);
            } else {
                state.former.insert(unique, (slot, sequence));
                state.under_way.insert(sequence);
            }
        }
        Ok(Self { words, client: ClientId(client), life, state: Mutex::new(state) })
    }

    /// The mount, over all its daemons.
    pub(crate) fn client(&self) -> ClientId {
        self.client
    }

    /// Which of the mount's daemons this is, from 1.
    pub(crate) fn life(&self) -> u64 {
        self.life
    }

    /// Notes that a file has a length that the metadata service does not know; before the write that
    /// made it so is answered. False: there is no room, it must be told at once.
    pub(crate) fn untold(&self, inode: InodeId) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.untold.contains_key(&inode) {
            return true;
        }
        let Some(place) = state.untold_free.pop() else { return false };
        state.untold.insert(inode, place);
        self.words.at(place).store(inode.0, SeqCst);
        true
    }

    /// Whether a file has a length that the metadata service may not know.
    pub(crate) fn is_untold(&self, inode: InodeId) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.untold.contains_key(&inode)
    }

    /// Notes chunks that were written under a truncate version; before the write is answered. False:
    /// there is no room, they must be told at once.
    pub(crate) fn note(&self, inode: InodeId, truncate_version: u64, written: &Written) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let ranges = &mut state.ranges;
        written.iter().all(|range| ranges.note(&self.words, inode, truncate_version, range))
    }

    /// Chunks that were written under this truncate version and not told.
    pub(crate) fn noted(&self, inode: InodeId, truncate_version: u64) -> Written {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ranges.of(&self.words, inode, truncate_version)
    }

    /// These chunks were told.
    pub(crate) fn reported(&self, inode: InodeId, truncate_version: u64, written: &Written) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ranges.reported(&self.words, inode, truncate_version, written);
    }

    /// It was told, and all its chunks.
    pub(crate) fn told(&self, inode: InodeId) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = state.untold.remove(&inode) {
            self.words.at(place).store(0, SeqCst);
            state.untold_free.push(place);
        }
        state.ranges.clear(&self.words, inode);
    }

    /// Files whose length was not told.
    pub(crate) fn all_untold(&self) -> Vec<InodeId> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.untold.keys().copied().collect()
    }

    /// Notes a change for a request (its number without [`crate::wire::RESENT`]; 0: for none).
    /// `None`: too many are under way.
    pub(crate) fn begin(&self, unique: u64, resent: bool) -> Option<Ticket<'_>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let (true, Some((slot, sequence))) = (resent, state.former.remove(&unique)) {
            return Some(Ticket { journal: self, slot: Some(slot), sequence });
        }
        if resent && unique != 0 {
            tracing::debug!(unique, "a change that is sent again and was never begun");
        }
        if state.opened.elapsed() > FORMER_KEPT && !state.former.is_empty() {
            for (_, (slot, sequence)) in std::mem::take(&mut state.former) {
                self.words.at(HEADER_WORDS + 2 * slot).store(0, SeqCst);
                state.under_way.remove(&sequence);
                state.free.push(slot);
            }
        }
        let sequence = self.words.at(NEXT).fetch_add(1, SeqCst);
        let slot = if unique == 0 { None } else { Some(state.free.pop()?) };
        state.under_way.insert(sequence);
        if let Some(slot) = slot {
            let place = HEADER_WORDS + 2 * slot;
            self.words.at(place + 1).store(sequence, SeqCst);
            // Last: with it the slot counts.
            self.words.at(place).store(unique, SeqCst);
        }
        Some(Ticket { journal: self, slot, sequence })
    }
}

impl Ticket<'_> {
    /// How the metadata service knows the change.
    pub(crate) fn id(&self) -> RequestId {
        let state = self.journal.state.lock().unwrap_or_else(PoisonError::into_inner);
        let finished_below = state.under_way.first().copied().unwrap_or(self.sequence);
        RequestId { client: self.journal.client, sequence: self.sequence, finished_below }
    }
}

impl Drop for Ticket<'_> {
    /// The request has its answer.
    fn drop(&mut self) {
        let mut state = self.journal.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.under_way.remove(&self.sequence);
        if let Some(slot) = self.slot {
            self.journal.words.at(HEADER_WORDS + 2 * slot).store(0, SeqCst);
            state.free.push(slot);
        }
    }
}

fn map(path: &Path, fresh: bool) -> io::Result<*const AtomicU64> {
    let file = File::options().read(true).write(true).create(true).truncate(fresh).open(path)?;
    let length = WORDS * size_of::<u64>();
    file.set_len(length as u64)?;
    // SAFETY: a new mapping of a file of this length, wherever the system likes; never unmapped.
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
    Ok(memory.cast_const().cast())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_knows_what_was_under_way_and_under_which_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let first = Journal::open(Some(&path), InodeId(5), false).unwrap();
        let done = first.begin(2, false).unwrap();
        drop(done);
        assert!(first.untold(InodeId(70)) && first.untold(InodeId(71)));
        first.told(InodeId(70));
        let under_way = first.begin(4, false).unwrap();
        let id = under_way.id();
        std::mem::forget(under_way); // As a crash does.
        let second = Journal::open(Some(&path), InodeId(5), false).unwrap();
        assert_eq!((first.life(), second.life()), (1, 2));
        assert_eq!(second.all_untold(), [InodeId(71)]);
        let fresh = second.begin(6, false).unwrap();
        assert_eq!(fresh.id().client, id.client);
        assert!(fresh.id().sequence > id.sequence);
        assert_eq!(fresh.id().finished_below, id.sequence, "its answer is still wanted");
        drop(fresh);
        let again = second.begin(4, true).unwrap();
        assert_eq!(again.id().sequence, id.sequence);
        drop(again);
        let next = second.begin(8, false).unwrap();
        assert_eq!(next.id().finished_below, next.id().sequence);
        let other = Journal::open(Some(&path), InodeId(7), true).unwrap();
        assert_ne!(other.client(), second.client(), "another mount, another client");
    }

    fn chunks(ranges: &[(u32, u32)]) -> Written {
        let mut written = Written::default();
        ranges.iter().for_each(|(first, last)| written.add(*first, *last));
        written
    }

    #[test]
    fn a_successor_knows_which_chunks_were_written_and_not_told() {
        const FILE: InodeId = InodeId(70);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let first = Journal::open(Some(&path), InodeId(5), true).unwrap();
        assert!(first.note(FILE, 1, &chunks(&[(3, 3)])));
        for index in [7, 9, 8, 30] {
            assert!(first.note(FILE, 2, &chunks(&[(index, index)])));
        }
        assert!(first.note(InodeId(71), 2, &chunks(&[(1, 1)])));
        first.reported(FILE, 2, &chunks(&[(30, 30), (7, 7)]));
        first.told(InodeId(71));
        let second = Journal::open(Some(&path), InodeId(5), false).unwrap();
        assert_eq!(second.noted(FILE, 2), chunks(&[(7, 9)]));
        assert!(second.noted(FILE, 1).is_empty(), "a truncation came after it");
        assert!(second.noted(InodeId(71), 2).is_empty());
        second.reported(FILE, 2, &chunks(&[(0, 40)]));
        assert!(second.noted(FILE, 2).is_empty());
    }

    #[test]
    fn a_journal_without_room_for_chunks_says_so_and_has_room_once_they_are_told() {
        let journal = Journal::open(None, InodeId(1), true).unwrap();
        let apart = |number: usize| chunks(&[(2 * number as u32, 2 * number as u32)]);
        assert!((0..RECORDS).all(|number| journal.note(InodeId(7), 0, &apart(number))));
        assert!(!journal.note(InodeId(8), 0, &apart(0)));
        assert!(journal.note(InodeId(7), 0, &apart(3)), "it is known already");
        journal.told(InodeId(7));
        assert!((0..RECORDS).all(|number| journal.note(InodeId(8), 0, &apart(number))));
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
    fn what_is_under_way_is_bounded() {
        let journal = Journal::open(None, InodeId(1), true).unwrap();
        let all: Vec<_> = (1..=SLOTS as u64).map(|unique| journal.begin(unique, false)).collect();
        assert!(all.iter().all(Option::is_some));
        assert!(journal.begin(5000, false).is_none());
        drop(all);
        assert!(journal.begin(5000, false).is_some());
    }
}
