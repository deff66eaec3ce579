//! Age of queue entries, independent of the wall clock.
//!
//! Entries are ordered by the round in which they were queued. Samples of the last round that has
//! ended, taken from time to time, determine which entries are at least a given age. For a new collector
//! all entries count as new: they wait again, which is harmless.

use std::collections::VecDeque;
use std::time::Duration;

use fabric::boot_instant::BootInstant;

/// Samples kept. They are spaced so that this many always cover the wait.
const SAMPLES_MAX: u32 = 64;

/// Ages of the entries of the queues of removed files.
#[derive(Debug, Default)]
pub(crate) struct QueueClocks {
    pub(crate) removed: QueueClock,
    pub(crate) dead: QueueClock,
    pub(crate) tombstones: QueueClock,
}

#[derive(Debug, Default)]
pub(crate) struct QueueClock(VecDeque<(BootInstant, u64)>);

impl QueueClock {
    /// Samples the newest round, and returns the newest one that was sampled at least `wait` ago.
    pub(crate) fn due_round(
        &mut self,
        now: BootInstant,
        newest: u64,
        wait: Duration,
    ) -> Option<u64> {
        let apart = wait / (SAMPLES_MAX - 2);
        if self.0.back().is_none_or(|(sampled_at, _)| now.since(*sampled_at) >= apart) {
            self.0.push_back((now, newest));
        }
        let old = |(sampled_at, _): &(BootInstant, u64)| now.since(*sampled_at) >= wait;
        while self.0.len() > 1 && self.0.get(1).is_some_and(old) {
            self.0.pop_front();
        }
        self.0.front().filter(|note| old(note)).map(|(_, round)| *round)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_due_after_the_wait_and_samples_are_bounded() {
        let start = BootInstant::now();
        let at = |ms: u64| start.after(Duration::from_millis(ms));
        let wait = Duration::from_millis(1000);
        let mut queue_clocks = QueueClock::default();
        assert_eq!(queue_clocks.due_round(at(0), 5, wait), None);
        for ms in 1..1000 {
            assert_eq!(queue_clocks.due_round(at(ms), 5 + ms, wait), None);
        }
        let count = queue_clocks.due_round(at(1000), 2000, wait).unwrap();
        assert_eq!(count, 5, "later entries are younger");
        for ms in 1001..5000 {
            let count = queue_clocks.due_round(at(ms), 5 + ms, wait).unwrap();
            assert!(count <= 5 + ms - 1000, "too early");
            assert!(count + 40 >= 5 + ms - 1000, "too late");
            assert!(queue_clocks.0.len() <= SAMPLES_MAX as usize);
        }
        assert_eq!(QueueClock::default().due_round(at(0), 9, Duration::ZERO), Some(9));
    }
}
