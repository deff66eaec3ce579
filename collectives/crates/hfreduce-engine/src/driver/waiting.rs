//! How a rank waits, and how it is called.
//!
//! Whoever waits looks, then (where ranks share processors) gives its own away a few times, and sleeps.
//! Who changes something rings only for those who sleep for it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Driver, ReduceAlgorithm, TICK, poller};
use crate::shm::{
    WAIT_ABORT, WAIT_END, WAIT_INPUT, WAIT_RESULT, WAIT_SLOT, WAIT_TURN, WAIT_WINDOW,
};

/// How often a rank gives its processor away before it sleeps. Once is enough where all come at the
/// same time, as each of the others has run by then.
const YIELDS: u32 = 8;
/// How often a rank that spins looks for a small sum before it looks at everything again: a microsecond
/// or two.
const SMALL_RESULT_POLLS: u32 = 64;
/// A rank that comes and goes needs microseconds; whoever has work of his own, a slice of the
/// scheduler's: milliseconds.
const LONG_YIELD: Duration = Duration::from_micros(500);
/// Waits without it after a processor was gone for long, at first and at most.
const SKIP_MIN: u32 = 64;
const SKIP_MAX: u32 = 1 << 13;
/// So many short ones and all is forgotten.
const SHORT_RESET: u32 = 1000;

/// Whether to give the processor away. Not where somebody else takes it for long: then a sleeper that
/// is rung for has it back sooner.
#[derive(Debug, Default)]
pub(super) struct YieldBackoff {
    /// Waits without it that are left, and how many they were to begin with.
    skipped: u32,
    skip: u32,
    short_yields: u32,
}

impl YieldBackoff {
    /// Asked once a wait.
    fn allows_yield(&mut self) -> bool {
        let allows_yield = self.skipped == 0;
        self.skipped = self.skipped.saturating_sub(1);
        allows_yield
    }

    /// So long was the processor gone; false if that was too long to do it again.
    fn record_yield(&mut self, time: Duration) -> bool {
        if time >= LONG_YIELD {
            self.skip = (self.skip * 2).clamp(SKIP_MIN, SKIP_MAX);
            (self.skipped, self.short_yields) = (self.skip, 0);
        } else if self.short_yields < SHORT_RESET {
            self.short_yields += 1;
        } else {
            self.skip = 0;
        }
        time < LONG_YIELD
    }
}

impl Driver {
    /// Moves data until `done` holds or `until` has come. The only place where a rank blocks.
    pub fn drive(&mut self, until: Instant, done: impl Fn(&Self) -> bool) {
        let mut idle_since: Option<Instant> = None;
        let mut yields = 0;
        loop {
            let moved = self.pump();
            if done(self) {
                break;
            }
            let now = Instant::now();
            if now >= until {
                break;
            }
            if moved {
                idle_since = None;
                yields = 0;
            } else if yields < YIELDS
                && self.should_yield()
                && (yields > 0 || self.yield_backoff.allows_yield())
            {
                std::thread::yield_now();
                yields = if self.yield_backoff.record_yield(now.elapsed()) {
                    yields + 1
                } else {
                    YIELDS
                };
            } else if now.duration_since(*idle_since.get_or_insert(now)) >= self.spin {
                self.sleep(until);
                idle_since = None;
                yields = 0;
                continue;
            } else {
                self.poll_small_result();
            }
            // Inside a node alone, memory tells everything but an end of somebody, and who waits
            // for one of those falls asleep soon: no system call for a look.
            if self.listens() || now.duration_since(self.ticked) >= TICK {
                self.poll(Duration::ZERO);
            }
        }
    }

    /// Between two looks at everything: at the one word that a small sum ends with, if that is what comes
    /// next. Whoever adds is not kept from lines of the segment that he writes.
    fn poll_small_result(&self) {
        let awaited = self.next_deliver < self.next_stage
            && self
                .active
                .front()
                .is_some_and(|active| active.algorithm == ReduceAlgorithm::LastArriver);
        let looks = if awaited { SMALL_RESULT_POLLS } else { 1 };
        for _ in 0..looks {
            std::hint::spin_loop();
            if awaited && self.shm.reduced_by(self.next_deliver).is_some() {
                return;
            }
        }
    }

    /// True where another rank that shares our processor is likely to need it for what we wait for,
    /// and for little more than to come and to go.
    fn should_yield(&self) -> bool {
        self.is_crowded()
            && self
                .active
                .front()
                .is_some_and(|active| active.algorithm == ReduceAlgorithm::LastArriver)
    }

    /// True if data may come through sockets.
    fn listens(&self) -> bool {
        self.tree_links.as_ref().is_some_and(|tree_links| tree_links.len() > 0)
            || self.p2p.is_connected()
    }

    /// One look at everything without sleeping.
    pub fn poll_once(&mut self) {
        self.poll(Duration::ZERO);
        self.pump();
    }

    fn sleep(&mut self, until: Instant) {
        let local = self.shared.identity.local();
        let reasons = self.sleep_reasons();
        self.shm.fall_asleep(local, reasons);
        // The last look, after having said that we sleep: what changed before it is seen here,
        // what changes after it wakes us.
        if self.pump()
            || self.shared.pending.load(Ordering::SeqCst)
            || self.nothing_to_wait_for()
            || self.sleep_reasons() & !reasons != 0
        {
            self.shm.wake_up(local);
            return;
        }
        let now = Instant::now();
        let next_tick = self.ticked + TICK;
        let held_until = self.held_until.unwrap_or(next_tick);
        let timeout = until.min(next_tick).min(held_until).saturating_duration_since(now);
        self.shared.counters.sleeps.fetch_add(1, Ordering::Relaxed);
        self.poll(timeout.max(Duration::from_micros(50)));
        self.shm.wake_up(local);
    }

    /// The last look may have ended what we were to wait for.
    fn nothing_to_wait_for(&self) -> bool {
        !self.is_busy()
    }

    fn sleep_reasons(&self) -> u32 {
        let rank = self.shared.identity.rank;
        let whole = self.active.front().is_some_and(|active| active.is_made_in_place(rank));
        let mut reasons = WAIT_ABORT;
        if !self.turn_is_certain() {
            reasons |= if whole { WAIT_END } else { WAIT_RESULT };
        }
        if self.tree_links.is_some() {
            reasons |= WAIT_INPUT;
        }
        if self.wants_slot {
            reasons |= WAIT_SLOT;
        }
        if self.wants_turn {
            reasons |= WAIT_TURN;
        }
        if !self.held.is_empty() {
            reasons |= WAIT_WINDOW;
        }
        reasons
    }

    /// After a change and [`ShmSegment::full_fence`].
    pub(super) fn wake(&self, local: usize, reasons: u32) {
        if local != self.shared.identity.local() && self.shm.claim_wakeup(local, reasons) {
            self.shared.counters.wakeups.fetch_add(1, Ordering::Relaxed);
            poller::notify(&self.node_peers.doorbells[local]);
        }
    }

    pub(super) fn wake_all(&self, reasons: u32) {
        self.shm.full_fence();
        for local in 0..self.shm.shape().locals {
            self.wake(local, reasons);
        }
    }

    /// True where ranks share processors: who is woken for little keeps the others from working.
    pub(super) fn is_crowded(&self) -> bool {
        self.spin.is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_micros(20);

    fn skipped(yield_backoff: &mut YieldBackoff) -> u32 {
        (0..).take_while(|_| !yield_backoff.allows_yield()).count() as u32
    }

    #[test]
    fn who_loses_the_processor_for_long_sleeps_for_a_while_and_then_for_longer() {
        let mut yield_backoff = YieldBackoff::default();
        let mut waits = Vec::new();
        for _ in 0..10 {
            assert!(yield_backoff.allows_yield());
            assert!(yield_backoff.record_yield(SHORT) && !yield_backoff.record_yield(LONG_YIELD));
            waits.push(skipped(&mut yield_backoff));
        }
        assert_eq!(waits[..3], [64, 128, 256]);
        assert_eq!(waits[7..], [SKIP_MAX; 3]);
    }

    #[test]
    fn what_was_long_ago_is_forgotten() {
        let mut yield_backoff = YieldBackoff::default();
        for _ in 0..2 {
            assert!(!yield_backoff.record_yield(LONG_YIELD));
            assert_eq!(skipped(&mut yield_backoff), SKIP_MIN);
            (0..=SHORT_RESET).for_each(|_| assert!(yield_backoff.record_yield(SHORT)));
        }
    }
}
