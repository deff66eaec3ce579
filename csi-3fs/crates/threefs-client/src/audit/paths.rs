//! Paths of the files with missing chunks.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use threefs_core::ids::InodeId;
use threefs_meta::protocol::BATCH_MAX;
use threefs_meta::{AuditAnswer, AuditQuery, MetaError, MetaQuery, MetaReply};

use super::{Audit, unexpected};
use crate::Client;
use crate::error::ClientError;

impl Audit {
    /// Searches a page of all names for the files with missing chunks; false once each has a path, or
    /// after the last page.
    ///
    /// # Errors
    /// Any [`ClientError`]: the call can be repeated.
    pub async fn find_paths(&mut self) -> Result<bool, ClientError> {
        if self.named.is_none() {
            self.find_snapshots().await?;
        }
        let in_tree = self.report.missing.iter().filter(|it| it.root.is_none());
        let nameless = in_tree.filter(|it| it.path.is_none());
        let inodes: Vec<InodeId> = nameless.map(|it| it.inode).take(BATCH_MAX).collect();
        if inodes.is_empty() {
            return Ok(false);
        }
        let query = AuditQuery::Names { inodes, after: self.named.clone() };
        let AuditAnswer::Names { names, next } = self.client.ask_audit(query).await? else {
            return Err(unexpected());
        };
        let mut directories = HashMap::new();
        for (inode, directory, name) in names {
            let parent = match directories.entry(directory) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(unknown) => unknown.insert(self.client.path_of(directory).await?),
            };
            let Some(parent) = parent else { continue };
            let path = format!("{}/{name}", parent.trim_end_matches('/'));
            for file in self.report.missing.iter_mut().filter(|it| it.inode == inode) {
                file.path.get_or_insert_with(|| path.clone());
            }
        }
        self.named = next;
        Ok(self.named.is_some())
    }

    /// Sets the paths of the snapshots with missing chunks.
    async fn find_snapshots(&mut self) -> Result<(), ClientError> {
        let mut paths = HashMap::new();
        for file in &mut self.report.missing {
            let Some(root) = file.root else { continue };
            let path = match paths.entry(root) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(unknown) => unknown.insert(self.client.path_of(root).await?),
            };
            file.snapshot.clone_from(path);
        }
        Ok(())
    }
}

impl Client {
    /// The path of a directory; `None` if it is removed.
    async fn path_of(&self, directory: InodeId) -> Result<Option<String>, ClientError> {
        let query = MetaQuery::PathOf { directory };
        match self.0.metadata.query("audit", query, self.deadline()).await {
            Ok(MetaReply::Path(path)) => Ok(Some(path)),
            Ok(other) => Err(ClientError::unexpected("meta", &other)),
            Err(ClientError::Meta(MetaError::NotFound { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
