//! Reads that met chunks that do not exist: holes, files that died, lost data.
//!
//! Storage answers "no such chunk" in all three cases. Only the inode tells them apart, and only if
//! it is looked at both before the read and after it: a chunk that both say must exist, with no
//! truncation between them, existed at the moment of the read.

use std::collections::BTreeMap;

use fabric::deadline::Deadline;
use threefs_core::ids::InodeId;
use threefs_meta::protocol::BATCH_MAX;
use threefs_meta::{At, MetaError, MetaQuery, MetaReply};

use crate::Client;
use crate::batch::ChunkRead;
use crate::error::ClientError;
use crate::files::FileHandle;

impl Client {
    /// Looks the files of absent chunks up again. Gives the reads whose chunks should be there by
    /// now; the others are holes. The file of a read that is made again is what was found now.
    ///
    /// # Errors
    /// [`ClientError::Stale`] where a file is gone, [`ClientError::Lost`] where a chunk is.
    pub(crate) async fn sort_absent(
        &self,
        files: &mut Vec<FileHandle>,
        absent: Vec<ChunkRead>,
        deadline: Deadline,
    ) -> Result<Vec<ChunkRead>, ClientError> {
        let mut by_inode: BTreeMap<InodeId, Vec<ChunkRead>> = BTreeMap::new();
        for read in absent {
            by_inode.entry(read.place.chunk.inode).or_default().push(read);
        }
        let mut again = Vec::new();
        for mut reads in by_inode.into_values() {
            while !reads.is_empty() {
                // Each group is of one moment.
                let group = reads.split_off(reads.len().saturating_sub(BATCH_MAX));
                let chunks = group.iter().map(|read| read.place.chunk.index).collect();
                let file = group.first().and_then(|read| files.get(read.file));
                let Some(file) = file.cloned() else { continue };
                let now = self.look_again(&file, chunks, deadline).await?;
                let number = files.len();
                for mut read in group {
                    let index = read.place.chunk.index;
                    if !now.written.contains(index) {
                        continue;
                    }
                    let before = files.get(read.file).filter(|before| {
                        before.truncate_version == now.truncate_version
                            && before.written.contains(index)
                    });
                    if let Some(before) = before {
                        let (path, chain) = (before.path.to_string(), read.place.chain);
                        return Err(ClientError::Lost { path, chunk: read.place.chunk, chain });
                    }
                    read.file = number;
                    again.push(read);
                }
                files.push(now);
            }
        }
        Ok(again)
    }

    /// The file, with those of the chunks that must exist.
    async fn look_again(
        &self,
        file: &FileHandle,
        chunks: Vec<u32>,
        deadline: Deadline,
    ) -> Result<FileHandle, ClientError> {
        let what = format!("read `{}`", file.path);
        let query = MetaQuery::StatChunks { at: At::inode(file.inode), chunks };
        match self.0.metadata.query(&what, query, deadline).await {
            Ok(MetaReply::Inode(inode)) => FileHandle::of(&file.path, &inode),
            Ok(other) => Err(ClientError::unexpected("meta", &other)),
            Err(ClientError::Meta(MetaError::NotFound { .. })) => {
                Err(ClientError::Stale { path: file.path.to_string() })
            }
            Err(error) => Err(error),
        }
    }
}
