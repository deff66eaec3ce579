//! The trash of volumes: removed files and directories that can be restored for a time.

use threefs_meta::{
    At, Inode, MetaChange, MetaQuery, MetaReply, TrashAnswer, TrashChange, TrashEntry, TrashId,
    TrashQuery,
};

use crate::Client;
use crate::error::ClientError;
use crate::files::inode;

/// One page of the trash of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrashPage {
    /// How long removed files are kept, in seconds; 0 = not.
    pub seconds: u64,
    /// Oldest first.
    pub entries: Vec<TrashEntry>,
    /// Whether more entries follow.
    pub more: bool,
}

impl Client {
    /// Sets how long removed files of a volume, a directory with a quota, are kept; 0 = not, and
    /// those that are kept are removed.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn keep_removed(&self, volume: &str, seconds: u64) -> Result<(), ClientError> {
        let change = TrashChange::Keep { at: At::path(volume), seconds };
        self.change_trash("set the retention of", volume, change).await.map(drop)
    }

    /// The entries in the trash of a volume that follow `after`.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn trash(
        &self,
        volume: &str,
        after: Option<TrashId>,
    ) -> Result<TrashPage, ClientError> {
        let query = MetaQuery::Trash(TrashQuery::List { at: At::path(volume), after });
        match self.query("list the trash of", volume, query).await? {
            MetaReply::Trash(TrashAnswer::Page { seconds, entries, more }) => {
                Ok(TrashPage { seconds, entries, more })
            }
            other => Err(ClientError::unexpected("meta", &other)),
        }
    }

    /// Restores an entry to its former path, or to another one in the same volume.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn restore_removed(
        &self,
        volume: &str,
        id: TrashId,
        to: Option<&str>,
    ) -> Result<Inode, ClientError> {
        let (at, to) = (At::path(volume), to.map(At::path));
        let change = TrashChange::Restore { at, id, to };
        inode(self.change_trash("restore from the trash of", volume, change).await?)
    }

    /// Removes entries for good, at most [`threefs_meta::TRASH_PAGE_MAX`].
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn purge_removed(&self, volume: &str, ids: Vec<TrashId>) -> Result<(), ClientError> {
        let change = TrashChange::Purge { at: At::path(volume), ids };
        self.change_trash("purge the trash of", volume, change).await.map(drop)
    }

    /// Number of entries in the trash of all volumes, counted up to 100,000.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn trash_count(&self) -> Result<u64, ClientError> {
        let query = MetaQuery::Trash(TrashQuery::Count);
        match self.query("count the trash of", "/", query).await? {
            MetaReply::Trash(TrashAnswer::Count(count)) => Ok(count),
            other => Err(ClientError::unexpected("meta", &other)),
        }
    }

    async fn change_trash(
        &self,
        verb: &str,
        volume: &str,
        change: TrashChange,
    ) -> Result<MetaReply, ClientError> {
        self.change(verb, volume, MetaChange::Trash(change)).await
    }
}
