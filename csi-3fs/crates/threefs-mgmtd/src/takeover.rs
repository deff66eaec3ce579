//! When a contender takes over from a primary that does not renew its lease. Pure.
//!
//! Safety does not depend on this: each write requires the holder row, and a primary that follows
//! another one waits for the leases that the former one may still grant ([`Timers::settles_ms`]).
//! So the time is short, and nodes reach the next primary before their leases end.

use threefs_core::ids::RoutingVersion;
use threefs_core::time::Millis;

use crate::config::Timers;

/// What a contender reads: each change is a sign of life of the primary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseState {
    /// The epoch of the holder.
    pub epoch: u64,
    /// The number of renewals.
    pub renewal: u64,
    /// The version of the routing: a primary that changes chains may renew late.
    pub routing: RoutingVersion,
}

/// What a manager has observed of the lease.
#[derive(Clone, Debug, Default)]
pub struct LeaseWatch {
    last: Option<Observation>,
    /// When the holder changed, as far as it has been observed.
    changes: Vec<Millis>,
}

#[derive(Clone, Copy, Debug)]
struct Observation {
    state: LeaseState,
    at: Millis,
    /// Time in which the lease was readable and unchanged.
    silent_ms: u64,
}

impl LeaseWatch {
    /// Records the lease as read after `now`.
    ///
    /// Time between two readings counts in part only: while neither this process nor the store ran,
    /// the primary could not renew either.
    pub fn observe(&mut self, state: LeaseState, now: Millis, timers: &Timers) {
        let counted_max = (timers.takeover_ms() / 4).max(2 * timers.scan_ms);
        let silent_ms = match self.last {
            Some(last) if last.state == state => {
                last.silent_ms + now.since(last.at).min(counted_max)
            }
            _ => 0,
        };
        if self.last.is_some_and(|last| last.state.epoch != state.epoch) {
            self.changes.push(now);
        }
        let window_ms = timers.settles_ms().saturating_mul(2);
        self.changes.retain(|at| now.since(*at) < window_ms);
        self.last = Some(Observation { state, at: now, silent_ms });
    }

    /// Whether the primary has been silent for `base_ms`, which doubles with each recent change of the
    /// primary, up to the whole lease: if the store is so slow that renewals are late, the primaries
    /// must not alternate.
    #[must_use]
    pub fn is_silent(&self, base_ms: u64, timers: &Timers) -> bool {
        let doublings = self.changes.len().min(16) as u32;
        let needed_ms = base_ms.saturating_mul(1 << doublings).min(timers.primary_lease_ms);
        self.last.is_some_and(|last| last.silent_ms >= needed_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMERS: Timers = Timers { node_failure_ms: 1000, primary_lease_ms: 3000, scan_ms: 50 };

    fn state(epoch: u64, renewal: u64) -> LeaseState {
        LeaseState { epoch, renewal, ..LeaseState::default() }
    }

    /// Readings at intervals of 50 ms; the time until the lease counts as silent.
    fn silent_after(watch: &mut LeaseWatch, state: LeaseState, from: Millis) -> u64 {
        for at in (0..).step_by(50).map(|ms| from.after(ms)) {
            watch.observe(state, at, &TIMERS);
            if watch.is_silent(TIMERS.takeover_ms(), &TIMERS) {
                return at.since(from);
            }
        }
        0
    }

    #[test]
    fn a_lease_without_renewals_is_silent_after_the_takeover_time() {
        let mut watch = LeaseWatch::default();
        for renewal in 0..100 {
            watch.observe(state(1, renewal), Millis(50 * renewal), &TIMERS);
            assert!(!watch.is_silent(TIMERS.takeover_ms(), &TIMERS));
        }
        let from = Millis(5000);
        assert_eq!(silent_after(&mut watch, state(1, 100), from), TIMERS.takeover_ms());
    }

    #[test]
    fn a_changed_routing_is_a_sign_of_life() {
        let mut watch = LeaseWatch::default();
        for version in 0..100 {
            let state = LeaseState { routing: RoutingVersion(version), ..state(1, 7) };
            watch.observe(state, Millis(50 * version), &TIMERS);
            assert!(!watch.is_silent(TIMERS.takeover_ms(), &TIMERS));
        }
    }

    /// The store was unavailable, or the contender was stopped: the primary gets time to renew.
    #[test]
    fn time_without_readings_counts_in_part() {
        let mut watch = LeaseWatch::default();
        watch.observe(state(1, 7), Millis(0), &TIMERS);
        watch.observe(state(1, 7), Millis(60_000), &TIMERS);
        assert!(!watch.is_silent(TIMERS.takeover_ms(), &TIMERS));
        // Slow readings delay a takeover, and do not prevent it.
        for reading in 2..20 {
            watch.observe(state(1, 7), Millis(60_000 * reading), &TIMERS);
        }
        assert!(watch.is_silent(TIMERS.takeover_ms(), &TIMERS));
    }

    #[test]
    fn each_recent_change_of_the_primary_doubles_the_time_up_to_the_lease() {
        let mut watch = LeaseWatch::default();
        let (mut now, mut times) = (Millis(0), Vec::new());
        for epoch in 1..6 {
            let silent_ms = silent_after(&mut watch, state(epoch, 0), now);
            times.push(silent_ms);
            now = now.after(silent_ms + 50);
        }
        assert_eq!(times, [300, 600, 1200, 2400, 3000]);
        // After a quiet time the first one counts again.
        let renewals = 2 * TIMERS.settles_ms() / 50 + 1;
        for renewal in 1..=renewals {
            watch.observe(state(5, renewal), now.after(50 * renewal), &TIMERS);
        }
        let now = now.after(50 * renewals + 50);
        assert_eq!(silent_after(&mut watch, state(5, renewals + 1), now), TIMERS.takeover_ms());
    }
}
