//! One ring: preparing, submitting and awaiting I/O.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering::Acquire};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::thread::futex;
use threefs_rings::control::{FOR_READ, FORBID_HOLES, Register};
use threefs_rings::{COMPLETION_BYTES, Completion, Layout, Submission};

use crate::control;
use crate::files::File;
use crate::memory::Memory;
use crate::recovery::with_live;
use crate::session::{Live, Session};

/// How long a waiting caller sees no completion before it asks the daemon whether it still knows
/// the ring.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// Properties of a ring.
#[derive(Clone, Copy, Debug)]
pub struct RingOptions {
    /// Maximum number of prepared and submitted I/Os.
    pub entries: u32,
    /// The ring is for reads; otherwise for writes.
    pub for_read: bool,
    /// Above 0: I/Os are submitted in groups of this size only. Below 0: at most this number is
    /// executed at once. 0: no limit.
    pub depth: i32,
    /// A read of a hole fails with ENODATA instead of returning zeros.
    pub forbid_holes: bool,
    /// Preferred NUMA node of the ring's memory, or negative.
    pub numa: i32,
}

/// `HF3FS_IOR_ALLOW_READ_UNCOMMITTED`: a permission that this implementation does not use.
const ALLOW_READ_UNCOMMITTED: u64 = 1;
/// `HF3FS_IOR_FORBID_READ_HOLES`.
const FORBID_READ_HOLES: u64 = 2;

impl RingOptions {
    /// Options with the flags of `hf3fs_iorcreate4`.
    ///
    /// # Errors
    /// `EINVAL`: unknown flags.
    pub fn with_flags(
        entries: u32,
        for_read: bool,
        depth: i32,
        numa: i32,
        flags: u64,
    ) -> Result<Self, Errno> {
        if flags & !(ALLOW_READ_UNCOMMITTED | FORBID_READ_HOLES) != 0 {
            return Err(Errno::INVAL);
        }
        let forbid_holes = flags & FORBID_READ_HOLES != 0;
        Ok(Self { entries, for_read, depth, forbid_holes, numa })
    }
}

/// Bytes of a ring; 0 if a ring cannot have this number of entries.
pub fn ring_bytes(entries: u32) -> usize {
    Layout::for_entries(entries).map_or(0, Layout::bytes)
}

/// A completed I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Index that `prepare` returned.
    pub slot: u32,
    /// Bytes that were read or written, or a negative errno.
    pub result: i64,
    /// Value that was passed to `prepare`.
    pub userdata: usize,
}

/// A ring.
pub struct Ring {
    session: Arc<Session>,
    memory: Memory,
    layout: Layout,
    options: RingOptions,
    state: Mutex<State>,
}

struct State {
    /// Session that knows the ring, and the ring's number in it.
    attached: Option<(u64, u32)>,
    /// Submissions that were prepared, that were announced, and completions that were taken out.
    prepared: u32,
    announced: u32,
    taken: u32,
    slots: Vec<Option<InFlight>>,
    free: Vec<u32>,
    /// Completions that were taken out of the ring and not returned yet.
    done: VecDeque<Done>,
    /// When a waiting caller asks the daemon whether it knows the ring: some time after the last
    /// sign of it.
    probe: Instant,
}

struct InFlight {
    /// Number of the submission.
    position: u32,
    memory: Arc<Memory>,
    file: Arc<File>,
    memory_offset: u64,
    file_offset: u64,
    length: u64,
    userdata: usize,
}

impl Ring {
    /// Creates a ring.
    ///
    /// # Errors
    /// `EINVAL`: the number of entries is 0 or too large, or smaller than a group. `EROFS`: a ring
    /// for writes on a read-only mount. Otherwise as [`Memory::create`] and [`Memory::register`].
    pub fn create(session: Arc<Session>, options: RingOptions) -> Result<Self, Errno> {
        let layout = Layout::for_entries(options.entries).ok_or(Errno::INVAL)?;
        if i64::from(options.depth) > i64::from(options.entries) {
            return Err(Errno::INVAL);
        }
        let memory = Memory::create(Arc::clone(&session), layout.bytes(), 0, options.numa)?;
        let state = State {
            attached: None,
            prepared: 0,
            announced: 0,
            taken: 0,
            slots: (0..options.entries).map(|_| None).collect(),
            free: (0..options.entries).rev().collect(),
            done: VecDeque::new(),
            probe: Instant::now(),
        };
        let ring = Self { session, memory, layout, options, state: Mutex::new(state) };
        with_live(&ring.session, |live| ring.attach(&mut ring.state(), live))?;
        Ok(ring)
    }

    /// Maximum number of prepared and submitted I/Os.
    pub fn entries(&self) -> u32 {
        self.options.entries
    }

    /// The ring's memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Whether the ring is for reads.
    pub fn for_read(&self) -> bool {
        self.options.for_read
    }

    /// Prepares an I/O; returns its slot.
    ///
    /// # Errors
    /// `EAGAIN`: as many I/Os as the ring has entries are in flight, or not returned by
    /// [`Self::wait`] yet. `EINVAL`: the range is outside the memory. `EACCES`: the file is not open
    /// for this.
    pub fn prepare(
        &self,
        memory: &Arc<Memory>,
        memory_offset: usize,
        file: &Arc<File>,
        file_offset: u64,
        length: u64,
        userdata: usize,
    ) -> Result<u32, Errno> {
        let end = (memory_offset as u64).checked_add(length).ok_or(Errno::INVAL)?;
        if length == 0 || end > memory.bytes() as u64 {
            return Err(Errno::INVAL);
        }
        file.check(self.options.for_read)?;
        let mut state = self.state();
        let slot = *state.free.last().ok_or(Errno::AGAIN)?;
        let (memory_offset, position) = (memory_offset as u64, state.prepared);
        let (memory, file) = (Arc::clone(memory), Arc::clone(file));
        let mut prepared =
            InFlight { position, memory, file, memory_offset, file_offset, length, userdata };
        with_live(&self.session, |live| {
            self.attach(&mut state, live)?;
            prepared.position = state.prepared;
            self.write_submission(slot, &prepared, live)
        })?;
        state.free.pop();
        state.prepared = state.prepared.wrapping_add(1);
        if let Some(entry) = state.slots.get_mut(slot as usize) {
            *entry = Some(prepared);
        }
        Ok(slot)
    }

    /// Starts prepared I/Os: all of them, or with groups all complete groups.
    ///
    /// # Errors
    /// An error of the mount.
    pub fn submit(&self) -> Result<(), Errno> {
        let mut state = self.state();
        let waiting = state.prepared.wrapping_sub(state.announced);
        let group = u32::try_from(self.options.depth).unwrap_or(0).max(1);
        state.announced = state.announced.wrapping_add(waiting - waiting % group);
        self.announce(&mut state)
    }

    /// Waits until `minimum` I/Os have completed, and returns as many as fit into `out`. The
    /// deadline is a time of the system's clock; none: waits without a limit.
    ///
    /// # Errors
    /// An error of the mount, if no result is available.
    pub fn wait(
        &self,
        out: &mut [Done],
        minimum: usize,
        deadline: Option<SystemTime>,
    ) -> Result<usize, Errno> {
        self.session.check_fork()?;
        let minimum = minimum.min(out.len());
        let mut filled = 0;
        loop {
            let (seen, probe) = {
                let mut state = self.state();
                self.take_completions(&mut state);
                let free = out.get_mut(filled..).unwrap_or_default();
                let count = free.len().min(state.done.len());
                for place in free.iter_mut().take(count) {
                    if let Some(done) = state.done.pop_front() {
                        *place = done;
                        // Not earlier: a caller that identifies I/Os by slots still waits for it.
                        state.free.push(done.slot);
                    }
                }
                filled += count;
                (state.taken, state.probe)
            };
            let now = SystemTime::now();
            if filled >= minimum || deadline.is_some_and(|deadline| deadline <= now) {
                return Ok(filled);
            }
            let unprobed = probe.saturating_duration_since(Instant::now());
            if unprobed.is_zero() {
                match self.announce(&mut self.state()) {
                    Err(_) if filled > 0 => return Ok(filled),
                    result => result?,
                }
                continue;
            }
            let until = now + unprobed;
            let until = deadline.map_or(until, |deadline| deadline.min(until));
            // Any error, a signal or a changed counter: the counter is read again.
            let _ = futex::wait_bitset(
                self.counter(),
                futex::Flags::CLOCK_REALTIME,
                seen,
                Some(&timespec(until)),
                std::num::NonZeroU32::MAX,
            );
        }
    }

    fn announce(&self, state: &mut State) -> Result<(), Errno> {
        with_live(&self.session, |live| {
            self.attach(state, live)?;
            let (_, number) = state.attached.ok_or(Errno::STALE)?;
            control::submit(live, number, state.announced)
        })?;
        state.probe = Instant::now() + PROBE_INTERVAL;
        Ok(())
    }

    /// Registers the ring, if the session does not know it, and writes all submissions in flight
    /// again, from the number of completions on.
    fn attach(&self, state: &mut State, live: &Arc<Live>) -> Result<(), Errno> {
        if state.attached.is_some_and(|(serial, _)| serial == live.serial) {
            return Ok(());
        }
        self.take_completions(state);
        let start = state.taken;
        let announced = state.announced;
        let mut in_flight: Vec<(u32, &mut InFlight)> = (0..)
            .zip(state.slots.iter_mut())
            .filter_map(|(slot, entry)| Some((slot, entry.as_mut()?)))
            .collect();
        // Numbers are compared by their distance: they wrap around.
        in_flight.sort_unstable_by_key(|(_, entry)| entry.position.wrapping_sub(start));
        let (mut position, mut announced_again) = (start, start);
        for (slot, entry) in in_flight {
            // Below the old number of announcements: it was announced.
            if announced.wrapping_sub(entry.position).wrapping_sub(1) < u32::MAX / 2 {
                announced_again = position.wrapping_add(1);
            }
            entry.position = position;
            self.write_submission(slot, entry, live)?;
            position = position.wrapping_add(1);
        }
        (state.prepared, state.announced) = (position, announced_again);
        let for_read = if self.options.for_read { FOR_READ } else { 0 };
        let holes = if self.options.forbid_holes { FORBID_HOLES } else { 0 };
        let limit = u32::try_from(-i64::from(self.options.depth)).unwrap_or(0);
        let request = self.memory.request(self.layout.entries(), for_read | holes);
        let number = live.register(&Register { limit, start, ..request })?;
        state.attached = Some((live.serial, number));
        Ok(())
    }

    fn write_submission(&self, slot: u32, entry: &InFlight, live: &Arc<Live>) -> Result<(), Errno> {
        let submission = Submission {
            slot,
            region: entry.memory.number(live)?,
            file: entry.file.number(live)?,
            reserved: 0,
            memory_offset: entry.memory_offset,
            file_offset: entry.file_offset,
            length: entry.length,
        };
        let bytes = submission.encode();
        // SAFETY: the layout's offsets are inside the ring's memory, which lives as long as this
        // value. The daemon reads it after it was announced only.
        unsafe {
            let to = self.memory.base().add(self.layout.submission(entry.position));
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        Ok(())
    }

    /// Moves new completions out of the ring.
    fn take_completions(&self, state: &mut State) {
        let completed = self.counter().load(Acquire);
        while state.taken != completed {
            let mut bytes = [0; COMPLETION_BYTES];
            // SAFETY: as above; the daemon has written the completion before it counted it.
            unsafe {
                let from = self.memory.base().add(self.layout.completion(state.taken));
                std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
            }
            state.taken = state.taken.wrapping_add(1);
            state.probe = Instant::now() + PROBE_INTERVAL;
            let Completion { slot, result } = Completion::decode(&bytes);
            let Some(entry) = state.slots.get_mut(slot as usize).and_then(Option::take) else {
                continue;
            };
            state.done.push_back(Done { slot, result, userdata: entry.userdata });
        }
    }

    fn counter(&self) -> &AtomicU32 {
        // SAFETY: the first word of the ring's memory, aligned to a page; all accesses are atomic.
        unsafe { &*self.memory.base().cast() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let live = self.session.live();
        let attached = self.state().attached;
        if let Some((serial, number)) = attached
            && serial == live.serial
        {
            live.remove_region(number);
        }
    }
}

fn timespec(time: SystemTime) -> Timespec {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    // A time after the year 292 billion does not occur.
    Timespec {
        tv_sec: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(since.subsec_nanos()),
    }
}
