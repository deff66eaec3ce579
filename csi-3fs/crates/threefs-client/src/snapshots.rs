//! Snapshots of volumes.

use threefs_meta::{
    At, MetaChange, MetaQuery, MetaReply, SnapshotAnswer, SnapshotChange, SnapshotEntry,
    SnapshotQuery,
};

use crate::Client;
use crate::error::ClientError;

impl Client {
    /// Creates a snapshot of a volume, a directory with a quota.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn create_snapshot(
        &self,
        volume: &str,
        name: &str,
    ) -> Result<SnapshotEntry, ClientError> {
        let change = SnapshotChange::Create { at: At::path(volume), name: name.into() };
        let change = MetaChange::Snapshot(change);
        match self.change("create a snapshot of", volume, change).await? {
            MetaReply::Snapshot(SnapshotAnswer::Created(entry)) => Ok(entry),
            other => Err(ClientError::unexpected("meta", &other)),
        }
    }

    /// Removes a snapshot of a volume. Its space is freed later.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn remove_snapshot(&self, volume: &str, name: &str) -> Result<(), ClientError> {
        let change = SnapshotChange::Remove { at: At::path(volume), name: name.into() };
        self.change("remove a snapshot of", volume, MetaChange::Snapshot(change)).await.map(drop)
    }

    /// The snapshots of a volume, oldest first.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn snapshots(&self, volume: &str) -> Result<Vec<SnapshotEntry>, ClientError> {
        let query = MetaQuery::Snapshot(SnapshotQuery::List { at: At::path(volume) });
        match self.query("list the snapshots of", volume, query).await? {
            MetaReply::Snapshot(SnapshotAnswer::List(entries)) => Ok(entries),
            other => Err(ClientError::unexpected("meta", &other)),
        }
    }
}
