//! Services over one store: which of them run, and which one collects garbage.
//!
//! A service that runs renews its row. The others remove the row once it has not changed for a
//! whole lease, by their own clocks. The collector is named by a row with an epoch: a service takes
//! it over when the collector's row is gone, and every transaction of a collector reads it, so a
//! former collector is fenced, however late it resumes.

use threefs_kv::{KeyRange, Operation, Transaction};

use crate::ops::OpError;
use crate::protocol::MetaError;
use crate::rows::{self, COLLECTOR, CollectorRow, KNOWING, ROUND, SERVICES, ServiceRow};

/// Adds this service.
pub(crate) struct Join {
    pub run_id: u64,
    /// No other process can have the store open: the other services are gone.
    pub alone: bool,
}

impl Operation for Join {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        if self.alone {
            txn.clear_range(KeyRange::prefix(SERVICES));
            txn.clear_range(KeyRange::prefix(KNOWING));
        }
        txn.set(&rows::knowing(self.run_id), []);
        let row = ServiceRow { renewal: 0, checked: 0, departures: 0 };
        Ok(rows::write(txn, &rows::service(self.run_id), &row)?)
    }
}

/// Result of a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Renewed {
    Alive,
    /// A service is gone: all removals must be checked again.
    CheckAgain {
        departures: u64,
    },
    /// Another service has removed this one.
    Removed,
}

/// Renews the row of this service and publishes up to which round it has checked the removals.
pub(crate) struct Renew {
    pub run_id: u64,
    pub checked: u64,
    /// Departures that the check has taken into account.
    pub departures: u64,
}

impl Operation for Renew {
    type Output = Renewed;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Renewed, OpError> {
        let key = rows::service(self.run_id);
        let Some(row) = rows::read::<ServiceRow>(txn, &key).await? else {
            return Ok(Renewed::Removed);
        };
        let departures = row.departures;
        let (checked, renewed) = match departures == self.departures {
            true => (self.checked, Renewed::Alive),
            false => (0, Renewed::CheckAgain { departures }),
        };
        rows::write(txn, &key, &ServiceRow { renewal: row.renewal + 1, checked, departures })?;
        Ok(renewed)
    }
}

/// All services that run.
pub(crate) struct ListServices;

impl Operation for ListServices {
    type Output = Vec<(u64, ServiceRow)>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let mut services = Vec::new();
        for (key, value) in txn.snapshot_range(&KeyRange::prefix(SERVICES), usize::MAX).await? {
            services.push((rows::run_of_key(&key)?, rows::decode(&key, &value)?));
        }
        Ok(services)
    }
}

/// Fails unless the service has its row: the others have not removed it, and the store answers.
pub(crate) struct CheckService {
    pub run_id: u64,
}

impl Operation for CheckService {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        if txn.snapshot_get(&rows::service(self.run_id)).await?.is_some() {
            return Ok(());
        }
        let detail = "this metadata service did not renew its row; use another one".into();
        Err(MetaError::Unavailable { detail }.into())
    }
}

/// Removes a service that has not renewed its row since. The others check all removals again: it
/// may have removed files that its clients have open without having stored holds for them.
pub(crate) struct RemoveService {
    pub run_id: u64,
    pub renewal: u64,
}

impl Operation for RemoveService {
    type Output = bool;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<bool, OpError> {
        let key = rows::service(self.run_id);
        let row = rows::read::<ServiceRow>(txn, &key).await?;
        if row.is_none_or(|row| row.renewal != self.renewal) {
            return Ok(false);
        }
        txn.clear(&key);
        txn.clear(&rows::knowing(self.run_id));
        for (key, value) in txn.range(&KeyRange::prefix(SERVICES), usize::MAX).await? {
            let row: ServiceRow = rows::decode(&key, &value)?;
            let departures = row.departures + 1;
            rows::write(txn, &key, &ServiceRow { checked: 0, departures, ..row })?;
        }
        Ok(true)
    }
}

/// Refuses the first snapshot while a service of an earlier release runs: it would write rows without
/// the epoch of their state. Conflicts with services that start.
pub(crate) async fn require_all_know_snapshots(txn: &mut Transaction) -> Result<(), OpError> {
    let services = txn.range(&KeyRange::prefix(SERVICES), usize::MAX).await?;
    let mut outdated = 0;
    for (key, _) in &services {
        let is_outdated = txn.get(&rows::knowing(rows::run_of_key(key)?)).await?.is_none();
        outdated += usize::from(is_outdated);
    }
    if outdated == 0 {
        return Ok(());
    }
    let detail = format!(
        "{outdated} of {} metadata services are of an earlier release, which does not know \
         snapshots: upgrade all of them",
        services.len()
    );
    Err(MetaError::Unavailable { detail }.into())
}

/// Returns the epoch of this service as the collector, which it becomes if there is none.
pub(crate) struct Lead {
    pub run_id: u64,
}

impl Operation for Lead {
    type Output = Option<CollectorRow>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let run_id = self.run_id;
        if txn.get(&rows::service(run_id)).await?.is_none() {
            return Ok(None);
        }
        let epoch = match rows::read::<CollectorRow>(txn, COLLECTOR).await? {
            None => 0,
            Some(row) if row.run_id == run_id => return Ok(Some(row)),
            Some(row) if txn.get(&rows::service(row.run_id)).await?.is_some() => return Ok(None),
            Some(row) => row.epoch,
        };
        let row = CollectorRow { epoch: epoch + 1, run_id };
        rows::write(txn, COLLECTOR, &row)?;
        Ok(Some(row))
    }
}

/// An operation of the collector; refused once another service is the collector.
pub(crate) struct Fenced<'a, O> {
    pub collector: CollectorRow,
    pub operation: &'a O,
}

impl<O: Operation<Error = OpError>> Operation for Fenced<'_, O> {
    type Output = O::Output;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<O::Output, OpError> {
        if rows::read(txn, COLLECTOR).await? != Some(self.collector) {
            return Err(OpError::NotCollector);
        }
        self.operation.run(txn).await
    }
}

/// Ends the current round if anything was queued in it. Returns the last round that has ended: what
/// is queued later is in a later round, because it reads the round and conflicts with its end.
pub(crate) struct EndRound {
    pub queue: &'static [u8],
}

impl Operation for EndRound {
    type Output = u64;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<u64, OpError> {
        let round = rows::round(txn).await?;
        let of_round = KeyRange::prefix(&[self.queue, &round.to_be_bytes()].concat());
        if txn.snapshot_range(&of_round, 1).await?.is_empty() {
            return Ok(round - 1);
        }
        rows::write(txn, ROUND, &(round + 1))?;
        Ok(round)
    }
}

/// The last round that has ended.
pub(crate) struct EndedRound;

impl Operation for EndedRound {
    type Output = u64;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<u64, OpError> {
        Ok(rows::round(txn).await? - 1)
    }
}
