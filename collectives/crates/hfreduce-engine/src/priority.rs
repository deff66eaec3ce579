//! Priority between the communicators of a process.
//!
//! Every operation along the trees is counted at the level of its communicator, for all
//! communicators that one user has in the process (see [`Share`](crate::share::Share)). A driver does not
//! start a chunk while operations of a higher level are in progress, for at most [`HELD`]: ranks
//! with circular waits between their operations lose that time once, not for each chunk, and a
//! stream of short operations leaves the others a window of chunks each time. Started chunks
//! continue. Priorities change the timing of chunks only, never the result.

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

/// Maximum time for which a chunk is held back.
pub const HELD: Duration = Duration::from_millis(10);

/// Priority level of a communicator.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// After all other levels.
    Low,
    /// The default.
    #[default]
    Normal,
    /// Before all other levels.
    High,
}

impl Priority {
    /// All levels, lowest first.
    pub const ALL: [Priority; 3] = [Priority::Low, Priority::Normal, Priority::High];

    /// The name in settings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Normal => "normal",
            Self::High => "high",
        }
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A priority that is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected low, normal or high")]
pub struct NoPriority;

impl FromStr for Priority {
    type Err = NoPriority;

    fn from_str(text: &str) -> Result<Self, NoPriority> {
        Self::ALL.into_iter().find(|level| level.name() == text).ok_or(NoPriority)
    }
}

/// Operations in progress at each level, of all communicators of a user.
#[derive(Debug, Default)]
pub struct PriorityLevels {
    /// Operations in progress, by level.
    under_way: [AtomicUsize; 3],
    /// Operations above the lowest level that have ended.
    ended: AtomicU64,
    /// Drivers that hold chunks back.
    waiting: Mutex<Vec<Weak<dyn Wake>>>,
}

/// An operation that is in progress as long as this value exists.
#[derive(Debug)]
pub struct UnderWay(Arc<PriorityLevels>, Priority);

impl PriorityLevels {
    /// Counts an operation of this level.
    pub fn start(self: &Arc<Self>, level: Priority) -> UnderWay {
        self.under_way[level as usize].fetch_add(1, Ordering::SeqCst);
        UnderWay(self.clone(), level)
    }

    fn is_one_above(&self, level: Priority) -> bool {
        let above = &self.under_way[level as usize + 1..];
        above.iter().any(|count| count.load(Ordering::SeqCst) > 0)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let Self(priority_levels, level) = self;
        let last = priority_levels.under_way[*level as usize].fetch_sub(1, Ordering::SeqCst) == 1;
        if *level == Priority::Low {
            return;
        }
        priority_levels.ended.fetch_add(1, Ordering::SeqCst);
        if last {
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
    delay_max: Duration,
    /// Since when chunks have been held back.
    since: Option<Instant>,
    /// The maximum time has passed: chunks continue until an operation of a higher level ends.
    through: Option<u64>,
}

impl PriorityGate {
    /// For a communicator of this level, whose chunks are held back for `delay_max` at most.
    pub fn new(level: Priority, delay_max: Duration) -> Self {
        Self { level, delay_max, since: None, through: None }
    }

    /// Until when no chunk may start; `None`: chunks may start. `call` is woken if that changes
    /// earlier.
    pub fn held_until<W: Wake + 'static>(
        &mut self,
        priority_levels: &PriorityLevels,
        call: &Arc<W>,
    ) -> Option<Instant> {
        if !priority_levels.is_one_above(self.level) {
            (self.since, self.through) = (None, None);
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
        let ended = priority_levels.ended.load(Ordering::SeqCst);
        if !priority_levels.is_one_above(self.level) {
            (self.since, self.through) = (None, None);
            return None;
        }
        if self.through == Some(ended) {
            return None;
        }
        let until = *self.since.get_or_insert(now) + self.delay_max;
        if now < until {
            return Some(until);
        }
        (self.since, self.through) = (None, Some(ended));
        None
    }
}

#[cfg(test)]
#[path = "priority_test.rs"]
mod tests;
