//! Submissions and completions of one ring.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use threefs_rings::{Completion, Layout, RingTerms, SUBMISSION_BYTES, Submission};
use tokio::sync::Semaphore;

use super::region::{Counter, Region};

/// Maximum number of submissions of a ring that this daemon holds: a caller can register the same
/// memory as many rings.
const COPIED_MAX: u32 = 64;

pub(crate) struct Ring {
    region: Region,
    counter: Counter,
    layout: Layout,
    pub terms: RingTerms,
    /// A read fails with ENODATA at a hole.
    pub forbid_holes: bool,
    /// Permits of submissions that are executed at once.
    pub limit: Arc<Semaphore>,
    state: Mutex<State>,
}

struct State {
    /// Submissions that were announced.
    announced: u32,
    /// Submissions that were copied out of the ring.
    taken: u32,
    /// Completions that were written.
    posted: u32,
    queue: VecDeque<Submission>,
    /// A task executes the queue.
    running: bool,
    closed: bool,
}

impl Ring {
    pub(crate) fn new(
        region: Region,
        layout: Layout,
        terms: RingTerms,
        forbid_holes: bool,
        limit: u32,
        start: u32,
    ) -> Result<Self, Errno> {
        let counter = region.counter()?;
        let limit = if limit == 0 { layout.entries() } else { limit.min(layout.entries()) };
        let state = State {
            announced: start,
            taken: start,
            posted: start,
            queue: VecDeque::new(),
            running: false,
            closed: false,
        };
        Ok(Self {
            region,
            counter,
            layout,
            terms,
            forbid_holes,
            limit: Arc::new(Semaphore::new(limit as usize)),
            state: Mutex::new(state),
        })
    }

    /// Announces the submissions up to number `tail`. Returns whether the caller must start a task
    /// that executes them.
    ///
    /// # Errors
    /// `EINVAL`: more submissions than the ring has entries would be in flight. `EFAULT`: the ring's
    /// memory is gone, or the ring is closed.
    pub(crate) fn submit(&self, tail: u32) -> Result<bool, Errno> {
        let mut state = self.state();
        if state.closed {
            return Err(Errno::FAULT);
        }
        let former = state.announced;
        if tail.wrapping_sub(former) > u32::MAX / 2 {
            // An announcement that a later one has overtaken.
            return Ok(false);
        }
        if tail.wrapping_sub(state.posted) > self.layout.entries() {
            return Err(Errno::INVAL);
        }
        state.announced = tail;
        if let Err(error) = self.copy_submissions(&mut state) {
            state.announced = former;
            return Err(error);
        }
        let start = !state.running && !state.queue.is_empty();
        state.running |= start;
        Ok(start)
    }

    /// The next submission to execute; after `None`, the task that executes them must end.
    pub(crate) fn next(&self) -> Option<Submission> {
        let mut state = self.state();
        let next = self.take(&mut state);
        state.running = next.is_some();
        next
    }

    /// As [`Self::next`], but after `None` the task continues.
    pub(crate) fn next_queued(&self) -> Option<Submission> {
        self.take(&mut self.state())
    }

    fn take(&self, state: &mut State) -> Option<Submission> {
        if let Err(error) = self.copy_submissions(state) {
            tracing::debug!(%error, "the memory of a ring is gone");
            state.closed = true;
        }
        if state.closed { None } else { state.queue.pop_front() }
    }

    /// Copies announced submissions into the queue, if it is empty.
    fn copy_submissions(&self, state: &mut State) -> Result<(), Errno> {
        if state.closed || !state.queue.is_empty() {
            return Ok(());
        }
        let new = state.announced.wrapping_sub(state.taken).min(COPIED_MAX);
        let count = self.layout.contiguous(state.taken, new);
        if count == 0 {
            return Ok(());
        }
        let mut buffer = [0; COPIED_MAX as usize * SUBMISSION_BYTES];
        let bytes = &mut buffer[..count as usize * SUBMISSION_BYTES];
        self.region.read_at(self.layout.submission(state.taken) as u64, bytes)?;
        let entries = bytes.as_chunks::<SUBMISSION_BYTES>().0.iter().map(Submission::decode);
        state.queue.extend(entries);
        state.taken = state.taken.wrapping_add(count);
        Ok(())
    }

    /// Writes completions, each a slot and its result, and wakes the caller.
    pub(crate) fn complete(&self, completions: &[(u32, i64)]) {
        if completions.is_empty() {
            return;
        }
        let mut state = self.state();
        let mut written = Ok(());
        for &(slot, result) in completions {
            let at = self.layout.completion(state.posted) as u64;
            state.posted = state.posted.wrapping_add(1);
            let bytes = Completion { slot, result }.encode();
            written = written.and_then(|()| self.region.write_at(at, &bytes));
        }
        // At most as many as the ring has entries.
        let written = written.and_then(|()| self.counter.add(completions.len() as u32));
        if let Err(error) = written {
            tracing::debug!(%error, "the memory of a ring is gone");
            state.closed = true;
        }
    }

    /// Starts no further submission.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.queue = VecDeque::new();
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    use std::path::PathBuf;

    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};
    use threefs_rings::{HEADER_BYTES, MEMORY_FOLDER, RegionTerms, memory_name};

    use super::*;

    /// A caller's memory.
    struct Memory {
        id: [u8; 16],
        path: PathBuf,
        file: File,
    }

    impl Memory {
        fn new(bytes: usize) -> Self {
            let id: [u8; 16] = rand::random();
            let path = PathBuf::from(MEMORY_FOLDER).join(memory_name(&id));
            let mut options = File::options();
            options.read(true).write(true).create_new(true).mode(0o600);
            let file = options.open(&path).unwrap();
            file.write_all_at(&vec![0; bytes], 0).unwrap();
            Self { id, path, file }
        }

        fn open(&self, bytes: u64) -> Result<Region, Errno> {
            let user = rustix::process::getuid().as_raw();
            Region::open(&self.id, true, RegionTerms { bytes, block: 0 }, user)
        }

        fn ring(&self, layout: Layout, start: u32) -> Ring {
            let terms = RingTerms { entries: layout.entries(), for_read: true };
            let region = self.open(layout.bytes() as u64).unwrap();
            Ring::new(region, layout, terms, false, 0, start).unwrap()
        }

        fn counter(&self) -> u32 {
            let mut bytes = [0; 4];
            self.file.read_exact_at(&mut bytes, 0).unwrap();
            u32::from_le_bytes(bytes)
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.path);
        }
    }

    fn submission(slot: u32) -> Submission {
        Submission { slot, length: 1, ..Submission::default() }
    }

    #[test]
    fn submissions_and_completions_wrap_around() {
        let layout = Layout::new(4).unwrap();
        let memory = Memory::new(layout.bytes());
        // The numbers wrap around as well.
        let start = u32::MAX - 4;
        let ring = memory.ring(layout, start);
        for round in 0..5 {
            let base = start.wrapping_add(3 * round);
            for index in 0..3 {
                let number = base.wrapping_add(index);
                let bytes = submission(index).encode();
                memory.file.write_all_at(&bytes, layout.submission(number) as u64).unwrap();
            }
            assert_eq!(ring.submit(base.wrapping_add(3)), Ok(true));
            assert_eq!(ring.submit(base.wrapping_add(3)), Ok(false), "announced twice");
            for index in 0..3 {
                assert_eq!(ring.next(), Some(submission(index)));
                ring.complete(&[(index, i64::from(index) - 7)]);
                let mut bytes = [0; 16];
                let at = layout.completion(base.wrapping_add(index)) as u64;
                memory.file.read_exact_at(&mut bytes, at).unwrap();
                let expected = Completion { slot: index, result: i64::from(index) - 7 };
                assert_eq!(Completion::decode(&bytes), expected);
            }
            assert_eq!(ring.next(), None);
            assert_eq!(memory.counter(), 3 * (round + 1));
        }
    }

    #[test]
    fn a_large_ring_is_copied_in_small_parts() {
        let layout = Layout::new(1024).unwrap();
        let memory = Memory::new(layout.bytes());
        let ring = memory.ring(layout, 0);
        for slot in 0..1024 {
            let at = layout.submission(slot) as u64;
            memory.file.write_all_at(&submission(slot).encode(), at).unwrap();
        }
        assert_eq!(ring.submit(1024), Ok(true));
        for slot in 0..1024 {
            assert!(ring.state().queue.capacity() <= COPIED_MAX as usize);
            assert_eq!(ring.next(), Some(submission(slot)));
        }
        assert_eq!(ring.next(), None);
    }

    #[test]
    fn more_submissions_than_entries_are_refused() {
        let layout = Layout::new(4).unwrap();
        let memory = Memory::new(layout.bytes());
        let ring = memory.ring(layout, 0);
        assert_eq!(ring.submit(5), Err(Errno::INVAL));
        assert_eq!(ring.submit(u32::MAX / 2), Err(Errno::INVAL));
        assert_eq!(ring.submit(4), Ok(true));
        assert_eq!(ring.submit(3), Ok(false), "overtaken");
        assert!(ring.next().is_some());
        assert_eq!(ring.submit(5), Err(Errno::INVAL), "in flight");
        ring.complete(&[(0, 0)]);
        assert_eq!(ring.submit(5), Ok(false), "a task executes the queue");
    }

    /// Memory that its owner truncates, replaces and fills with garbage.
    #[test]
    fn a_hostile_owner_causes_errors_only() {
        let layout = Layout::new(64).unwrap();
        let memory = Memory::new(layout.bytes());
        let ring = memory.ring(layout, 0);
        let mut random = StdRng::seed_from_u64(7);
        let (mut tail, mut queued) = (0u32, 0);
        for _ in 0..20_000 {
            match random.random_range(0..6) {
                0 => {
                    let length = random.random_range(0..2 * layout.bytes() as u64);
                    memory.file.set_len(length).unwrap();
                }
                1 => {
                    let bytes: [u8; 512] = random.random();
                    let at = random.random_range(0..layout.bytes() as u64);
                    memory.file.write_all_at(&bytes, at).unwrap();
                }
                2 => {
                    let wanted = random.random();
                    // Any result is fine; accepted ones are in order.
                    if ring.submit(wanted).is_ok() && wanted.wrapping_sub(tail) <= 64 {
                        (queued, tail) = (queued + wanted.wrapping_sub(tail), wanted);
                    }
                }
                3 => {
                    let next = tail.wrapping_add(random.random_range(0..8));
                    if ring.submit(next).is_ok() && next != tail {
                        (queued, tail) = (queued + next.wrapping_sub(tail), next);
                    }
                }
                _ => {
                    if let Some(entry) = ring.next() {
                        queued -= 1;
                        ring.complete(&[(entry.slot, random.random())]);
                    }
                }
            }
            assert!(queued <= 64, "{queued}");
        }
    }

    #[test]
    fn memory_is_checked_when_it_is_opened() {
        let memory = Memory::new(2 * HEADER_BYTES);
        let bytes = 2 * HEADER_BYTES as u64;
        assert!(memory.open(bytes).is_ok());
        assert_eq!(memory.open(bytes + 1).err(), Some(Errno::INVAL));
        assert_eq!(memory.open(0).err(), Some(Errno::INVAL));
        let terms = RegionTerms { bytes, block: 0 };
        let other = rustix::process::getuid().as_raw() + 1;
        let opened = Region::open(&memory.id, false, terms, other);
        assert_eq!(opened.err(), Some(Errno::PERM));
        // Not populated.
        memory.file.set_len(0).unwrap();
        memory.file.set_len(bytes).unwrap();
        assert_eq!(memory.open(bytes).err(), Some(Errno::INVAL));
        // A link to another file.
        std::fs::remove_file(&memory.path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &memory.path).unwrap();
        assert_eq!(memory.open(1).err(), Some(Errno::LOOP));
        std::fs::remove_file(&memory.path).unwrap();
        assert_eq!(memory.open(bytes).err(), Some(Errno::NOENT));
    }

    #[test]
    fn a_closed_ring_starts_nothing() {
        let layout = Layout::new(4).unwrap();
        let memory = Memory::new(layout.bytes());
        let ring = memory.ring(layout, 0);
        assert_eq!(ring.submit(2), Ok(true));
        ring.close();
        assert_eq!(ring.next(), None);
        assert_eq!(ring.submit(3), Err(Errno::FAULT));
        ring.region().unlink();
        assert!(!memory.path.exists());
    }
}
