//! Reads that met chunks that do not exist: holes, files that died, lost data.
//!
//! Storage answers "no such chunk" in all three cases. Only the inode tells them apart, and only if
//! it is looked at both before the read and after it: a chunk that both say must exist, with no
//! truncation between them, existed at the moment of the read.

use std::collections::BTreeMap;

use fabric::deadline::Deadline;
use threefs_core::ids::InodeId;
use threefs_meta::{At, MetaError, MetaQuery, MetaReply};

use crate::Client;
use crate::batch::ChunkRead;
use crate::error::ClientError;
use crate::files::FileHandle;

impl Client {
    /// Looks the files of absent chunks up again. Gives the reads whose chunks should be there by
    /// now; the others are holes.
    ///
    /// # Errors
    /// [`ClientError::Stale`] where a file is gone, [`ClientError::Lost`] where a chunk is.
    pub(crate) async fn sort_absent(
        &self,
        files: &mut [FileHandle],
        absent: Vec<ChunkRead>,
        deadline: Deadline,
    ) -> Result<Vec<ChunkRead>, ClientError> {
        let mut now: BTreeMap<InodeId, FileHandle> = BTreeMap::new();
        let mut again = Vec::new();
        for read in absent {
            let Some(before) = files.get(read.file) else { continue };
            let inode = before.inode;
            let after = match now.get(&inode) {
                Some(known) => known.clone(),
                None => {
                    let fresh = self.look_again(before, deadline).await?;
                    now.entry(inode).or_insert(fresh).clone()
                }
            };
            let index = read.place.chunk.index;
            if !after.written.contains(index) {
                continue;
            }
            let untouched = after.truncate_version == before.truncate_version;
            if untouched && before.written.contains(index) {
                let (path, chain) = (before.path.to_string(), read.place.chain);
                return Err(ClientError::Lost { path, chunk: read.place.chunk, chain });
            }
            again.push(read);
        }
        for file in files {
            if let Some(fresh) = now.get(&file.inode) {
                let path = file.path.clone();
                *file = FileHandle { path, ..fresh.clone() };
            }
        }
        Ok(again)
    }

    async fn look_again(
        &self,
        file: &FileHandle,
        deadline: Deadline,
    ) -> Result<FileHandle, ClientError> {
        let what = format!("read `{}`", file.path);
        let query = MetaQuery::Stat { at: At::inode(file.inode), follow: false };
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
