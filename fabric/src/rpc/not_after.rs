//! Not-after times: the time after which the receiver of a request must not start it.
//!
//! A caller that times out cannot withdraw a request that it has sent: the frame may be in a socket
//! buffer, or in the receive buffer of a stopped process, and be executed minutes later. (Resetting
//! the connection does not help: Linux delivers received data before it reports the reset.) A
//! guarded request therefore carries the time after which it must not be started, *by the clock of
//! its receiver*, which checks it when it reads the frame and again when it starts the request.
//!
//! That clock starts with the connection, and every reply carries its reading. When a reply
//! arrives, the caller knows that the clock has reached that reading. From then on both clocks are
//! assumed to run at the same rate within 10 %, and the margin is subtracted. A caller whose last
//! reading is old requests a new one first, with an empty request. A server that does not support
//! guarded requests replies without a reading and receives unguarded requests.

use std::time::Duration;

use super::lease::{Lease, LeaseError};
use crate::boot_instant::BootInstant;
use crate::deadline::Deadline;

/// Maximum age of a reading: a tenth of its age is lost from every guarded request.
pub(super) const READING_AGE_MAX: Duration = Duration::from_secs(5);
/// Usable part of the remaining time if the receiver's clock may be slower than the local clock.
const RATE_PERCENT: u32 = 90;

/// Conditions of the requests of one operation.
#[derive(Clone, Debug)]
pub struct NotAfter {
    /// The lease that they require.
    pub lease: Lease,
    /// Deadline of the whole operation: no request of it may be started after the caller was
    /// notified that it has failed.
    pub end: Deadline,
}

impl NotAfter {
    /// Time before which a request that is sent now must have been started.
    pub(super) async fn end(&self, deadline: Deadline) -> Result<BootInstant, LeaseError> {
        let lease_end = self.lease.wait_valid(deadline).await?;
        let end = BootInstant::now().after(self.end.remaining().unwrap_or_default());
        Ok(lease_end.map_or(end, |lease_end| lease_end.min(end)))
    }
}

/// The clock of a connection, at its server.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionClock(BootInstant);

impl ConnectionClock {
    pub(super) fn start() -> Self {
        Self(BootInstant::now())
    }

    /// Its reading in milliseconds; wraps around after 49 days; never 0.
    pub(super) fn reading(self) -> u32 {
        (BootInstant::now().since(self.0).as_millis() as u32).max(1)
    }

    /// The instant at which it shows `reading`, or the present if it already has; readings are less
    /// than 24 days away.
    pub(super) fn instant_of(self, reading: u32) -> BootInstant {
        let remaining_ms = reading.wrapping_sub(self.reading()).cast_signed().max(0);
        BootInstant::now().after(Duration::from_millis(u64::from(remaining_ms.unsigned_abs())))
    }
}

/// The caller's knowledge of the clock of its connection's server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PeerClock {
    /// No reply has arrived yet.
    #[default]
    Nothing,
    /// The server has no clock: an older version.
    Silence,
    /// The clock showed `reading` at `at` or later.
    Reading { reading: u32, at: BootInstant },
}

impl PeerClock {
    /// Records the reading of a reply.
    pub(super) fn now(reading: u32) -> Self {
        match reading {
            0 => Self::Silence,
            _ => Self::Reading { reading, at: BootInstant::now() },
        }
    }

    /// True without a reading, or if the reading is old.
    pub(super) fn is_old(&self) -> bool {
        match self {
            Self::Nothing => true,
            Self::Silence => false,
            Self::Reading { at, .. } => BootInstant::now().since(*at) > READING_AGE_MAX,
        }
    }

    /// A reading that the clock reaches at `end` at the latest; `None` if the server has no clock.
    pub(super) fn reading_before(&self, end: BootInstant) -> Option<u32> {
        let Self::Reading { reading, at } = self else { return None };
        let remaining_ms = end.since(*at).as_millis().min(u128::from(u32::MAX / 4)) as u32;
        Some(reading.wrapping_add((u64::from(remaining_ms) * u64::from(RATE_PERCENT) / 100) as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_reading_never_exceeds_the_true_time_even_with_a_slow_clock() {
        let at = BootInstant::now();
        for reading in [1, 1000, u32::MAX - 5] {
            let clock = PeerClock::Reading { reading, at };
            let end = at.after(Duration::from_secs(20));
            let advance = clock.reading_before(end).unwrap().wrapping_sub(reading);
            // After 20 s a clock that is 10 % slow has advanced by 18 s.
            assert_eq!(advance, 18_000);
        }
        let past = PeerClock::Reading { reading: 7, at: at.after(Duration::from_secs(9)) };
        assert_eq!(past.reading_before(at), Some(7));
        assert_eq!(PeerClock::now(0).reading_before(at), None);
        assert_eq!(PeerClock::Nothing.reading_before(at), None);
    }

    #[test]
    fn a_clock_handles_wraparound() {
        let clock = ConnectionClock::start();
        let ahead = clock.instant_of(clock.reading().wrapping_add(5_000)).remaining();
        assert!(ahead > Duration::from_secs(1) && ahead <= Duration::from_secs(5));
        assert_eq!(
            clock.instant_of(clock.reading().wrapping_sub(5_000)).remaining(),
            Duration::ZERO
        );
    }
}
