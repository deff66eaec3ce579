//! Snapshot: the reads of a transaction, and the versions of the rows that they returned.

use fabric::BoxFuture;
use tokio::sync::oneshot;

use super::group::Request;
use super::snapshots::Shared;
use crate::seen::SeenRows;
use crate::{KeyRange, KvError, Row, Seen, Snapshot};

/// Maximum number of rows of one statement, whose values are in memory at once.
const ROWS_MAX: usize = 512;

pub(crate) struct PostgresSnapshot {
    shared: Shared,
    seen: SeenRows,
}

impl PostgresSnapshot {
    pub(crate) fn new(shared: Shared) -> Self {
        Self { shared, seen: SeenRows::default() }
    }

    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<Result<T, KvError>>) -> Request,
    ) -> Result<T, KvError> {
        let too_old = || KvError::TooOld { version: self.shared.version };
        let (reply, answer) = oneshot::channel();
        self.shared.requests.send(request(reply)).await.map_err(|_| too_old())?;
        answer.await.unwrap_or_else(|_| Err(too_old()))
    }

    async fn read(&self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
        let row = self.ask(|reply| Request::Row { key: key.to_vec(), reply }).await?;
        Ok(self.seen.row(key, row))
    }

    async fn read_range(&self, range: &KeyRange, limit: usize) -> Result<Vec<Row>, KvError> {
        let (mut rows, mut rest) = (Vec::new(), range.clone());
        while rows.len() < limit && !rest.is_empty() {
            let limit = (limit - rows.len()).min(ROWS_MAX);
            let part = rest.clone();
            let page = self.ask(|reply| Request::Range { range: part, limit, reply }).await?;
            match page.last() {
                Some((last, ..)) if page.len() == limit => rest = rest.after(last),
                _ => rest.start.clone_from(&rest.end),
            }
            self.seen.rows(page.iter().map(|(key, _, version)| (key.clone(), *version)));
            rows.extend(page.into_iter().map(|(key, value, _)| (key, value)));
        }
        Ok(rows)
    }
}

impl Snapshot for PostgresSnapshot {
    fn version(&self) -> u64 {
        self.shared.version
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
        self.seen.into_inner()
    }
}
