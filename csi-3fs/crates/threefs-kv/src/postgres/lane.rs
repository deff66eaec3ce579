//! Lane: executes one batch after the other, each exactly once or not at all.
//!
//! A batch locks the head row, reads what its commits depend on, and only then sends their writes.
//! So if the reply to the writes is lost, the next holder of the lock knows the outcome: the
//! transaction has ended by then, and the batch is in the table of commits or never will be.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::head::Point;
use super::plan::{Plan, Questions};
use super::server::{CallError, Server};
use super::writer::Writer;
use crate::{Commit, KvError, Versionstamp};

/// Time after which the outcome of a batch is given up.
const DECISION_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause between two attempts to decide.
const DECISION_PAUSE: Duration = Duration::from_millis(200);

/// Result of a batch.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Each commit has its result.
    Decided(Decided),
    /// It was not executed and never will be; it may be repeated.
    NotExecuted(String),
    /// It was not executed, and a repetition fails as well.
    Failed(KvError),
    /// It may have been executed: no server knows.
    Unknown(String),
}

#[derive(Debug)]
pub(crate) struct Decided {
    pub results: Vec<Result<Versionstamp, KvError>>,
    /// The version and the written keys, if a commit succeeded.
    pub written: Option<(u64, Vec<Vec<u8>>)>,
}

pub(crate) struct Lane {
    server: Arc<Server>,
    writer: Option<Writer>,
}

impl Lane {
    pub(crate) fn new(server: Arc<Server>) -> Self {
        Self { server, writer: None }
    }

    /// Executes a batch.
    pub(crate) async fn execute(&mut self, commits: &[&Commit]) -> Outcome {
        let mut questions = Questions::default();
        for commit in commits {
            if let Err(error) = questions.add(commit) {
                return Outcome::Failed(error);
            }
        }
        // Kept only if its transaction has ended.
        let writer = match self.writer.take() {
            Some(writer) => writer,
            None => match Writer::connect(&self.server).await {
                Ok(writer) => writer,
                Err(error) => return self.not_executed(error),
            },
        };
        let (head, facts) = match writer.lock_and_read(&self.server, &questions).await {
            Ok(read) => read,
            Err(error) => return self.not_executed(error),
        };
        let next = Point { version: head.point.version + 1, batch: rand::random() };
        let plan = Plan::new(commits.iter().copied(), &facts, next.version);
        if plan.is_empty() {
            if writer.roll_back(&self.server).await.is_ok() {
                self.writer = Some(writer);
            }
            return Outcome::Decided(Decided { results: plan.results, written: None });
        }
        let Plan { results, layer } = plan;
        let mut keys: Vec<Vec<u8>> = layer.outcomes().map(|(key, _)| key.clone()).collect();
        match writer.apply(&self.server, next, layer.into_writes(), &mut keys).await {
            Ok(()) => self.writer = Some(writer),
            Err(CallError::Failed(detail)) => {
                drop(writer);
                match self.decide(next, &detail).await {
                    Some(true) => {}
                    Some(false) => return Outcome::NotExecuted(detail),
                    None => return Outcome::Unknown(detail),
                }
            }
            Err(error) => return self.not_executed(error),
        }
        self.server.committed(next);
        Outcome::Decided(Decided { results, written: Some((next.version, keys)) })
    }

    fn not_executed(&self, error: CallError) -> Outcome {
        match error {
            CallError::Rejected(detail) | CallError::Failed(detail) => Outcome::NotExecuted(detail),
            error => Outcome::Failed(self.server.error(error)),
        }
    }

    /// Finds out whether a batch was committed; `None` after [`DECISION_TIMEOUT`], or if the store
    /// is refused meanwhile.
    async fn decide(&mut self, point: Point, detail: &str) -> Option<bool> {
        let started = Instant::now();
        loop {
            tracing::warn!(detail, waited = ?started.elapsed(), "deciding the outcome of a commit");
            let found = async {
                let writer = Writer::connect(&self.server).await?;
                Ok((writer.find(&self.server, point).await?, writer))
            };
            match found.await {
                Ok((committed, writer)) => {
                    self.writer = Some(writer);
                    return Some(committed);
                }
                Err(CallError::Refused(error)) => {
                    tracing::error!(%error, "the outcome of a commit is unknown");
                    return None;
                }
                Err(error) => {
                    tracing::warn!(?error, "the outcome of a commit is not known yet");
                }
            }
            if started.elapsed() >= DECISION_TIMEOUT {
                return None;
            }
            tokio::time::sleep(DECISION_PAUSE).await;
        }
    }
}
