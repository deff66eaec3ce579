//! Committer: takes the commits that wait and executes them in batches, one after the other: a
//! batch holds the lock of the store until the standby has acknowledged it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::lane::{Decided, Lane, Outcome};
use super::server::Server;
use crate::watch::Watches;
use crate::{Commit, KvError, Mutation, Versionstamp};

/// Maximum number of commits of a batch.
const BATCH_MAX: usize = 512;
/// Maximum bytes of a batch of several commits, for its latency.
const BATCH_BYTES_MAX: usize = 4 << 20;
/// Age after which a commit that was certainly not executed is returned as unavailable.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause after a batch that was not executed.
const PAUSE: Duration = Duration::from_millis(50);

/// A commit that waits for its result.
pub(crate) struct Job {
    pub commit: Commit,
    pub since: Instant,
    pub done: oneshot::Sender<Result<Versionstamp, KvError>>,
}

impl Job {
    /// An error means that the caller no longer waits.
    fn reply(self, result: Result<Versionstamp, KvError>) {
        let _ = self.done.send(result);
    }
}

pub(crate) struct Committer {
    server: Arc<Server>,
    jobs: mpsc::Receiver<Job>,
    /// Taken from the queue, but too large for the last batch.
    next: Option<Job>,
    lane: Lane,
    watches: Watches,
}

impl Committer {
    pub(crate) fn new(server: Arc<Server>, jobs: mpsc::Receiver<Job>, watches: Watches) -> Self {
        let lane = Lane::new(Arc::clone(&server));
        Self { server, jobs, next: None, lane, watches }
    }

    /// Runs until the store is closed.
    pub(crate) async fn run(mut self) {
        loop {
            let first = match self.next.take() {
                Some(job) => job,
                None => match self.jobs.recv().await {
                    Some(job) => job,
                    None => return,
                },
            };
            let batch = self.fill(first);
            self.execute(batch).await;
        }
    }

    fn fill(&mut self, first: Job) -> Vec<Job> {
        let mut bytes = bytes_of(&first.commit);
        let mut batch = vec![first];
        while batch.len() < BATCH_MAX
            && let Ok(job) = self.jobs.try_recv()
        {
            bytes += bytes_of(&job.commit);
            if bytes > BATCH_BYTES_MAX {
                self.next = Some(job);
                break;
            }
            batch.push(job);
        }
        batch
    }

    /// Executes a batch until each commit has its result.
    async fn execute(&mut self, mut batch: Vec<Job>) {
        while !batch.is_empty() {
            let commits: Vec<&Commit> = batch.iter().map(|job| &job.commit).collect();
            let error = match self.lane.execute(&commits).await {
                Outcome::Decided(Decided { results, written }) => {
                    if let Some((version, keys)) = written {
                        self.watches.written(version, &keys);
                    }
                    batch.into_iter().zip(results).for_each(|(job, result)| job.reply(result));
                    return;
                }
                Outcome::NotExecuted(detail) => {
                    let error = self.server.unavailable(detail);
                    for job in batch.extract_if(.., |job| job.since.elapsed() >= PATIENCE) {
                        job.reply(Err(error.clone()));
                    }
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                Outcome::Unknown(detail) => KvError::CommitUnknown { detail },
                Outcome::Failed(error) => error,
            };
            batch.drain(..).for_each(|job| job.reply(Err(error.clone())));
        }
    }
}

/// Bytes that a commit writes.
fn bytes_of(commit: &Commit) -> usize {
    let bytes = commit.mutations.iter().map(|mutation| match mutation {
        Mutation::Set { key, value } => key.len() + value.len(),
        Mutation::Clear { key } | Mutation::Add { key, .. } => key.len(),
        Mutation::ClearRange { range } => range.start.len() + range.end.len(),
        Mutation::SetStamped { prefix, suffix, value } => prefix.len() + suffix.len() + value.len(),
    });
    bytes.sum()
}
