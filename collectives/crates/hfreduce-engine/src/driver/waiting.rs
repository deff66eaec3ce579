//! Waiting and wake-ups of a rank.
//!
//! A waiting rank polls, yields a few times if CPUs are oversubscribed, then sleeps. A rank that
//! changes state notifies only ranks sleeping on that state.

use std::any::Any;
use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fd::BorrowedFd;

use super::operations::ReduceAlgorithm;
use super::{Backend, Driver, TICK, TOKEN_CLIENT, lock};
use hfreduce_core::error::ErrorKind;
use hfreduce_shm::segment::{
    WAIT_ABORT, WAIT_END, WAIT_INPUT, WAIT_RESULT, WAIT_SLOT, WAIT_TURN, WAIT_WINDOW,
};

/// Number of yields before a rank sleeps. One is enough where all ranks arrive at the same time, as
/// each of the others has run by then.
const YIELDS: u32 = 8;
/// Number of polls for a small result before a spinning rank checks everything again: one or two
/// microseconds.
const SMALL_RESULT_POLLS: u32 = 64;
/// A yield to another waiting rank takes microseconds; to a busy process, a time slice of the
/// scheduler: milliseconds.
const LONG_YIELD: Duration = Duration::from_micros(500);
/// Number of waits without yielding after a long yield, minimum and maximum.
const SKIP_MIN: u32 = 64;
const SKIP_MAX: u32 = 1 << 13;
/// After this many short yields the back-off resets.
const SHORT_RESET: u32 = 1000;

/// Decides whether a waiting rank yields the CPU. It does not where another process keeps the CPU
/// for long: then a sleeping rank gets it back sooner.
#[derive(Debug, Default)]
pub(super) struct YieldBackoff {
    /// Remaining waits without yielding, and their number after the last long yield.
    skipped: u32,
    skip: u32,
    short_yields: u32,
}

impl YieldBackoff {
    /// Called once per wait.
    fn allows_yield(&mut self) -> bool {
        let allows_yield = self.skipped == 0;
        self.skipped = self.skipped.saturating_sub(1);
        allows_yield
    }

    /// Records the duration of a yield; false if it was too long to yield again.
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

impl Backend for Driver {
    fn is_busy(&self) -> bool {
        self.operations.is_busy()
            || self.p2p.is_busy()
            || !lock(&self.node.shared.submissions).is_empty()
            || self.drain_until.is_some()
    }

    /// The only function in which a rank blocks.
    fn drive(&mut self, until: Instant, done: &dyn Fn(&dyn Backend) -> bool) {
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
            // Inside a single node, all events but the end of a process are visible in memory, and
            // a rank that waits for such an end sleeps soon: no system call per poll.
            if self.listens() || now.duration_since(self.ticked) >= TICK {
                self.poll(Duration::ZERO);
            }
        }
    }

    fn poll_once(&mut self) {
        self.poll(Duration::ZERO);
        self.pump();
    }

    fn fail_after_panic(&mut self) {
        let detail = "the engine's thread panicked: a bug in the engine".into();
        self.abort_at_once(self.node.reason(ErrorKind::Io, self.node.rank(), detail), None);
    }

    fn close(&mut self, next: u64, until: Instant) {
        self.close_connections(next, until);
    }

    fn start_liveness(&mut self) {
        self.heartbeats.is_active = true;
    }

    fn watch_client(&self, client: BorrowedFd<'_>) -> io::Result<()> {
        self.node.poller.watch_edges(client, TOKEN_CLIENT)
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl Driver {
    /// Between two full polls: polls the word in memory that completes a small operation, if that
    /// is expected next, without disturbing the cache lines that the reducing rank writes.
    fn poll_small_result(&self) {
        let awaited = self.local.delivered < self.local.staged && self.is_oldest_small();
        let polls = if awaited { SMALL_RESULT_POLLS } else { 1 };
        for _ in 0..polls {
            std::hint::spin_loop();
            if awaited && self.node.shm.reduced_by(self.local.delivered).is_some() {
                return;
            }
        }
    }

    /// True where another rank on the same CPU is likely to need it for what this rank waits for,
    /// and only briefly.
    fn should_yield(&self) -> bool {
        self.node.is_crowded && self.is_oldest_small()
    }

    /// True if the last arriver reduces the oldest operation.
    fn is_oldest_small(&self) -> bool {
        let oldest = self.operations.active.front();
        oldest.is_some_and(|active| active.algorithm == ReduceAlgorithm::LastArriver)
    }

    /// True if data may arrive through sockets.
    fn listens(&self) -> bool {
        self.channel.as_ref().is_some_and(|channel| channel.tree.link_count() > 0)
            || self.p2p.is_connected()
    }

    fn sleep(&mut self, until: Instant) {
        let local = self.node.local();
        let reasons = self.sleep_reasons();
        self.node.shm.fall_asleep(local, reasons);
        // The last check, after the rank has published that it sleeps: earlier changes are seen
        // here, later ones wake it.
        if self.pump()
            || self.node.shared.pending.load(Ordering::SeqCst)
            || self.nothing_to_wait_for()
            || self.sleep_reasons() & !reasons != 0
        {
            self.node.shm.wake_up(local);
            return;
        }
        let now = Instant::now();
        let next_tick = self.ticked + TICK;
        let held_until = self.held_until.unwrap_or(next_tick);
        let timeout = until.min(next_tick).min(held_until).saturating_duration_since(now);
        self.node.shared.counters.sleeps.fetch_add(1, Ordering::Relaxed);
        self.poll(timeout.max(Duration::from_micros(50)));
        self.node.shm.wake_up(local);
    }

    /// The last check may have completed everything.
    fn nothing_to_wait_for(&self) -> bool {
        !self.is_busy()
    }

    fn sleep_reasons(&self) -> u32 {
        let rank = self.node.rank();
        let whole =
            self.operations.active.front().is_some_and(|active| active.is_made_in_place(rank));
        let mut reasons = WAIT_ABORT;
        if !self.local.ring.is_turn_certain(&self.node, &self.operations, self.local.staged) {
            reasons |= if whole { WAIT_END } else { WAIT_RESULT };
        }
        if self.channel.is_some() {
            reasons |= WAIT_INPUT;
        }
        if self.local.slots.is_wanted {
            reasons |= WAIT_SLOT;
        }
        if self.local.ring.wants_turn {
            reasons |= WAIT_TURN;
        }
        if !self.operations.waiting.is_empty() {
            reasons |= WAIT_WINDOW;
        }
        reasons
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
    fn long_yields_are_followed_by_waits_without_yielding() {
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
    fn short_yields_reset_the_backoff() {
        let mut yield_backoff = YieldBackoff::default();
        for _ in 0..2 {
            assert!(!yield_backoff.record_yield(LONG_YIELD));
            assert_eq!(skipped(&mut yield_backoff), SKIP_MIN);
            (0..=SHORT_RESET).for_each(|_| assert!(yield_backoff.record_yield(SHORT)));
        }
    }
}
