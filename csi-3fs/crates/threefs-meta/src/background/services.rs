//! Several services over one store: renewal of this service's row, detection of services that are
//! gone, and the role of the collector.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use fabric::boot_instant::BootInstant;
use threefs_kv::Operation;

use crate::background::transaction;
use crate::ops::{self, OpError, Renewed};
use crate::tree::Tree;

/// Renewals in one lease.
const RENEWALS_PER_LEASE: u32 = 10;

impl Tree {
    /// Whether this service is the collector now.
    pub(crate) async fn lead(&self) -> Result<bool, OpError> {
        let lead = ops::Lead { run_id: self.open_files.run_id() };
        let row = self.store.transact(transaction(), &lead).await?;
        if self.services.set_collector(row)
            && let Some(row) = row
        {
            tracing::info!(epoch = row.epoch, "this service collects garbage");
        }
        Ok(row.is_some())
    }

    /// Whether clients of a service that is gone may not have reported their open files yet.
    pub(crate) fn waits_for_clients(&self) -> bool {
        self.services.departed_within(Duration::from_millis(self.config.gc_delay_ms))
    }

    /// Runs an operation as the collector.
    pub(crate) async fn as_collector<O>(&self, operation: &O) -> Result<O::Output, OpError>
    where
        O: Operation<Error = OpError>,
    {
        let collector = self.services.collector()?;
        self.store.transact(transaction(), &ops::Fenced { collector, operation }).await
    }

    /// Time between two renewals of this service's row.
    pub(crate) fn renewal_interval(&self) -> Duration {
        Duration::from_millis(self.config.service_lease_ms) / RENEWALS_PER_LEASE
    }

    /// Renews this service's row and removes those of services that are gone, until another service
    /// has removed this one.
    pub(crate) async fn removed_by_another(&self) {
        if self.services.alone {
            return std::future::pending().await;
        }
        let lease = Duration::from_millis(self.config.service_lease_ms);
        let mut observer = Observer::new(lease);
        let mut publish_activity_ms = 0;
        loop {
            match self.check_removals().await {
                Ok(Renewed::Removed) => return,
                Ok(Renewed::Alive | Renewed::CheckAgain { .. }) => {
                    if let Err(error) = self.remove_silent_services(&mut observer).await {
                        tracing::warn!(%error, "the other metadata services could not be checked");
                    }
                }
                Err(error) => tracing::warn!(%error, "this service could not renew its row"),
            }
            if self.uptime_ms() >= publish_activity_ms {
                match self.publish_activity().await {
                    Ok(()) => publish_activity_ms = self.uptime_ms() + self.activity_interval_ms(),
                    Err(error) => tracing::warn!(%error, "activity of clients not published"),
                }
            }
            tokio::time::sleep(self.renewal_interval()).await;
        }
    }

    pub(crate) async fn remove_silent_services(
        &self,
        observer: &mut Observer<u64, u64>,
    ) -> Result<(), OpError> {
        let services = self.store.transact(transaction(), &ops::ListServices).await?;
        let renewals: Vec<(u64, u64)> =
            services.iter().map(|(run_id, row)| (*run_id, row.renewal)).collect();
        let own = self.open_files.run_id();
        for (run_id, renewal) in observer.observe(BootInstant::now(), &renewals) {
            if run_id == own {
                continue;
            }
            let remove = ops::RemoveService { run_id, renewal };
            if self.store.transact(transaction(), &remove).await? {
                tracing::warn!(run_id, "a metadata service is gone: it did not renew its row");
            }
        }
        Ok(())
    }

    /// Another service is gone, or was before this one started.
    pub(crate) fn service_departed(&self) {
        self.services.note_departure();
        self.holds.list_former();
    }
}

/// Detects owners of rows whose rows do not change, by the clock of this service.
pub(crate) struct Observer<K, V> {
    lease: Duration,
    observed: Option<BootInstant>,
    /// The renewal of each owner, and how long it has been unchanged.
    unchanged: HashMap<K, (V, Duration)>,
}

impl<K: Copy + Eq + Hash, V: Copy + PartialEq> Observer<K, V> {
    pub(crate) fn new(lease: Duration) -> Self {
        Self { lease, observed: None, unchanged: HashMap::new() }
    }

    /// Returns owners, with their renewal, that have not renewed their rows for a whole lease.
    /// Time without observations hardly counts: if this service could not reach the store, the
    /// others could not either.
    pub(crate) fn observe(&mut self, now: BootInstant, rows: &[(K, V)]) -> Vec<(K, V)> {
        let elapsed = self.observed.map_or(Duration::ZERO, |at| now.since(at));
        let elapsed = elapsed.min(self.lease / 4);
        self.observed = Some(now);
        let before = std::mem::take(&mut self.unchanged);
        let mut silent = Vec::new();
        for (owner, renewal) in rows {
            let unchanged = match before.get(owner) {
                Some((known, unchanged)) if known == renewal => *unchanged + elapsed,
                _ => Duration::ZERO,
            };
            if unchanged >= self.lease {
                silent.push((*owner, *renewal));
            }
            self.unchanged.insert(*owner, (*renewal, unchanged));
        }
        silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_gone_after_a_lease_without_renewal_while_this_one_reads_the_store() {
        let start = BootInstant::now();
        let at = |ms: u64| start.after(Duration::from_millis(ms));
        let mut observer = Observer::new(Duration::from_millis(1_000));
        for ms in (0..1_000).step_by(100) {
            let services = [(1, ms), (2, 7)];
            assert!(observer.observe(at(ms), &services).is_empty());
        }
        assert_eq!(observer.observe(at(1_000), &[(1, 8), (2, 7)]), [(2, 7)]);
        // The store was unavailable for a minute: no service could renew its row.
        assert!(observer.observe(at(61_000), &[(1, 8)]).is_empty());
        assert!(observer.observe(at(61_100), &[(1, 9)]).is_empty());
        // A service that returns under another run is a new one.
        assert!(observer.observe(at(61_200), &[(3, 7)]).is_empty());
    }
}
