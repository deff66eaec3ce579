//! Circuit breakers for chains: background work skips a chain that did not answer.
//!
//! After a failure a chain is skipped for a pause that doubles with each further failure; then one
//! caller may try it, and success closes the breaker. Pure: the caller passes the time.

use std::collections::HashMap;
use std::time::Duration;

use fabric::boot_instant::BootInstant;
use threefs_core::ids::ChainId;

const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(crate) struct Breakers(HashMap<ChainId, Breaker>);

#[derive(Debug)]
struct Breaker {
    pause: Duration,
    until: BootInstant,
}

impl Breakers {
    /// Whether a chain may be called; otherwise the remaining pause. One caller at a time tries a
    /// failed chain; the next one may after another pause, even if the first never reports.
    pub(crate) fn check(&mut self, chain: ChainId, now: BootInstant) -> Result<(), Duration> {
        match self.0.get_mut(&chain) {
            Some(open) if now < open.until => Err(open.until.since(now)),
            Some(open) => {
                open.until = now.after(open.pause);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Records the result of a call.
    pub(crate) fn record(&mut self, chain: ChainId, answered: bool, now: BootInstant) {
        if answered {
            self.0.remove(&chain);
            return;
        }
        let open = self.0.entry(chain).or_insert(Breaker { pause: PAUSE_MIN / 2, until: now });
        // Concurrent calls that fail together count as one failure.
        if open.until <= now || open.pause < PAUSE_MIN {
            open.pause = (open.pause * 2).min(PAUSE_MAX);
            open.until = now.after(open.pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_chain_is_tried_by_one_caller_after_doubling_pauses() {
        let (mut breakers, start) = (Breakers::default(), BootInstant::now());
        let at = |ms: u64| start.after(Duration::from_millis(ms));
        let (bad, good) = (ChainId(1), ChainId(2));
        for _ in 0..50 {
            assert!(breakers.check(bad, at(0)).is_ok());
        }
        for _ in 0..50 {
            breakers.record(bad, false, at(10));
        }
        assert_eq!(breakers.check(bad, at(510)), Err(Duration::from_millis(500)));
        assert!(breakers.check(good, at(510)).is_ok(), "the others are not affected");
        assert!(breakers.check(bad, at(1_010)).is_ok());
        assert!(breakers.check(bad, at(1_011)).is_err(), "one at a time");
        breakers.record(bad, false, at(5_000));
        assert!(breakers.check(bad, at(6_999)).is_err());
        assert!(breakers.check(bad, at(7_000)).is_ok());
        breakers.record(bad, true, at(7_001));
        assert!(breakers.check(bad, at(7_002)).is_ok() && breakers.check(bad, at(7_002)).is_ok());
    }

    #[test]
    fn the_pause_is_bounded() {
        let (mut breakers, start) = (Breakers::default(), BootInstant::now());
        let mut now = start;
        for _ in 0..20 {
            breakers.record(ChainId(1), false, now);
            let remaining = breakers.check(ChainId(1), now).unwrap_err();
            assert!(remaining <= PAUSE_MAX);
            now = now.after(remaining);
        }
        assert!(now.since(start) > PAUSE_MAX * 10);
    }
}
