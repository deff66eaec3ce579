//! How long the entries of a queue have waited, by a clock that nobody sets.
//!
//! Entries are ordered by the version of the commit that queued them. Noting from time to time
//! which version was the newest tells later which entries are at least that old. After a restart
//! everything is young again: it waits once more, which harms nothing.

use std::collections::VecDeque;
use std::time::Duration;

use fabric::boot_instant::BootInstant;

/// Notes that are kept; they are at least a part of the wait apart, so that this many always span
/// it.
const SAMPLES_MAX: u32 = 64;

#[derive(Debug, Default)]
pub(crate) struct QueueClock(VecDeque<(BootInstant, u64)>);

impl QueueClock {
    /// Notes the newest version, and returns the newest one that was noted at least `wait` ago.
    pub(crate) fn due(&mut self, now: BootInstant, newest: u64, wait: Duration) -> Option<u64> {
        let apart = wait / (SAMPLES_MAX - 2);
        if self.0.back().is_none_or(|(noted, _)| now.since(*noted) >= apart) {
            self.0.push_back((now, newest));
        }
        let old = |(noted, _): &(BootInstant, u64)| now.since(*noted) >= wait;
        while self.0.len() > 1 && self.0.get(1).is_some_and(old) {
            self.0.pop_front();
        }
        self.0.front().filter(|note| old(note)).map(|(_, version)| *version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_queued_is_due_after_the_wait_and_notes_are_bounded() {
        let start = BootInstant::now();
        let at = |ms: u64| start.after(Duration::from_millis(ms));
        let wait = Duration::from_millis(1000);
        let mut queue_clocks = QueueClock::default();
        assert_eq!(queue_clocks.due(at(0), 5, wait), None);
        for ms in 1..1000 {
            assert_eq!(queue_clocks.due(at(ms), 5 + ms, wait), None);
        }
        let due = queue_clocks.due(at(1000), 2000, wait).unwrap();
        assert_eq!(due, 5, "what was queued later is younger");
        for ms in 1001..5000 {
            let due = queue_clocks.due(at(ms), 5 + ms, wait).unwrap();
            assert!(due <= 5 + ms - 1000, "not before its time");
            assert!(due + 40 >= 5 + ms - 1000, "nor much later");
            assert!(queue_clocks.0.len() <= SAMPLES_MAX as usize);
        }
        assert_eq!(QueueClock::default().due(at(0), 9, Duration::ZERO), Some(9));
    }
}
