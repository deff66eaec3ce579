//! Leases: rights that requests require and that expire unless they are renewed.

use std::sync::Arc;

use tokio::sync::watch;

use crate::boot_instant::BootInstant;
use crate::deadline::Deadline;

/// Reason why a lease is not held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaseError {
    /// It was closed permanently.
    Lost,
    /// It was not held before the deadline.
    TimedOut,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Open,
    Until(BootInstant),
    Lost,
}

/// A right that requests require and that expires unless it is extended. Clones share its state.
#[derive(Clone, Debug)]
pub struct Lease(Arc<watch::Sender<State>>);

impl Default for Lease {
    /// A lease that is always held.
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(State::Open)))
    }
}

impl Lease {
    /// Extends the lease until this instant: no request that is sent before it is started after it,
    /// and later requests wait. A closed lease stays closed.
    pub fn renew_until(&self, end: BootInstant) {
        self.0.send_if_modified(|state| match state {
            State::Lost => false,
            _ => {
                *state = State::Until(end);
                true
            }
        });
    }

    /// Closes the lease permanently.
    pub fn revoke(&self) {
        self.0.send_replace(State::Lost);
    }

    /// Waits until the lease is held; returns its expiry, if it has one.
    pub(super) async fn wait_valid(
        &self,
        deadline: Deadline,
    ) -> Result<Option<BootInstant>, LeaseError> {
        let mut state = self.0.subscribe();
        loop {
            match *state.borrow_and_update() {
                State::Open => return Ok(None),
                State::Until(end) if end > BootInstant::now() => return Ok(Some(end)),
                State::Until(_) => {}
                State::Lost => return Err(LeaseError::Lost),
            }
            match tokio::time::timeout_at(deadline.instant().into(), state.changed()).await {
                Ok(Ok(())) => {}
                _ => return Err(LeaseError::TimedOut),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_fence_admits_requests_while_the_lease_is_held() {
        let soon = || Deadline::after(Duration::from_millis(20));
        let lease = Lease::default();
        assert_eq!(lease.wait_valid(soon()).await, Ok(None));
        let end = BootInstant::now().after(Duration::from_secs(60));
        lease.renew_until(end);
        assert_eq!(lease.wait_valid(soon()).await, Ok(Some(end)));
        lease.renew_until(BootInstant::now());
        assert_eq!(lease.wait_valid(soon()).await, Err(LeaseError::TimedOut));
        let waits = tokio::spawn({
            let lease = lease.clone();
            async move { lease.wait_valid(Deadline::after(Duration::from_secs(60))).await }
        });
        lease.renew_until(end);
        assert_eq!(waits.await.unwrap(), Ok(Some(end)));
        lease.revoke();
        lease.renew_until(end);
        assert_eq!(lease.wait_valid(soon()).await, Err(LeaseError::Lost));
    }
}
