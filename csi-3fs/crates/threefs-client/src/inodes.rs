//! Operations by inode, for a mount, which knows file lengths itself and passes the caller's
//! identity.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use fabric::deadline::Deadline;
use threefs_core::ids::{ChainId, ClientId, InodeId};
use threefs_core::message::{LastChunk, QueryChunks, StorageReply, StorageRequest};
use threefs_meta::{Identity, MetaChange, MetaQuery, MetaReply, RequestId};

use crate::Client;
use crate::error::{Attempts, ClientError, OperationName};
use crate::files::FileHandle;
use crate::read::ReadPlan;
use crate::write::FileWrite;

/// Chunks per query.
pub(crate) const PAGE: u32 = 1024;
/// Content of holes.
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

impl Client {
    /// Queries the metadata service with an identity. `what` is for messages.
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

    /// Makes a change with an identity, under a request id of the caller: exactly once, even across
    /// daemons of a mount.
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
        self.0.metadata.change_with(id, who, what, change, &self.1, deadline).await
    }

    /// Changes whenever the client uses another metadata service from now on, which does not know
    /// its open files.
    pub fn metadata_switches(&self) -> usize {
        self.0.metadata.switches()
    }

    /// Id of this client.
    pub fn id(&self) -> ClientId {
        self.0.id
    }

    /// Tags subsequent updates as those of daemon number `generation` of a mount. Once a replica
    /// has seen an update of it, it rejects those of earlier daemons: a late copy of a write of a
    /// killed daemon cannot overwrite data that its successor has written since.
    pub fn tag_as_mount(&self, mount: ClientId, generation: u64) {
        let generation = u32::try_from(generation).unwrap_or(u32::MAX);
        self.0.channels.rename(ClientId::with_incarnation(mount.0, generation));
    }

    /// Reads a range within the file: its bytes in consecutive pieces. Holes are zeros.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn read_range(
        &self,
        file: &FileHandle,
        offset: u64,
        length: u64,
        deadline: Deadline,
    ) -> Result<Vec<Bytes>, ClientError> {
        let mut parts = BTreeMap::new();
        let deliver = |at, length, data: Bytes| drop(parts.insert(at, (length, data)));
        self.read_range_with(file, offset, length, deadline, deliver).await?;
        let mut pieces = Vec::with_capacity(parts.len());
        for (length, data) in parts.into_values() {
            let mut zeros = length - data.len();
            if !data.is_empty() {
                pieces.push(data);
            }
            while zeros > 0 {
                let piece = zeros.min(ZEROS.len());
                pieces.push(Bytes::from_static(&ZEROS[..piece]));
                zeros -= piece;
            }
        }
        Ok(pieces)
    }

    /// Reads a range within the file without a buffer for all of it: passes each part to `deliver`
    /// as it arrives, in any order, as its offset in the range, its length and its data. Data that is
    /// shorter than the length is followed by zeros. A part may be delivered again.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn read_range_with(
        &self,
        file: &FileHandle,
        offset: u64,
        length: u64,
        deadline: Deadline,
        mut deliver: impl FnMut(usize, usize, Bytes),
    ) -> Result<(), ClientError> {
        let mut plan = ReadPlan::default();
        self.plan_range(&mut plan, file, offset + length, offset, Some(length), deadline).await?;
        self.read_planned_with(plan, deadline.into(), |read, data| {
            deliver(read.at, read.length as usize, data);
        })
        .await
    }

    /// Writes a range, which is durable when this returns. Its bytes beyond the file's length stay
    /// invisible until the caller reports the length.
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
        file.check_writable()?;
        let write = FileWrite { file: file.clone(), offset, payload };
        self.write_once(&[write], &deadline.into()).await
    }

    /// The end of a file's stored data at or beyond `from`, regardless of its length; `from` if
    /// there is none. For a writer that does not know the data written before it.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn stored_end(
        &self,
        file: &FileHandle,
        from: u64,
        deadline: Deadline,
    ) -> Result<u64, ClientError> {
        // The inode of a file of a snapshot has its length: no client writes it.
        if file.is_in_snapshot() {
            return Ok(from);
        }
        let what: OperationName = Arc::from(format!("find the end of `{}`", file.path));
        let mut chains = self.chains(&what, &file.layout, deadline).await?;
        chains.sort_unstable();
        chains.dedup();
        let mut end = from;
        for chain in chains {
            let chunk_bytes = file.layout.chunk_bytes;
            let stored_end =
                self.end_on(&what, chain, file.inode, chunk_bytes, from, deadline).await?;
            end = end.max(stored_end);
        }
        Ok(end)
    }

    /// The end of a file's data on one chain at or beyond `from`; `from` if there is none.
    pub(crate) async fn end_on(
        &self,
        what: &OperationName,
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
                Some(current) if !last => after = Some(current.index),
                _ => return Ok(end),
            }
        }
    }

    /// One page of the chunks of a file on a chain.
    pub(crate) async fn chunks_after(
        &self,
        what: &OperationName,
        chain: ChainId,
        inode: InodeId,
        after: Option<u32>,
        deadline: Deadline,
    ) -> Result<(Vec<LastChunk>, bool), ClientError> {
        self.first_chunks_after(what, chain, inode, after, PAGE, deadline).await
    }

    /// At most `limit` chunks of a file on a chain.
    pub(crate) async fn first_chunks_after(
        &self,
        what: &OperationName,
        chain: ChainId,
        inode: InodeId,
        after: Option<u32>,
        limit: u32,
        deadline: Deadline,
    ) -> Result<(Vec<LastChunk>, bool), ClientError> {
        let mut attempts = Attempts::of(&**what);
        let build_request =
            |to| StorageRequest::QueryChunks(QueryChunks { to, inode, after, limit });
        let reply = self
            .call_head(chain, &mut attempts, Bytes::new(), &deadline.into(), build_request)
            .await?;
        match reply {
            Some((_, StorageReply::Chunks { chunks, last })) => Ok((chunks, last)),
            Some((who, other)) => Err(ClientError::unexpected(&who, &other)),
            None => Err(attempts.unavailable(self.0.config.timeout)),
        }
    }
}
