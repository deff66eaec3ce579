//! Until when a request may be begun by whoever receives it.
//!
//! A caller that gives up cannot take back what it has sent: the frame may lie in a socket, or in
//! the receive buffer of a process that is stopped, and be carried out minutes later. (A reset of
//! the connection does not help: Linux hands out what it has received before it reports a reset.)
//! So a guarded request names the moment after which nobody may begin it, *by the clock of its
//! receiver*, which looks at it when it reads the frame and again when it begins.
//!
//! That clock starts with the connection and is read aloud in every reply, so the caller knows a
//! moment when it had certainly reached that reading: when the reply was there. From then on both
//! count alike, give or take a tenth, which is taken off. A caller whose last reply is old asks for
//! another one first, with an empty request. A reply without a reading comes from a server that
//! knows nothing of this; it is sent requests as before.

use std::time::Duration;

use super::lease::{Lease, LeaseError};
use crate::boot_instant::BootInstant;
use crate::deadline::Deadline;

/// A reading that is older is asked for again: a tenth of it is lost of every guarded request.
pub(super) const READING_AGE_MAX: Duration = Duration::from_secs(5);
/// What is left of the time to the end when the receiver's clock may be slower than ours.
const RATE_PERCENT: u32 = 90;

/// What guards one operation's requests.
#[derive(Clone, Debug)]
pub struct NotAfter {
    /// The right that they need.
    pub lease: Lease,
    /// When the whole operation ends: nothing of it may happen once its caller was told that it
    /// has failed.
    pub end: Deadline,
}

impl NotAfter {
    /// When a request that is sent now must have been begun.
    pub(super) async fn end(&self, deadline: Deadline) -> Result<BootInstant, LeaseError> {
        let held = self.lease.wait_valid(deadline).await?;
        let end = BootInstant::now().after(self.end.remaining().unwrap_or_default());
        Ok(held.map_or(end, |held| held.min(end)))
    }
}

/// The clock of a connection, at its server.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionClock(BootInstant);

impl ConnectionClock {
    pub(super) fn start() -> Self {
        Self(BootInstant::now())
    }

    /// Its reading in milliseconds, over and over from the start after 49 days; never 0.
    pub(super) fn reading(self) -> u32 {
        (BootInstant::now().since(self.0).as_millis() as u32).max(1)
    }

    /// When it will show `reading`, or the present moment if it has; readings are less than 24 days
    /// away.
    pub(super) fn instant_of(self, reading: u32) -> BootInstant {
        let left = reading.wrapping_sub(self.reading()).cast_signed().max(0);
        BootInstant::now().after(Duration::from_millis(u64::from(left.unsigned_abs())))
    }
}

/// What a caller knows of the clock of its connection's server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PeerClock {
    /// There was no reply yet.
    #[default]
    Nothing,
    /// It does not say: an older version.
    Silence,
    /// It showed `reading` at `at`, or later.
    Reading { reading: u32, at: BootInstant },
}

impl PeerClock {
    /// A reply has arrived with this reading.
    pub(super) fn now(reading: u32) -> Self {
        match reading {
            0 => Self::Silence,
            _ => Self::Reading { reading, at: BootInstant::now() },
        }
    }

    /// Nothing is known, or it was long ago.
    pub(super) fn is_old(&self) -> bool {
        match self {
            Self::Nothing => true,
            Self::Silence => false,
            Self::Reading { at, .. } => BootInstant::now().since(*at) > READING_AGE_MAX,
        }
    }

    /// A reading that the clock shows at `end` at the latest; `None` if it has none.
    pub(super) fn reading_before(&self, end: BootInstant) -> Option<u32> {
        let Self::Reading { reading, at } = self else { return None };
        let left = end.since(*at).as_millis().min(u128::from(u32::MAX / 4)) as u32;
        Some(reading.wrapping_add((u64::from(left) * u64::from(RATE_PERCENT) / 100) as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_is_shown_before_the_moment_whose_it_is_also_by_a_slow_clock() {
        let at = BootInstant::now();
        for reading in [1, 1000, u32::MAX - 5] {
            let heard = PeerClock::Reading { reading, at };
            let end = at.after(Duration::from_secs(20));
            let named = heard.reading_before(end).unwrap().wrapping_sub(reading);
            // After 20 s a clock that is a tenth slow shows 18 s more.
            assert_eq!(named, 18_000);
        }
        let past = PeerClock::Reading { reading: 7, at: at.after(Duration::from_secs(9)) };
        assert_eq!(past.reading_before(at), Some(7));
        assert_eq!(PeerClock::now(0).reading_before(at), None);
        assert_eq!(PeerClock::Nothing.reading_before(at), None);
    }

    #[test]
    fn a_clock_knows_moments_over_its_turn() {
        let clock = ConnectionClock::start();
        let ahead = clock.instant_of(clock.reading().wrapping_add(5_000)).remaining();
        assert!(ahead > Duration::from_secs(1) && ahead <= Duration::from_secs(5));
        assert_eq!(
            clock.instant_of(clock.reading().wrapping_sub(5_000)).remaining(),
            Duration::ZERO
        );
    }
}
