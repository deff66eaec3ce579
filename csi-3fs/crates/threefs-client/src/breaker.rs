//! Circuit breakers for chains: background work does not wait for a chain that did not answer.
//!
//! After a failure a chain is left alone for a while, twice as long after each further one; then one
//! caller may try it, and its success closes the breaker. Pure: the time is given.

use std::collections::HashMap;
use std::time::Duration;

use fabric::boot_instant::BootInstant;
use threefs_core::ids::ChainId;

const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(crate) struct Breakers(HashMap<ChainId, Open>);

#[derive(Debug)]
struct Open {
    pause: Duration,
    until: BootInstant,
}

impl Breakers {
    /// Whether a chain may be asked; if not, for how long not. One caller at a time tries a chain
    /// that failed: the next one may after another pause, should this one never come back.
    pub(crate) fn admit(&mut self, chain: ChainId, now: BootInstant) -> Result<(), Duration> {
        match self.0.get_mut(&chain) {
            Some(open) if now < open.until => Err(open.until.since(now)),
            Some(open) => {
                open.until = now.after(open.pause);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// What came of asking it.
    pub(crate) fn asked(&mut self, chain: ChainId, answered: bool, now: BootInstant) {
        if answered {
            self.0.remove(&chain);
            return;
        }
        let open = self.0.entry(chain).or_insert(Open { pause: PAUSE_MIN / 2, until: now });
        // Many that were under way together fail together: that is one failure.
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
    fn a_chain_that_fails_is_tried_by_one_caller_after_ever_longer_pauses() {
        let (mut breakers, start) = (Breakers::default(), BootInstant::now());
        let at = |ms: u64| start.after(Duration::from_millis(ms));
        let (bad, good) = (ChainId(1), ChainId(2));
        for _ in 0..50 {
            assert!(breakers.admit(bad, at(0)).is_ok());
        }
        for _ in 0..50 {
            breakers.asked(bad, false, at(10));
        }
        assert_eq!(breakers.admit(bad, at(510)), Err(Duration::from_millis(500)));
        assert!(breakers.admit(good, at(510)).is_ok(), "the others are not affected");
        assert!(breakers.admit(bad, at(1_010)).is_ok());
        assert!(breakers.admit(bad, at(1_011)).is_err(), "one at a time");
        breakers.asked(bad, false, at(5_000));
        assert!(breakers.admit(bad, at(6_999)).is_err());
        assert!(breakers.admit(bad, at(7_000)).is_ok());
        breakers.asked(bad, true, at(7_001));
        assert!(breakers.admit(bad, at(7_002)).is_ok() && breakers.admit(bad, at(7_002)).is_ok());
    }

    #[test]
    fn the_pause_is_bounded() {
        let (mut breakers, start) = (Breakers::default(), BootInstant::now());
        let mut now = start;
        for _ in 0..20 {
            breakers.asked(ChainId(1), false, now);
            let left = breakers.admit(ChainId(1), now).unwrap_err();
            assert!(left <= PAUSE_MAX);
            now = now.after(left);
        }
        assert!(now.since(start) > PAUSE_MAX * 10);
    }
}
