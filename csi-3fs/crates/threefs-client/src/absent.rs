//! Reads of absent chunks: holes, removed files, lost data.
//!
//! Storage returns "chunk not found" in all three cases. Only the inode distinguishes them, and
//! only if it is checked both before and after the read: a chunk that must exist according to both,
//! with no truncation in between, existed at the time of the read.

use std::collections::BTreeMap;

use fabric::deadline::Deadline;
use threefs_core::ids::InodeId;
use threefs_meta::protocol::BATCH_MAX;
use threefs_meta::{At, MetaError, MetaQuery, MetaReply};

use crate::Client;
use crate::error::ClientError;
use crate::files::FileHandle;
use crate::read::ChunkRead;

impl Client {
    /// Looks up the files of absent chunks again. Returns the reads whose chunks should exist by
    /// now, with their current file; the others are holes.
    ///
    /// # Errors
    /// [`ClientError::Stale`] if a file is removed, [`ClientError::Lost`] if a chunk is lost.
    pub(crate) async fn classify_absent(
        &self,
        files: &mut Vec<FileHandle>,
        absent: Vec<ChunkRead>,
        deadline: Deadline,
    ) -> Result<Vec<ChunkRead>, ClientError> {
        let mut by_inode: BTreeMap<InodeId, Vec<ChunkRead>> = BTreeMap::new();
        for read in absent {
            by_inode.entry(read.location.chunk.inode).or_default().push(read);
        }
        let mut retries = Vec::new();
        for mut reads in by_inode.into_values() {
            while !reads.is_empty() {
                // Each group is checked at one point in time.
                let group = reads.split_off(reads.len().saturating_sub(BATCH_MAX));
                let chunks = group.iter().map(|read| read.location.chunk.index).collect();
                let file = group.first().and_then(|read| files.get(read.file));
                let Some(file) = file.cloned() else { continue };
                self.check_epoch(&file, deadline).await?;
                let now = self.reload(&file, chunks, deadline).await?;
                let number = files.len();
                for mut read in group {
                    let index = read.location.chunk.index;
                    if !now.written.contains(index) {
                        continue;
                    }
                    let before = files.get(read.file).filter(|before| {
                        before.truncate_version == now.truncate_version
                            && before.written.contains(index)
                    });
                    if let Some(before) = before {
                        let (path, chain) = (before.path.to_string(), read.location.chain);
                        return Err(ClientError::Lost { path, chunk: read.location.chunk, chain });
                    }
                    read.file = number;
                    retries.push(read);
                }
                files.push(now);
            }
        }
        Ok(retries)
    }

    /// Checks that the snapshot of a file exists: another one may have its number.
    async fn check_epoch(&self, file: &FileHandle, deadline: Deadline) -> Result<(), ClientError> {
        let Some(epoch) = file.epoch.get() else { return Ok(()) };
        match self.0.metadata.learn_place(file.inode, deadline).await? {
            place if place.epoch == *epoch => Ok(()),
            _ => Err(ClientError::Stale { path: file.path.to_string() }),
        }
    }

    /// The current file, including which of the chunks must exist.
    async fn reload(
        &self,
        file: &FileHandle,
        chunks: Vec<u32>,
        deadline: Deadline,
    ) -> Result<FileHandle, ClientError> {
        let what = format!("read `{}`", file.path);
        let query = MetaQuery::StatChunks { at: At::inode(file.inode), chunks };
        match self.0.metadata.query(&what, query, deadline).await {
            Ok(MetaReply::Inode(inode)) => file.renewed(&inode),
            Ok(other) => Err(ClientError::unexpected("meta", &other)),
            Err(ClientError::Meta(MetaError::NotFound { .. })) => {
                Err(ClientError::Stale { path: file.path.to_string() })
            }
            Err(error) => Err(error),
        }
    }
}
