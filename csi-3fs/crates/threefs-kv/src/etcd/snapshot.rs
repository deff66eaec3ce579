//! Snapshot: reads at one revision, from the member that is known to have it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use etcd_client::GetOptions;
use fabric::BoxFuture;
use tokio::time::Instant;

use super::members::{CallError, Members};
use super::revisions::At;
use super::rows::{Rows, range_options, signed, unsigned};
use crate::{KeyRange, KvError, Row, Seen, Snapshot};

/// Time without a reply after which a read fails.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Rows per call; fewer if the reply would exceed the maximum message size.
const ROWS_PER_CALL: usize = 1024;

pub(crate) struct EtcdSnapshot {
    members: Arc<Members>,
    rows: Rows,
    at: At,
    seen: Mutex<Seen>,
}

impl EtcdSnapshot {
    pub(crate) fn new(members: Arc<Members>, rows: Rows, at: At) -> Self {
        Self { members, rows, at, seen: Mutex::default() }
    }

    async fn call(
        &self,
        row: &[u8],
        options: GetOptions,
    ) -> Result<etcd_client::GetResponse, CallError> {
        let deadline = Instant::now() + TIMEOUT;
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

    async fn read(&self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
        let reply = self.call(&self.rows.row(key), GetOptions::new()).await;
        let mut reply = reply.map_err(|error| self.error(error))?;
        let row = reply.take_kvs().pop();
        let revision = row.as_ref().map_or(0, |row| unsigned(row.mod_revision()));
        self.see([(key.to_vec(), revision)]);
        Ok(row.map(|row| row.into_key_value().1))
    }

    async fn read_range(&self, range: &KeyRange, limit: usize) -> Result<Vec<Row>, KvError> {
        let (mut rest, mut rows) = (range.clone(), Vec::new());
        let mut page = ROWS_PER_CALL;
        while rows.len() < limit && !rest.is_empty() {
            let count = page.min(limit - rows.len());
            let options = range_options(&self.rows, &rest).with_limit(signed(count as u64));
            let mut reply = match self.call(&self.rows.row(&rest.start), options).await {
                Ok(reply) => reply,
                Err(CallError::TooLong) if count > 1 => {
                    page = count / 2;
                    continue;
                }
                Err(error) => return Err(self.error(error)),
            };
            let more = reply.more();
            let mut seen = Vec::new();
            for row in reply.take_kvs() {
                let revision = unsigned(row.mod_revision());
                let (row, value) = row.into_key_value();
                let key = self.rows.key(&row).to_vec();
                seen.push((key.clone(), revision));
                rows.push((key, value));
            }
            if more && seen.is_empty() {
                let detail = "a page of a range has no rows, and more follow".into();
                return Err(self.members.broken(detail));
            }
            self.see(seen);
            match rows.last() {
                Some((last, _)) if more => rest = rest.after(last),
                _ => break,
            }
        }
        Ok(rows)
    }

    fn see(&self, rows: impl IntoIterator<Item = (Vec<u8>, u64)>) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).extend(rows);
    }
}

impl Snapshot for EtcdSnapshot {
    fn version(&self) -> u64 {
        self.at.revision
    }

    fn get<'a>(&'a self, key: &'a [u8]) -> BoxFuture<'a, Result<Option<Vec<u8>>, KvError>> {
        Box::pin(self.read(key))
    }

    fn range<'a>(
        &'a self,
        range: &'a KeyRange,
        limit: usize,
    ) -> BoxFuture<'a, Result<Vec<Row>, KvError>> {
        Box::pin(self.read_range(range, limit))
    }

    fn into_seen(self: Box<Self>) -> Seen {
        self.seen.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}
