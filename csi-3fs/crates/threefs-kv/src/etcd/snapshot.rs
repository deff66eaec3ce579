//! Snapshot: the reads of a transaction, and the revisions of what they have returned.

use std::sync::Arc;
use std::time::Duration;

use fabric::BoxFuture;

use super::members::Members;
use super::reads::Reads;
use super::revisions::At;
use super::rows::Rows;
use crate::seen::SeenRows;
use crate::{KeyRange, KvError, Row, Seen, Snapshot};

/// Time without a reply after which a read fails.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) struct EtcdSnapshot {
    reads: Reads,
    seen: SeenRows,
}

impl EtcdSnapshot {
    pub(crate) fn new(members: Arc<Members>, rows: Rows, at: At) -> Self {
        Self { reads: Reads::new(members, rows, at, TIMEOUT), seen: SeenRows::default() }
    }

    async fn read(&self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
        let row = self.reads.row(key).await?;
        Ok(self.seen.row(key, row))
    }

    async fn read_range(&self, range: &KeyRange, limit: usize) -> Result<Vec<Row>, KvError> {
        let mut pages = self.reads.pages(range);
        let mut rows = Vec::new();
        while rows.len() < limit
            && let Some(page) = pages.next(limit - rows.len()).await?
        {
            let seen = page.iter().map(|(key, _, revision)| (key.clone(), *revision));
            self.seen.rows(seen);
            rows.extend(page.into_iter().map(|(key, value, _)| (key, value)));
        }
        Ok(rows)
    }
}

impl Snapshot for EtcdSnapshot {
    fn version(&self) -> u64 {
        self.reads.revision()
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
