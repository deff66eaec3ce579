//! Which communicator's chunks go first, where a process has several.
//!
//! Every operation along the trees is counted by the level of its communicator, for all communicators
//! that one user has in the process (see [`Share`](crate::Share)).
//! A driver that would begin a chunk while a higher level has something under way holds it back,
//! until that has ended, and [`HELD`] at most: ranks whose operations wait for each other crosswise
//! lose that once, not for each chunk, and a stream of short operations leaves the others a window of
//! chunks each time. What has begun goes on. Only the time of chunks depends on it, no bit.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Shared, lock};

/// How long a chunk is held back at most.
pub const HELD: Duration = Duration::from_millis(10);

/// The level of a communicator.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// After all others.
    Low,
    /// Unless somebody says otherwise.
    #[default]
    Normal,
    /// Before all others.
    High,
}

impl Priority {
    /// Lowest first.
    pub const ALL: [Priority; 3] = [Priority::Low, Priority::Normal, Priority::High];

    /// Its name in settings.
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

/// A word that is no level.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("low, normal or high")]
pub struct NoPriority;

impl FromStr for Priority {
    type Err = NoPriority;

    fn from_str(text: &str) -> Result<Self, NoPriority> {
        Self::ALL.into_iter().find(|level| level.name() == text).ok_or(NoPriority)
    }
}

/// What the communicators of a user tell each other.
#[derive(Debug, Default)]
pub struct PriorityLevels {
    /// Operations under way, by level.
    under_way: [AtomicUsize; 3],
    /// Operations above the lowest level that have ended.
    ended: AtomicU64,
    /// Drivers that hold chunks back.
    waiting: Mutex<Vec<Weak<Shared>>>,
}

/// An operation that is under way as long as this exists.
#[derive(Debug)]
pub struct UnderWay(Arc<PriorityLevels>, Priority);

impl PriorityLevels {
    /// An operation of this level begins.
    pub fn begin(self: &Arc<Self>, level: Priority) -> UnderWay {
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
                    shared.notify();
                }
            }
        }
    }
}

/// One driver's side of it.
#[derive(Debug)]
pub struct PriorityGate {
    level: Priority,
    held: Duration,
    /// Since when chunks are held back.
    since: Option<Instant>,
    /// They were for long enough: as long as nothing above has ended since, they go on.
    through: Option<u64>,
}

impl PriorityGate {
    /// For a communicator of this level, whose chunks are held back for `held` at most.
    pub fn new(level: Priority, held: Duration) -> Self {
        Self { level, held, since: None, through: None }
    }

    /// Until when no chunk may begin; `None`: they may. `call` is rung when that changes before.
    pub fn held_until(
        &mut self,
        priority_levels: &PriorityLevels,
        call: &Arc<Shared>,
    ) -> Option<Instant> {
        if !priority_levels.is_one_above(self.level) {
            (self.since, self.through) = (None, None);
            return None;
        }
        let now = Instant::now();
        self.look(priority_levels, now)?;
        let mut waiting = lock(&priority_levels.waiting);
        if !waiting.iter().any(|other| std::ptr::eq(other.as_ptr(), Arc::as_ptr(call))) {
            waiting.push(Arc::downgrade(call));
        }
        drop(waiting);
        // The last one may have ended before it could see that we wait.
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
        let until = *self.since.get_or_insert(now) + self.held;
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
