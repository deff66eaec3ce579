//! Batch: commits that are executed by one request, until each has its result.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use etcd_client::{Txn, TxnOp, TxnOpResponse};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::lane::{Lane, Outcome};
use super::members::{CallError, Members};
use super::plan::{Counter, Counters, Plan, counters_of};
use super::refusals;
use super::rows::{Rows, unsigned};
use crate::layer::Write;
use crate::{Commit, KvError, Versionstamp};

/// Age after which a commit that was certainly not executed is returned as unavailable: longer
/// than an election.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// A commit that waits for its result.
pub(crate) struct Job {
    pub commit: Commit,
    pub since: Instant,
    pub done: oneshot::Sender<Result<Versionstamp, KvError>>,
}

impl Job {
    /// An error means that the caller no longer waits.
    pub(crate) fn reply(self, result: Result<Versionstamp, KvError>) {
        let _ = self.done.send(result);
    }
}

/// Bounds of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Maximum number of comparisons, and of operations.
    pub operations: usize,
    /// Maximum bytes.
    pub bytes: usize,
}

/// What a batch needs of its store.
pub(crate) struct Shared {
    pub members: Arc<Members>,
    pub rows: Rows,
    pub bounds: Bounds,
    /// Number of the next row with a stamp, within one version.
    pub stamps: AtomicU64,
}

impl Shared {
    /// A stamp that is not above that of the next commit.
    fn stamp(&self) -> Versionstamp {
        // Two bytes wrap; the guard of the row detects a repetition within one version.
        Versionstamp::new(self.members.newest(), self.stamps.fetch_add(1, SeqCst) as u16)
    }
}

/// A batch with its counters, which no other batch in flight uses.
pub(crate) struct Batch {
    pub jobs: Vec<Job>,
    pub counters: Counters,
    /// Counters that were read after the commits arrived.
    fresh: BTreeSet<Vec<u8>>,
}

impl Batch {
    pub(crate) fn new(jobs: Vec<Job>, counters: Counters) -> Self {
        Self { jobs, counters, fresh: BTreeSet::new() }
    }

    /// Executes the batch; returns the revision and the written keys.
    pub(crate) async fn run(
        &mut self,
        shared: &Shared,
        lane: &mut Lane,
    ) -> Option<(u64, Vec<Vec<u8>>)> {
        loop {
            if let Err(error) = self.load_counters(shared).await {
                self.not_executed(shared, error);
                if self.jobs.is_empty() {
                    return None;
                }
                continue;
            }
            let commits = self.jobs.iter().map(|job| &job.commit);
            let mut plan = Plan::new(commits, &self.counters, || shared.stamp());
            if self.forget_stale_counters(&plan) {
                continue;
            }
            let writes = plan.writes();
            if let Some(error) = too_large(&plan, &writes, shared) {
                // A batch of several commits was chosen to fit.
                plan.refused.extend(plan.admitted.drain(..).map(|index| (index, error.clone())));
            }
            if plan.admitted.is_empty() {
                let refused = self.verify(shared, plan.refused).await;
                self.settle(refused.into_iter().map(|(index, error)| (index, Err(error))));
                return None;
            }
            match lane.execute(&plan.guards, &writes).await {
                Outcome::Applied(revision) => {
                    plan.applied(revision, &mut self.counters);
                    // Fits: a batch is far shorter than 2^16.
                    let stamps = plan.admitted.iter().enumerate().map(|(order, index)| {
                        (*index, Ok(Versionstamp::new(revision, order as u16)))
                    });
                    let refused = self.verify(shared, plan.refused).await;
                    let refused = refused.into_iter().map(|(index, error)| (index, Err(error)));
                    let results: Vec<_> = stamps.chain(refused).collect();
                    self.settle(results);
                    let keys = plan.layer.outcomes().map(|(key, _)| key.clone()).collect();
                    return Some((revision, keys));
                }
                Outcome::Refused(observed) => {
                    let losers = plan.losers(&observed, &mut self.counters);
                    // The reply contains only the counters that were guarded.
                    self.fresh.extend(plan.guarded_counters().cloned());
                    // Commits that conflict with a loser only are planned again.
                    self.settle(losers.into_iter().map(|index| (index, Err(KvError::Conflict))));
                    self.expire(|| {
                        shared
                            .members
                            .unavailable("other processes change the same counters".into())
                    });
                }
                Outcome::NotExecuted(detail) => {
                    self.expire(|| shared.members.unavailable(detail.clone()));
                }
                Outcome::Unknown(detail) => {
                    let error = KvError::CommitUnknown { detail };
                    self.counters.clear();
                    self.jobs.drain(..).for_each(|job| job.reply(Err(error.clone())));
                }
                Outcome::Failed(error) => {
                    self.jobs.drain(..).for_each(|job| job.reply(Err(error.clone())));
                }
            }
            if self.jobs.is_empty() {
                return None;
            }
        }
    }

    /// Reads the counters that are not known.
    async fn load_counters(&mut self, shared: &Shared) -> Result<(), CallError> {
        let all = self.jobs.iter().flat_map(|job| counters_of(&job.commit));
        let missing: BTreeSet<_> =
            all.filter(|key| !self.counters.contains_key(*key)).cloned().collect();
        let missing: Vec<Vec<u8>> = missing.into_iter().collect();
        for keys in missing.chunks(shared.bounds.operations.max(1)) {
            let reads: Vec<_> =
                keys.iter().map(|key| TxnOp::get(shared.rows.row(key), None)).collect();
            let txn = Txn::new().and_then(reads);
            let deadline = Instant::now() + super::members::CALL_TIMEOUT;
            let sent = shared.members.any(shared.members.preferred(), deadline, |mut client, _| {
                let txn = txn.clone();
                async move { client.txn(txn).await }
            });
            let replies = sent.await?.0.op_responses();
            if replies.len() != keys.len() {
                let detail = format!("{} replies to {} reads", replies.len(), keys.len());
                return Err(CallError::Refused(shared.members.broken(detail)));
            }
            for (key, reply) in keys.iter().zip(replies) {
                let TxnOpResponse::Get(mut reply) = reply else {
                    let detail = "a read was answered by another reply".into();
                    return Err(CallError::Refused(shared.members.broken(detail)));
                };
                let counter = reply.take_kvs().pop().map_or_else(Counter::default, |row| Counter {
                    revision: unsigned(row.mod_revision()),
                    value: Some(row.into_key_value().1),
                });
                self.counters.insert(key.clone(), counter);
                self.fresh.insert(key.clone());
            }
        }
        Ok(())
    }

    /// A commit is not refused because of counters that another process may have changed since.
    fn forget_stale_counters(&mut self, plan: &Plan) -> bool {
        let mut stale = BTreeSet::new();
        for (index, error) in &plan.refused {
            if let (KvError::OverBound { .. } | KvError::BadRow { .. }, Some(job)) =
                (error, self.jobs.get(*index))
            {
                let keys = counters_of(&job.commit);
                stale.extend(keys.filter(|key| !self.fresh.contains(*key)).cloned());
            }
        }
        stale.iter().for_each(|key| drop(self.counters.remove(key)));
        !stale.is_empty()
    }

    /// The final errors of refused commits.
    async fn verify(
        &self,
        shared: &Shared,
        refused: Vec<(usize, KvError)>,
    ) -> Vec<(usize, KvError)> {
        let commit = |index: usize| self.jobs.get(index).map(|job| &job.commit);
        let refused = refused.into_iter();
        let refused = refused.filter_map(|(index, error)| Some((index, commit(index)?, error)));
        refusals::verify(&shared.members, &shared.rows, refused.collect()).await
    }

    fn not_executed(&mut self, shared: &Shared, error: CallError) {
        match error {
            CallError::Failed(detail) => {
                self.expire(|| shared.members.unavailable(detail.clone()));
            }
            error => {
                let error = shared.members.error(error);
                self.jobs.drain(..).for_each(|job| job.reply(Err(error.clone())));
            }
        }
    }

    /// Replies to the commits that have waited too long.
    fn expire(&mut self, error: impl Fn() -> KvError) {
        for job in self.jobs.extract_if(.., |job| job.since.elapsed() >= PATIENCE) {
            job.reply(Err(error()));
        }
    }

    /// Replies to commits by index.
    fn settle(
        &mut self,
        results: impl IntoIterator<Item = (usize, Result<Versionstamp, KvError>)>,
    ) {
        let mut jobs: Vec<Option<Job>> = self.jobs.drain(..).map(Some).collect();
        for (index, result) in results {
            if let Some(job) = jobs.get_mut(index).and_then(Option::take) {
                job.reply(result);
            }
        }
        self.jobs.extend(jobs.into_iter().flatten());
    }
}

/// Whether the request exceeds the server's bounds.
fn too_large(plan: &Plan, writes: &[Write], shared: &Shared) -> Option<KvError> {
    let Bounds { operations, bytes } = shared.bounds;
    let overhead = shared.rows.overhead() + 32;
    let written: usize = writes
        .iter()
        .map(|write| match write {
            Write::Put { key, value } => key.len() + value.len() + overhead,
            Write::Delete { key } => key.len() + overhead,
            Write::DeleteRange { range } => range.start.len() + range.end.len() + 2 * overhead,
        })
        .sum();
    let guarded: usize = plan.guards.iter().map(|it| it.guard.bytes() + 4 * overhead).sum();
    [
        // One of each is for the marker.
        ("reads", plan.guards.len() + 1, operations),
        ("mutations", writes.len() + 1, operations),
        ("transaction", written + guarded, bytes),
    ]
    .into_iter()
    .find(|(_, size, size_max)| size > size_max)
    .map(|(what, size, size_max)| KvError::TooLarge { what, size, size_max })
}
