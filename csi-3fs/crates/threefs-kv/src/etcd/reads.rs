//! Reads at one revision, from the member that is known to have it.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{GetOptions, GetResponse, KeyValue};
use tokio::time::Instant;

use super::members::{CallError, Members};
use super::revisions::At;
use super::rows::{Rows, signed, unsigned};
use crate::{KeyRange, KvError};

/// Rows per call; fewer if the reply would exceed the maximum message size.
const ROWS_PER_CALL: usize = 1024;

/// Key, value, and the revision at which the row was written.
pub(crate) type RowAt = (Vec<u8>, Vec<u8>, u64);

/// Reader of one revision.
pub(crate) struct Reads {
    members: Arc<Members>,
    rows: Rows,
    at: At,
    /// Time without a reply after which a read fails.
    timeout: Duration,
}

impl Reads {
    pub(crate) fn new(members: Arc<Members>, rows: Rows, at: At, timeout: Duration) -> Self {
        Self { members, rows, at, timeout }
    }

    pub(crate) fn revision(&self) -> u64 {
        self.at.revision
    }

    /// A row's value, and the revision at which it was written.
    pub(crate) async fn row(&self, key: &[u8]) -> Result<Option<(Vec<u8>, u64)>, KvError> {
        let reply = self.call(&self.rows.row(key), GetOptions::new()).await;
        let mut reply = reply.map_err(|error| self.error(error))?;
        let row = reply.take_kvs().pop();
        Ok(row.map(|row| {
            let revision = unsigned(row.mod_revision());
            (row.into_key_value().1, revision)
        }))
    }

    /// A row of the backend.
    pub(crate) async fn internal(&self, name: &str) -> Result<Option<KeyValue>, KvError> {
        let reply = self.call(&self.rows.internal(name), GetOptions::new()).await;
        let mut reply = reply.map_err(|error| self.error(error))?;
        Ok(reply.take_kvs().pop())
    }

    /// Number of all rows.
    pub(crate) async fn count(&self) -> Result<u64, KvError> {
        let (start, end) = self.rows.all();
        let options = GetOptions::new().with_range(end).with_count_only();
        let reply = self.call(&start, options).await.map_err(|error| self.error(error))?;
        Ok(unsigned(reply.count()))
    }

    /// The rows of a range, page by page.
    pub(crate) fn pages(&self, range: &KeyRange) -> Pages<&Self> {
        let (start, end) = (self.rows.row(&range.start), self.rows.row(&range.end));
        Pages::new(self, start, end)
    }

    /// All rows, page by page.
    pub(crate) fn into_all_pages(self) -> Pages<Self> {
        let (start, end) = self.rows.all();
        Pages::new(self, start, end)
    }

    async fn call(&self, row: &[u8], options: GetOptions) -> Result<GetResponse, CallError> {
        let deadline = Instant::now() + self.timeout;
        let options = options.with_revision(signed(self.at.revision));
        let reply = self.members.any(self.at.member, deadline, |mut client, attempt| {
            let (row, options) = (row.to_vec(), options.clone());
            // Another member may be behind the revision: it has to wait for the leader's.
            let options = if attempt == 0 { options.with_serializable() } else { options };
            async move { client.get(row, Some(options)).await }
        });
        Ok(reply.await?.0)
    }

    fn error(&self, error: CallError) -> KvError {
        match error {
            CallError::Compacted => KvError::TooOld { version: self.at.revision },
            error => self.members.error(error),
        }
    }
}

impl AsRef<Self> for Reads {
    fn as_ref(&self) -> &Self {
        self
    }
}

/// The rows of a range, page by page.
pub(crate) struct Pages<R> {
    reads: R,
    /// Names of the first row that is not read yet, and of the end; `None`: all rows are read.
    rest: Option<Vec<u8>>,
    end: Vec<u8>,
    rows_per_call: usize,
}

impl<R: AsRef<Reads>> Pages<R> {
    fn new(reads: R, start: Vec<u8>, end: Vec<u8>) -> Self {
        let rest = (start < end).then_some(start);
        Self { reads, rest, end, rows_per_call: ROWS_PER_CALL }
    }

    /// The next rows, at most `limit`; `None` at the end.
    pub(crate) async fn next(&mut self, limit: usize) -> Result<Option<Vec<RowAt>>, KvError> {
        let Some(start) = self.rest.clone() else { return Ok(None) };
        let reads = self.reads.as_ref();
        loop {
            let count = self.rows_per_call.min(limit);
            let options =
                GetOptions::new().with_range(self.end.clone()).with_limit(signed(count as u64));
            let mut reply = match reads.call(&start, options).await {
                Ok(reply) => reply,
                Err(CallError::TooLong) if count > 1 => {
                    self.rows_per_call = count / 2;
                    continue;
                }
                Err(error) => return Err(reads.error(error)),
            };
            let more = reply.more();
            let kvs = reply.take_kvs();
            self.rest = match kvs.last() {
                Some(last) if more => Some([last.key(), &[0]].concat()),
                None if more => {
                    let detail = "a page of a range has no rows, and more follow".into();
                    return Err(reads.members.broken(detail));
                }
                _ => None,
            };
            let rows = kvs.into_iter().map(|row| {
                let revision = unsigned(row.mod_revision());
                let (row, value) = row.into_key_value();
                (reads.rows.key(&row).to_vec(), value, revision)
            });
            return Ok(Some(rows.collect()));
        }
    }
}
