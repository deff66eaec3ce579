//! How a rank waits, and how it is called.
//!
//! Whoever waits looks, then (where ranks share processors) gives its own away a few times, and sleeps.
//! Who changes something rings only for those who sleep for it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Driver, TICK, Way, poller};
use crate::board::{FOR_ABORT, FOR_END, FOR_INPUT, FOR_RESULT, FOR_SLOT, FOR_TURN, FOR_WINDOW};

/// How often a rank gives its processor away before it sleeps. Once is enough where all come at the
/// same time, as each of the others has run by then.
const YIELDS: u32 = 8;
/// How often a rank that spins looks for a small sum before it looks at everything again: a microsecond
/// or two.
const SUM_LOOKS: u32 = 64;
/// A rank that comes and goes needs microseconds; whoever has work of his own, a slice of the
/// scheduler's: milliseconds.
const LONG: Duration = Duration::from_micros(500);
/// Waits without it after a processor was gone for long, at first and at most.
const DECLINED_FIRST: u32 = 64;
const DECLINED_MOST: u32 = 1 << 13;
/// So many short ones and all is forgotten.
const FORGIVEN_AFTER: u32 = 1000;

/// Whether to give the processor away. Not where somebody else takes it for long: then a sleeper that
/// is rung for has it back sooner.
#[derive(Debug, Default)]
pub(super) struct Courtesy {
    /// Waits without it that are left, and how many they were to begin with.
    declined: u32,
    most: u32,
    short: u32,
}

impl Courtesy {
    /// Asked once a wait.
    fn offers(&mut self) -> bool {
        let offers = self.declined == 0;
        self.declined = self.declined.saturating_sub(1);
        offers
    }

    /// So long was the processor gone; false if that was too long to do it again.
    fn pays(&mut self, time: Duration) -> bool {
        if time >= LONG {
            self.most = (self.most * 2).clamp(DECLINED_FIRST, DECLINED_MOST);
            (self.declined, self.short) = (self.most, 0);
        } else if self.short < FORGIVEN_AFTER {
            self.short += 1;
        } else {
            self.most = 0;
        }
        time < LONG
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
            } else if yields < YIELDS && self.gives_way() && (yields > 0 || self.courtesy.offers())
            {
                std::thread::yield_now();
                yields = if self.courtesy.pays(now.elapsed()) { yields + 1 } else { YIELDS };
            } else if now.duration_since(*idle_since.get_or_insert(now)) >= self.spin {
                self.sleep(until);
                idle_since = None;
                yields = 0;
                continue;
            } else {
                self.look_for_sum();
            }
            // Inside a node alone, memory tells everything but an end of somebody, and who waits
            // for one of those falls asleep soon: no system call for a look.
            if self.listens() || now.duration_since(self.ticked) >= TICK {
                self.poll(Duration::ZERO);
            }
        }
    }

    /// Between two looks at everything: at the one word that a small sum ends with, if that is what comes
    /// next. Whoever adds is not kept from lines of the board that he writes.
    fn look_for_sum(&self) {
        let awaited = self.next_deliver < self.next_stage
            && self.active.front().is_some_and(|active| active.way == Way::Last);
        let looks = if awaited { SUM_LOOKS } else { 1 };
        for _ in 0..looks {
            std::hint::spin_loop();
            if awaited && self.board.closed_by(self.next_deliver).is_some() {
                return;
            }
        }
    }

    /// True where another rank that shares our processor is likely to need it for what we wait for,
    /// and for little more than to come and to go.
    fn gives_way(&self) -> bool {
        self.is_crowded() && self.active.front().is_some_and(|active| active.way == Way::Last)
    }

    /// True if data may come through sockets.
    fn listens(&self) -> bool {
        self.trunk.as_ref().is_some_and(|trunk| trunk.len() > 0) || self.mesh.is_connected()
    }

    /// One look at everything without sleeping.
    pub fn glance(&mut self) {
        self.poll(Duration::ZERO);
        self.pump();
    }

    fn sleep(&mut self, until: Instant) {
        let local = self.shared.identity.local();
        let reasons = self.sleep_reasons();
        self.board.fall_asleep(local, reasons);
        // The last look, after having said that we sleep: what changed before it is seen here,
        // what changes after it wakes us.
        if self.pump()
            || self.shared.news.load(Ordering::SeqCst)
            || self.nothing_to_wait_for()
            || self.sleep_reasons() & !reasons != 0
        {
            self.board.wake_up(local);
            return;
        }
        let now = Instant::now();
        let next_tick = self.ticked + TICK;
        let held_until = self.held_until.unwrap_or(next_tick);
        let timeout = until.min(next_tick).min(held_until).saturating_duration_since(now);
        self.shared.counters.sleeps.fetch_add(1, Ordering::Relaxed);
        self.poll(timeout.max(Duration::from_micros(50)));
        self.board.wake_up(local);
    }

    /// The last look may have ended what we were to wait for.
    fn nothing_to_wait_for(&self) -> bool {
        !self.is_busy()
    }

    fn sleep_reasons(&self) -> u32 {
        let rank = self.shared.identity.rank;
        let whole = self.active.front().is_some_and(|active| active.is_made_in_place(rank));
        let mut reasons = FOR_ABORT;
        if !self.turn_comes() {
            reasons |= if whole { FOR_END } else { FOR_RESULT };
        }
        if self.trunk.is_some() {
            reasons |= FOR_INPUT;
        }
        if self.wants_slot {
            reasons |= FOR_SLOT;
        }
        if self.wants_turn {
            reasons |= FOR_TURN;
        }
        if !self.held.is_empty() {
            reasons |= FOR_WINDOW;
        }
        reasons
    }

    /// After a change and [`Board::announce`].
    pub(super) fn wake(&self, local: usize, reasons: u32) {
        if local != self.shared.identity.local() && self.board.must_wake(local, reasons) {
            self.shared.counters.rings.fetch_add(1, Ordering::Relaxed);
            poller::ring(&self.neighbourhood.bells[local]);
        }
    }

    pub(super) fn wake_all(&self, reasons: u32) {
        self.board.announce();
        for local in 0..self.board.shape().locals {
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

    fn declined(courtesy: &mut Courtesy) -> u32 {
        (0..).take_while(|_| !courtesy.offers()).count() as u32
    }

    #[test]
    fn who_loses_the_processor_for_long_sleeps_for_a_while_and_then_for_longer() {
        let mut courtesy = Courtesy::default();
        let mut waits = Vec::new();
        for _ in 0..10 {
            assert!(courtesy.offers());
            assert!(courtesy.pays(SHORT) && !courtesy.pays(LONG));
            waits.push(declined(&mut courtesy));
        }
        assert_eq!(waits[..3], [64, 128, 256]);
        assert_eq!(waits[7..], [DECLINED_MOST; 3]);
    }

    #[test]
    fn what_was_long_ago_is_forgotten() {
        let mut courtesy = Courtesy::default();
        for _ in 0..2 {
            assert!(!courtesy.pays(LONG));
            assert_eq!(declined(&mut courtesy), DECLINED_FIRST);
            (0..=FORGIVEN_AFTER).for_each(|_| assert!(courtesy.pays(SHORT)));
        }
    }
}
