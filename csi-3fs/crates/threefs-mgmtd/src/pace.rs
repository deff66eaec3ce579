//! Rate limit of moves: after a move starts, the next one waits for the time that its bytes take at
//! the limit. So the mean over several moves is limited; one move copies as fast as its disks.
//! Copies that restore a missing replica are not limited.

use threefs_core::time::Millis;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pace {
    /// The limit; 0 = none.
    pub bytes_per_second: u64,
    next_at: Option<Millis>,
}

impl Pace {
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, next_at: None }
    }

    /// Whether the next move must wait.
    pub(crate) fn waits(&self, now: Millis) -> bool {
        self.next_at.is_some_and(|at| now < at)
    }

    /// Records the start of a move.
    pub(crate) fn started(&mut self, bytes: u64, now: Millis) {
        if self.bytes_per_second > 0 {
            let ms = u128::from(bytes) * 1000 / u128::from(self.bytes_per_second);
            let since = self.next_at.filter(|at| now < *at).unwrap_or(now);
            self.next_at = Some(since.after(u64::try_from(ms).unwrap_or(u64::MAX)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_rate_is_limited() {
        let mut pace = Pace::new(1000);
        assert!(!pace.waits(Millis(50)));
        pace.started(2_000, Millis(50));
        assert!(pace.waits(Millis(2_049)) && !pace.waits(Millis(2_050)));
        // Moves that start together add up; idle time is not saved for later.
        pace.started(1_000, Millis(60));
        assert!(pace.waits(Millis(3_049)) && !pace.waits(Millis(3_050)));
        pace.started(1_000, Millis(60_000));
        assert!(!pace.waits(Millis(61_000)));
        let mut unlimited = Pace::new(0);
        unlimited.started(u64::MAX, Millis(50));
        assert!(!unlimited.waits(Millis(50)));
        let mut slow = Pace::new(1);
        slow.started(u64::MAX, Millis(50));
        assert!(slow.waits(Millis(u64::MAX - 1)));
    }
}
