//! Priority between the communicators of a process.
//!
//! Every operation along the trees is counted at the level of its communicator, for all
//! communicators that one user has in the process (see [`Share`](crate::share::Share)). A driver does not
//! start a chunk while operations of a higher level are in progress: until [`HELD`] has passed
//! without progress of them, so that ranks with circular waits between their operations lose that
//! time once, not for each chunk; and for at most [`HELD_PERIODS`] times as long, after which it
//! starts a window of chunks, so that no level starves. Started chunks continue. Priorities change
//! the timing of chunks only, never the result.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use hfreduce_shm::lock;

/// A driver that can be woken from any thread.
pub trait Wake: Send + Sync {
    /// Wakes the driver.
    fn wake(&self);
}

/// Maximum time for which a chunk is held back while no operation of a higher level makes progress.
/// On a slow link a chunk may take tens of milliseconds to its tree's root and back.
pub const HELD: Duration = Duration::from_millis(50);

/// Maximum time for which a chunk is held back, as a multiple of the above.
const HELD_PERIODS: u32 = 20;

/// Number of levels.
const LEVELS: usize = 16;

/// Priority level of a communicator: chunks of a higher one start first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Priority(u8);

impl Priority {
    /// A quarter of the levels are below.
    pub const LOW: Self = Self(4);
    /// The default.
    pub const NORMAL: Self = Self(8);
    /// A quarter of the levels are above or at it.
    pub const HIGH: Self = Self(12);

    const NAMES: [(&str, Self); 3] =
        [("low", Self::LOW), ("normal", Self::NORMAL), ("high", Self::HIGH)];
}

impl Default for Priority {
    fn default() -> Self {
        Self::NORMAL
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMES.iter().find(|(_, level)| level == self) {
            Some((name, _)) => formatter.write_str(name),
            None => write!(formatter, "{}", self.0),
        }
    }
}

/// A priority that is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("low, normal, high or a whole number from 0 to 15")]
pub struct NoPriority;

impl FromStr for Priority {
    type Err = NoPriority;

    fn from_str(text: &str) -> Result<Self, NoPriority> {
        if let Some((_, level)) = Self::NAMES.iter().find(|(name, _)| *name == text) {
            return Ok(*level);
        }
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        match text.parse::<u8>() {
            Ok(level) if is_number && usize::from(level) < LEVELS => Ok(Self(level)),
            _ => Err(NoPriority),
        }
    }
}

impl TryFrom<String> for Priority {
    type Error = NoPriority;

    fn try_from(text: String) -> Result<Self, NoPriority> {
        text.parse()
    }
}

impl From<Priority> for String {
    fn from(priority: Priority) -> Self {
        priority.to_string()
    }
}

/// Operations in progress at each level, of all communicators of a user.
#[derive(Debug, Default)]
pub struct PriorityLevels {
    /// Operations in progress, by level.
    under_way: [AtomicUsize; LEVELS],
    /// Steps of chunks and ends of operations, by level.
    progress: [AtomicU64; LEVELS],
    /// Drivers that hold chunks back.
    waiting: Mutex<Vec<Weak<dyn Wake>>>,
}

/// An operation that is in progress as long as this value exists.
#[derive(Debug)]
pub struct UnderWay(Arc<PriorityLevels>, Priority);

impl PriorityLevels {
    /// Counts an operation of this level.
    pub fn start(self: &Arc<Self>, level: Priority) -> UnderWay {
        self.under_way[usize::from(level.0)].fetch_add(1, Ordering::SeqCst);
        UnderWay(self.clone(), level)
    }

    /// What operations above a level have done, or `None` if none is in progress.
    fn progress_above(&self, level: Priority) -> Option<u64> {
        let above = usize::from(level.0) + 1..;
        let busy = |count: &AtomicUsize| count.load(Ordering::SeqCst) > 0;
        let is_busy = self.under_way[above.clone()].iter().any(busy);
        is_busy.then(|| self.progress[above].iter().map(|p| p.load(Ordering::Relaxed)).sum())
    }
}

impl UnderWay {
    /// Counts a step of a chunk: reduced, received or delivered.
    pub fn progress(&self) {
        self.0.progress[usize::from(self.1.0)].fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.progress();
        let Self(priority_levels, level) = self;
        let under_way = &priority_levels.under_way[usize::from(level.0)];
        if under_way.fetch_sub(1, Ordering::SeqCst) == 1 && level.0 > 0 {
            for shared in std::mem::take(&mut *lock(&priority_levels.waiting)) {
                if let Some(shared) = shared.upgrade() {
                    shared.wake();
                }
            }
        }
    }
}

/// Gate of one driver.
#[derive(Debug)]
pub struct PriorityGate {
    level: Priority,
    stalled_max: Duration,
    held: Option<Held>,
}

/// Chunks that are held back.
#[derive(Debug)]
struct Held {
    since: Instant,
    /// What operations of higher levels had done when they last made progress, and when that was.
    progress: u64,
    progressed: Instant,
}

impl PriorityGate {
    /// For a communicator of this level, whose chunks are held back for `stalled_max` at most while
    /// operations of higher levels make no progress.
    pub fn new(level: Priority, stalled_max: Duration) -> Self {
        Self { level, stalled_max, held: None }
    }

    /// Until when no chunk may start; `None`: chunks may start. `call` is woken if that changes
    /// earlier.
    pub fn held_until<W: Wake + 'static>(
        &mut self,
        priority_levels: &PriorityLevels,
        call: &Arc<W>,
    ) -> Option<Instant> {
        if priority_levels.progress_above(self.level).is_none() {
            self.held = None;
            return None;
        }
        let now = Instant::now();
        self.look(priority_levels, now)?;
        let mut waiting = lock(&priority_levels.waiting);
        if !waiting.iter().any(|other| std::ptr::addr_eq(other.as_ptr(), Arc::as_ptr(call))) {
            let call: Weak<W> = Arc::downgrade(call);
            waiting.push(call);
        }
        drop(waiting);
        // The last operation may have ended before this driver was registered.
        self.look(priority_levels, now)
    }

    fn look(&mut self, priority_levels: &PriorityLevels, now: Instant) -> Option<Instant> {
        let Some(progress) = priority_levels.progress_above(self.level) else {
            self.held = None;
            return None;
        };
        let held = self.held.get_or_insert(Held { since: now, progress, progressed: now });
        if held.progress != progress {
            (held.progress, held.progressed) = (progress, now);
        }
        let stalled = held.progressed + self.stalled_max;
        let ends = held.since + self.stalled_max * HELD_PERIODS;
        if ends <= now && now < stalled {
            self.held = None; // Chunks are held back again after one window of them.
            return None;
        }
        let until = stalled.min(ends);
        (now < until).then_some(until)
    }
}

#[cfg(test)]
#[path = "priority_test.rs"]
mod tests;
