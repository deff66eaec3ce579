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

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::deadline::Deadline;
use crate::moment::Moment;

/// A reading that is older is asked for again: a tenth of it is lost of every guarded request.
pub(super) const HEARD_MAX: Duration = Duration::from_secs(5);
/// What is left of the time to the end when the receiver's clock may be slower than ours.
const RATE_PERCENT: u32 = 90;

/// Who has lost the right that a fence stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stopped {
    /// For good.
    Closed,
    /// It was not held before the deadline.
    TimedOut,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Open,
    Until(Moment),
    Closed,
}

/// A right that requests need and that ends by itself unless it is prolonged. Clones are the same.
#[derive(Clone, Debug)]
pub struct Fence(Arc<watch::Sender<State>>);

impl Default for Fence {
    /// A fence that lets everything pass.
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(State::Open)))
    }
}

impl Fence {
    /// From now on the right is held until this moment: nothing that is sent before may be begun
    /// after it, and what comes later waits. A closed fence stays closed.
    pub fn hold_until(&self, end: Moment) {
        self.0.send_if_modified(|state| match state {
            State::Closed => false,
            _ => {
                *state = State::Until(end);
                true
            }
        });
    }

    /// The right is lost for good.
    pub fn close(&self) {
        self.0.send_replace(State::Closed);
    }

    /// Waits until the right is held; until when, if it ends.
    pub(super) async fn pass(&self, deadline: Deadline) -> Result<Option<Moment>, Stopped> {
        let mut state = self.0.subscribe();
        loop {
            match *state.borrow_and_update() {
                State::Open => return Ok(None),
                State::Until(end) if end > Moment::now() => return Ok(Some(end)),
                State::Until(_) => {}
                State::Closed => return Err(Stopped::Closed),
            }
            match tokio::time::timeout_at(deadline.instant().into(), state.changed()).await {
                Ok(Ok(())) => {}
                _ => return Err(Stopped::TimedOut),
            }
        }
    }
}

/// What guards one operation's requests.
#[derive(Clone, Debug)]
pub struct Guard {
    /// The right that they need.
    pub fence: Fence,
    /// When the whole operation ends: nothing of it may happen once its caller was told that it
    /// has failed.
    pub end: Deadline,
}

impl Guard {
    /// When a request that is sent now must have been begun.
    pub(super) async fn end(&self, deadline: Deadline) -> Result<Moment, Stopped> {
        let held = self.fence.pass(deadline).await?;
        let end = Moment::now().after(self.end.remaining().unwrap_or_default());
        Ok(held.map_or(end, |held| held.min(end)))
    }
}

/// The clock of a connection, at its server.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionClock(Moment);

impl ConnectionClock {
    pub(super) fn start() -> Self {
        Self(Moment::now())
    }

    /// Its reading in milliseconds, over and over from the start after 49 days; never 0.
    pub(super) fn reading(self) -> u32 {
        (Moment::now().since(self.0).as_millis() as u32).max(1)
    }

    /// When it will show `reading`, or the present moment if it has; readings are less than 24 days
    /// away.
    pub(super) fn moment_of(self, reading: u32) -> Moment {
        let left = reading.wrapping_sub(self.reading()).cast_signed().max(0);
        Moment::now().after(Duration::from_millis(u64::from(left.unsigned_abs())))
    }
}

/// What a caller knows of the clock of its connection's server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Heard {
    /// There was no reply yet.
    #[default]
    Nothing,
    /// It does not say: an older version.
    Silence,
    /// It showed `reading` at `at`, or later.
    Reading { reading: u32, at: Moment },
}

impl Heard {
    /// A reply has arrived with this reading.
    pub(super) fn now(reading: u32) -> Self {
        match reading {
            0 => Self::Silence,
            _ => Self::Reading { reading, at: Moment::now() },
        }
    }

    /// Nothing is known, or it was long ago.
    pub(super) fn is_old(&self) -> bool {
        match self {
            Self::Nothing => true,
            Self::Silence => false,
            Self::Reading { at, .. } => Moment::now().since(*at) > HEARD_MAX,
        }
    }

    /// A reading that the clock shows at `end` at the latest; `None` if it has none.
    pub(super) fn reading_before(&self, end: Moment) -> Option<u32> {
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
        let at = Moment::now();
        for reading in [1, 1000, u32::MAX - 5] {
            let heard = Heard::Reading { reading, at };
            let end = at.after(Duration::from_secs(20));
            let named = heard.reading_before(end).unwrap().wrapping_sub(reading);
            // After 20 s a clock that is a tenth slow shows 18 s more.
            assert_eq!(named, 18_000);
        }
        let past = Heard::Reading { reading: 7, at: at.after(Duration::from_secs(9)) };
        assert_eq!(past.reading_before(at), Some(7));
        assert_eq!(Heard::now(0).reading_before(at), None);
        assert_eq!(Heard::Nothing.reading_before(at), None);
    }

    #[test]
    fn a_clock_knows_moments_over_its_turn() {
        let clock = ConnectionClock::start();
        let ahead = clock.moment_of(clock.reading().wrapping_add(5_000)).remaining();
        assert!(ahead > Duration::from_secs(1) && ahead <= Duration::from_secs(5));
        assert_eq!(
            clock.moment_of(clock.reading().wrapping_sub(5_000)).remaining(),
            Duration::ZERO
        );
    }

    #[tokio::test]
    async fn a_fence_lets_pass_what_comes_while_the_right_is_held() {
        let soon = || Deadline::after(Duration::from_millis(20));
        let fence = Fence::default();
        assert_eq!(fence.pass(soon()).await, Ok(None));
        let end = Moment::now().after(Duration::from_secs(60));
        fence.hold_until(end);
        assert_eq!(fence.pass(soon()).await, Ok(Some(end)));
        fence.hold_until(Moment::now());
        assert_eq!(fence.pass(soon()).await, Err(Stopped::TimedOut));
        let waits = tokio::spawn({
            let fence = fence.clone();
            async move { fence.pass(Deadline::after(Duration::from_secs(60))).await }
        });
        fence.hold_until(end);
        assert_eq!(waits.await.unwrap(), Ok(Some(end)));
        fence.close();
        fence.hold_until(end);
        assert_eq!(fence.pass(soon()).await, Err(Stopped::Closed));
    }
}
