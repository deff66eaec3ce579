//! Files by their inodes, for a mount: it knows lengths itself and says for whom it asks.

use std::sync::Arc;

use bytes::Bytes;
use fabric::deadline::Deadline;
use threefs_core::ids::{ChainId, ClientId, InodeId};
use threefs_core::message::{LastChunk, QueryChunks, StorageReply, StorageRequest};
use threefs_meta::{Identity, MetaChange, MetaQuery, MetaReply, RequestId};

use crate::Client;
use crate::chunks::What;
use crate::error::{Attempts, ClientError};
use crate::files::FileHandle;
use crate::ranges::{FileWrite, ReadPlan};

/// Chunks asked for at once.
const PAGE: u32 = 1024;

impl Client {
    /// Asks the metadata service for somebody. `what` is for messages.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn query_for(
        &self,
        who: &Identity,
        what: &str,
        query: MetaQuery,
        deadline: Deadline,
    ) -> Result<MetaReply, ClientError> {
        self.0.metadata.query_as(who, what, query, deadline).await
    }

    /// Makes a change for somebody, under an identity of the caller's: once, over lives of him.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn change_for(
        &self,
        id: RequestId,
        who: &Identity,
        what: &str,
        change: MetaChange,
        deadline: Deadline,
    ) -> Result<MetaReply, ClientError> {
        self.0.metadata.change_with(id, who, what, change, deadline).await
    }

    /// This life of the client.
    pub fn id(&self) -> ClientId {
        self.0.id
    }

    /// Tags the updates from now on as those of life number `life` of a mount. Once a replica has
    /// seen an update of this life it refuses those of earlier lives: a late copy of a WRITE of a
    /// killed daemon cannot overwrite what its successor has written since.
    pub fn tag_as_mount(&self, mount: ClientId, life: u64) {
        let life = u32::try_from(life).unwrap_or(u32::MAX);
        self.0.channels.rename(ClientId::with_incarnation(mount.0, life));
    }

    /// Reads a range that ends before the file does; holes are zeros.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn read_range(
        &self,
        file: &FileHandle,
        offset: u64,
        buffer: &mut [u8],
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let mut plan = ReadPlan::default();
        let length = buffer.len() as u64;
        self.plan_range(&mut plan, file, offset + length, offset, Some(length), deadline).await?;
        self.read_planned_until(plan, &mut [buffer], deadline.into()).await
    }

    /// Writes a range; its bytes are durable when this ends, and nobody sees more of them than the
    /// file's length, which the caller reports.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn write_range(
        &self,
        file: &FileHandle,
        offset: u64,
        payload: Bytes,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let write = FileWrite { file: file.clone(), offset, payload };
        self.write_once(&[write], &deadline.into()).await
    }

    /// The end of what is in a file's chunks at or beyond `from`, whatever its length says; `from`
    /// if there is nothing. For a writer who does not know what was written before him.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn stored_end(
        &self,
        file: &FileHandle,
        from: u64,
        deadline: Deadline,
    ) -> Result<u64, ClientError> {
        let what: What = Arc::from(format!("find the end of `{}`", file.path));
        let mut chains = self.chains(&what, &file.layout, deadline).await?;
        chains.sort_unstable();
        chains.dedup();
        let mut end = from;
        for chain in chains {
            let chunk_bytes = file.layout.chunk_bytes;
            let found = self.end_on(&what, chain, file.inode, chunk_bytes, from, deadline).await?;
            end = end.max(found);
        }
        Ok(end)
    }

    /// The end of what a file has on one chain at or beyond `from`; `from` if there is nothing.
    pub(crate) async fn end_on(
        &self,
        what: &What,
        chain: ChainId,
        inode: InodeId,
        chunk_bytes: u32,
        from: u64,
        deadline: Deadline,
    ) -> Result<u64, ClientError> {
        let size = u64::from(chunk_bytes);
        let mut end = from;
        let mut after = u32::try_from(from / size).unwrap_or(u32::MAX).checked_sub(1);
        loop {
            let (chunks, last) = self.chunks_after(what, chain, inode, after, deadline).await?;
            for LastChunk { index, length } in chunks.iter().filter(|it| it.length > 0) {
                end = end.max(u64::from(*index) * size + u64::from(*length));
            }
            match chunks.last() {
                Some(newest) if !last => after = Some(newest.index),
                _ => return Ok(end),
            }
        }
    }

    /// One page of the chunks that a file has on a chain.
    pub(crate) async fn chunks_after(
        &self,
        what: &What,
        chain: ChainId,
        inode: InodeId,
        after: Option<u32>,
        deadline: Deadline,
    ) -> Result<(Vec<LastChunk>, bool), ClientError> {
        self.first_chunks_after(what, chain, inode, after, PAGE, deadline).await
    }

    /// At most `limit` of them.
    pub(crate) async fn first_chunks_after(
        &self,
        what: &What,
        chain: ChainId,
        inode: InodeId,
        after: Option<u32>,
        limit: u32,
        deadline: Deadline,
    ) -> Result<(Vec<LastChunk>, bool), ClientError> {
        let mut attempts = Attempts::of(&**what);
        let ask = |to| StorageRequest::QueryChunks(QueryChunks { to, inode, after, limit });
        let asked =
            self.ask_head(chain, &mut attempts, Bytes::new(), &deadline.into(), ask).await?;
        match asked {
            Some((_, StorageReply::Chunks { chunks, last })) => Ok((chunks, last)),
            Some((who, other)) => Err(ClientError::unexpected(&who, &other)),
            None => Err(attempts.unavailable(self.0.config.timeout)),
        }
    }
}
