//! All rows of a store at one revision, for a dump.

use std::sync::Arc;
use std::time::Duration;

use super::config::EtcdConfig;
use super::load_row;
use super::members::Members;
use super::open;
use super::reads::{Pages, Reads};
use super::revisions;
use super::rows::Rows;
use crate::{KvError, Row};

/// Time without a reply after which a dump fails: a dump need not be fast.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A store to be dumped. It is only read.
pub(crate) struct DumpSource {
    members: Arc<Members>,
    rows: Rows,
}

impl DumpSource {
    /// Connects to a cluster.
    ///
    /// # Errors
    /// No member replies, or the cluster is not the one that served the store.
    pub(crate) async fn connect(config: &EtcdConfig) -> Result<Self, KvError> {
        let (members, rows) = open::connect(config)?;
        open::inspect(&members, &rows, config.accept_restored).await?;
        Ok(Self { members, rows })
    }

    /// The rows of the newest revision.
    ///
    /// # Errors
    /// No member replies, or the store has no rows, or those of an incomplete load at this revision.
    pub(crate) async fn start(&self) -> Result<RowPages, KvError> {
        let at = revisions::newest(&self.members, &self.rows.internal("identity")).await?;
        let reads = Reads::new(Arc::clone(&self.members), self.rows.clone(), at, TIMEOUT);
        if let Some(load) = reads.internal(load_row::ROW).await? {
            load_row::check_complete(&self.members, &load)?;
        }
        let total = reads.count().await?;
        if total == 0 {
            return Err(self.members.broken(
                "the prefix has no rows; check --etcd-endpoints and --etcd-prefix".into(),
            ));
        }
        Ok(RowPages { pages: reads.into_all_pages(), total })
    }
}

/// The rows, page by page.
pub(crate) struct RowPages {
    pages: Pages<Reads>,
    total: u64,
}

impl RowPages {
    /// The next rows; `None` at the end.
    ///
    /// # Errors
    /// [`KvError::TooOld`] if the revision has been compacted.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<Row>>, KvError> {
        let page = self.pages.next(usize::MAX).await?;
        Ok(page.map(|rows| rows.into_iter().map(|(key, value, _)| (key, value)).collect()))
    }

    /// Number of all rows.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }
}
