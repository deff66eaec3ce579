//! Lane: executes one request after the other, each exactly once or not at all.
//!
//! A lane has a marker row. Each request compares the marker's revision with the lane's last one
//! and writes it anew, with the number of the attempt. If the reply is lost, the lane deletes the
//! marker under the same comparison. Either that succeeds, and the request can never be executed
//! later; or the marker holds the number of the attempt, and its revision is that of the commit.
//! A deletion also passes when the cluster is out of space.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Compare, CompareOp, GetOptions, GetResponse, KeyValue, Txn, TxnOp, TxnOpResponse, TxnResponse,
};
use tokio::time::Instant;

use super::members::{CALL_TIMEOUT, CallError, Members};
use super::plan::Shared;
use super::rows::{Rows, observed, signed, unsigned};
use crate::KvError;
use crate::guard::Observed;
use crate::layer::Write;

/// Time for which the outcome of a request is sought between two log lines.
const DECISION_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which the outcome of a request is given up.
const DECISION_TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// Pause after a refusal.
const DECISION_PAUSE: Duration = Duration::from_millis(200);

/// Result of a request.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It was executed at this revision.
    Applied(u64),
    /// A guard is violated; the state of each.
    Refused(Vec<Observed>),
    /// It was not executed and never will be; it may be repeated.
    NotExecuted(String),
    /// It was not executed, and a repetition fails as well.
    Failed(KvError),
    /// It may have been executed, or may be later; the store cannot tell.
    Unknown(String),
}

pub(crate) struct Lane {
    members: Arc<Members>,
    rows: Rows,
    key: Vec<u8>,
    /// Revision of the marker row, if it exists.
    marker: Option<u64>,
    attempt: u64,
}

/// State of the marker row after an attempt.
enum Marker {
    Absent,
    At { revision: u64, attempt: Option<u64> },
}

impl Lane {
    /// A lane with this name, which no other lane has ever had.
    pub(crate) fn new(members: Arc<Members>, rows: Rows, name: &str) -> Self {
        let key = rows.internal(name);
        Self { members, rows, key, marker: None, attempt: 0 }
    }

    /// Executes a request.
    pub(crate) async fn execute(&mut self, guards: &[Shared], writes: &[Write]) -> Outcome {
        let marker = match self.marker {
            Some(marker) => marker,
            None => match self.create_marker().await {
                Ok(marker) => marker,
                Err(CallError::Failed(detail)) => return Outcome::NotExecuted(detail),
                Err(error) => return Outcome::Failed(self.members.error(error)),
            },
        };
        self.attempt += 1;
        let txn = self.request(marker, guards, writes);
        let (member, floor) = (self.members.preferred(), self.members.newest());
        let sent = self
            .members
            .call(member, CALL_TIMEOUT, |mut client| async move { client.txn(txn).await });
        match sent.await {
            Ok(reply) => self.read_reply(guards, &reply, floor),
            Err(CallError::Refused(error)) => Outcome::Failed(error),
            Err(CallError::NoSpace(detail)) => match self.decide(marker, member + 1).await {
                Outcome::NotExecuted(_) => Outcome::Failed(self.members.no_space(&detail)),
                decided => decided,
            },
            Err(error) => {
                let detail = self.members.error(error).to_string();
                tracing::debug!(detail, "deciding the outcome of a commit");
                match self.decide(marker, member + 1).await {
                    Outcome::NotExecuted(_) => Outcome::NotExecuted(detail),
                    decided => decided,
                }
            }
        }
    }

    fn request(&self, marker: u64, guards: &[Shared], writes: &[Write]) -> Txn {
        let mut compares = vec![self.marker_is(marker)];
        compares.extend(guards.iter().map(|it| self.rows.compare(&it.guard)));
        let mut operations = vec![TxnOp::put(self.key.clone(), self.attempt.to_be_bytes(), None)];
        operations.extend(writes.iter().map(|write| self.rows.operation(write)));
        let mut reads = vec![TxnOp::get(self.key.clone(), None)];
        reads.extend(guards.iter().map(|it| self.rows.observe(&it.guard, it.owners.batch)));
        Txn::new().when(compares).and_then(operations).or_else(reads)
    }

    fn marker_is(&self, revision: u64) -> Compare {
        Compare::mod_revision(self.key.clone(), CompareOp::Equal, signed(revision))
    }

    fn read_reply(&mut self, guards: &[Shared], reply: &TxnResponse, floor: u64) -> Outcome {
        let revision = match self.members.observe(reply.header(), floor) {
            Ok(revision) => revision,
            Err(error) if reply.succeeded() => return Outcome::Unknown(error.to_string()),
            Err(error) => return Outcome::Failed(error),
        };
        if reply.succeeded() {
            self.marker = Some(revision);
            return Outcome::Applied(revision);
        }
        let reads = gets(reply);
        let mut reads = reads.iter();
        match marker_of(reads.next()) {
            Marker::At { revision, .. } if Some(revision) == self.marker => {}
            // Removed by the clean-up of another process.
            _ => {
                self.marker = None;
                return Outcome::NotExecuted("the marker of the lane was removed".into());
            }
        }
        let observed: Vec<_> =
            guards.iter().zip(reads).map(|(it, reply)| observed(&it.guard, reply)).collect();
        if observed.len() < guards.len() {
            return Outcome::Failed(self.members.broken("a reply lacks reads".into()));
        }
        Outcome::Refused(observed)
    }

    /// Finds out whether the last attempt was executed, and prevents it otherwise. Ends when a
    /// member replies, or after [`DECISION_TIMEOUT_MAX`]: a request that is executed later changes
    /// the marker, so the next attempt detects it.
    async fn decide(&mut self, marker: u64, first: usize) -> Outcome {
        let started = Instant::now();
        loop {
            let deadline = Instant::now() + DECISION_TIMEOUT;
            let floor = self.members.newest();
            let tombstone = Txn::new()
                .when([self.marker_is(marker)])
                .and_then([TxnOp::delete(self.key.clone(), None)])
                .or_else([TxnOp::get(self.key.clone(), None)]);
            let sent = self.members.any(first, deadline, |mut client, _| {
                let txn = tombstone.clone();
                async move { client.txn(txn).await }
            });
            let reply = match sent.await {
                Ok((reply, _)) => reply,
                Err(CallError::Refused(error)) => return self.unknown(&error),
                Err(error) => {
                    let error = self.members.error(error);
                    let waited = started.elapsed();
                    tracing::warn!(%error, ?waited, "the outcome of a commit is not known yet");
                    if waited >= DECISION_TIMEOUT_MAX {
                        return self.unknown(&error);
                    }
                    tokio::time::sleep(DECISION_PAUSE).await;
                    continue;
                }
            };
            if let Err(error) = self.members.observe(reply.header(), floor) {
                return self.unknown(&error);
            }
            self.marker = None;
            let found =
                if reply.succeeded() { Marker::Absent } else { marker_of(gets(&reply).first()) };
            return match found {
                Marker::At { revision, attempt } if attempt == Some(self.attempt) => {
                    self.marker = Some(revision);
                    Outcome::Applied(revision)
                }
                _ => Outcome::NotExecuted(String::new()),
            };
        }
    }

    fn unknown(&mut self, error: &KvError) -> Outcome {
        self.marker = None;
        Outcome::Unknown(error.to_string())
    }

    /// Creates the marker. An earlier creation of this lane whose reply was lost is adopted.
    async fn create_marker(&mut self) -> Result<u64, CallError> {
        let floor = self.members.newest();
        let absent = Compare::version(self.key.clone(), CompareOp::Equal, 0);
        let create = Txn::new()
            .when([absent])
            .and_then([TxnOp::put(self.key.clone(), [], None)])
            .or_else([TxnOp::get(self.key.clone(), Some(GetOptions::new()))]);
        let deadline = Instant::now() + CALL_TIMEOUT;
        let sent = self.members.any(self.members.preferred(), deadline, |mut client, _| {
            let txn = create.clone();
            async move { client.txn(txn).await }
        });
        let reply = sent.await?.0;
        let now = self.members.observe(reply.header(), floor).map_err(CallError::Refused)?;
        let revision = match reply.succeeded() {
            true => now,
            false => match marker_of(gets(&reply).first()) {
                Marker::At { revision, .. } => revision,
                Marker::Absent => return Err(CallError::Failed("no marker".into())),
            },
        };
        self.marker = Some(revision);
        Ok(revision)
    }
}

pub(crate) fn gets(reply: &TxnResponse) -> Vec<GetResponse> {
    let replies = reply.op_responses().into_iter();
    replies
        .filter_map(|reply| match reply {
            TxnOpResponse::Get(reply) => Some(reply),
            _ => None,
        })
        .collect()
}

fn marker_of(reply: Option<&GetResponse>) -> Marker {
    let row: Option<&KeyValue> = reply.and_then(|reply| reply.kvs().first());
    row.map_or(Marker::Absent, |row| Marker::At {
        revision: unsigned(row.mod_revision()),
        attempt: row.value().try_into().ok().map(u64::from_be_bytes),
    })
}
