//! Terms of a manager as the primary: takeover, renewal and release of the lease.

use std::sync::PoisonError;
use std::time::Duration;

use fabric::deadline::Deadline;
use threefs_core::time::Millis;

use crate::manager::{Manager, Role, deadline};
use crate::ops::{
    AcquireLease, Fence, HoldChains, InspectLease, LeaseRow, OpError, ReleaseLease, RenewLease,
};
use crate::takeover::LeaseState;
use crate::view::View;

/// Time for the release of the lease at shutdown.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

impl Manager {
    pub(crate) async fn contend(&self, role: &mut Role, now: Millis) -> Result<(), OpError> {
        let row = self.store.transact(deadline(), &InspectLease).await?;
        let address = row.holder.as_ref().map(|holder| holder.address.clone());
        *role = Role::Contender { holder: address.unwrap_or_default() };
        let opening = self.store.exclusive_opening();
        let Some(settles_ms) = self.may_take_over(&row, opening, now) else { return Ok(()) };
        let acquire = AcquireLease {
            observed_lease: &row,
            manager: self.id,
            address: &self.address,
            opening,
            owner: self.owner.as_ref(),
        };
        let (fence, mut loaded) = self.store.transact(deadline(), &acquire).await?;
        while loaded.restored {
            loaded = self.store.transact(deadline(), &HoldChains(fence)).await?;
        }
        tracing::info!(epoch = fence.epoch, address = self.address, "became primary");
        let view = View::new(fence, loaded, settles_ms, now);
        if view.unpublished {
            tracing::warn!(
                "storage services serve once a metadata service has published the epochs of volumes"
            );
        }
        self.publish(&view);
        *role = Role::Primary(Box::new(view));
        Ok(())
    }

    /// The time after a takeover until the leases of former primaries have ended; `None` if the primary
    /// may not be replaced yet.
    fn may_take_over(&self, row: &LeaseRow, opening: Option<u128>, now: Millis) -> Option<u64> {
        let timers = &self.timers;
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        let epoch = row.holder.as_ref().map_or(0, |holder| holder.epoch);
        let state = LeaseState { epoch, renewal: row.renewal, routing: row.routing };
        watch.observe(state, now, timers);
        let (is_own, all_ended) = match &row.holder {
            None => (false, true),
            // It is released only if all earlier primaries have ended as well.
            Some(holder) if holder.is_released() => (false, true),
            // This manager has stepped down. An earlier primary may still answer, unless no other process
            // can have the store open.
            Some(holder) if holder.manager == self.id => (true, opening.is_some()),
            // Written through another opening of a store that only one process can open.
            Some(holder) => {
                let is_dead = holder.opening.is_some_and(|it| Some(it) != opening);
                (false, opening.is_some() && is_dead)
            }
        };
        if all_ended {
            return Some(timers.node_failure_ms);
        }
        if is_own {
            return Some(timers.settles_ms());
        }
        let silence_ms = match opening {
            Some(_) => timers.primary_lease_ms,
            None => timers.takeover_ms(),
        };
        watch.is_silent(silence_ms, timers).then(|| timers.settles_ms())
    }

    /// Ends the term of a primary at shutdown, so that a contender takes over at once. While a former
    /// primary may still grant leases, the lease is not released: the next one has to wait for them.
    pub(crate) async fn release(&self, now: Millis) {
        let mut role = self.role.lock().await;
        let Role::Primary(view) = &*role else { return };
        let (release, is_settled) =
            (ReleaseLease(view.fence), view.former_leases_ms(now).is_none());
        // From here on it grants no lease.
        *role = Role::contender();
        if self.store.exclusive_opening().is_some() || !is_settled {
            return;
        }
        match self.store.transact(Deadline::after(RELEASE_TIMEOUT), &release).await {
            Ok(()) => tracing::info!(epoch = release.0.epoch, "released the lease"),
            Err(error) => tracing::warn!(%error, "the lease was not released"),
        }
    }

    /// Renews a lease that is due, without locking the role: the commit waits for a disk, and must
    /// not block heartbeats, which nodes need to keep their leases.
    pub(crate) async fn renew(&self, now: Millis) -> Result<Option<Fence>, OpError> {
        let interval_ms = match self.store.exclusive_opening() {
            Some(_) => self.timers.primary_lease_ms / 3,
            None => self.timers.renewal_ms(),
        };
        let fence = match &*self.role.lock().await {
            Role::Primary(view) if now.since(view.renewed_at) >= interval_ms => view.fence,
            _ => return Ok(None),
        };
        self.store.transact(deadline(), &RenewLease(fence)).await?;
        Ok(Some(fence))
    }
}
