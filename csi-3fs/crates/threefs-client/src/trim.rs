//! Taking chunks away beyond a length: what the metadata service needs of storage.

use std::sync::Arc;

use bytes::Bytes;
use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_core::chunk::ContentChange;
use threefs_core::ids::{ChainId, ChunkId, InodeId};
use threefs_core::layout::Layout;
use threefs_core::message::LastChunk;
use threefs_meta::ChunkTrimmer;
use tokio::task::JoinSet;

use crate::Client;
use crate::batch::joined;
use crate::chunks::{Place, What};
use crate::error::ClientError;

/// Chunks cut or removed at once.
const UPDATES_IN_FLIGHT_MAX: usize = 16;

impl ChunkTrimmer for Client {
    fn trim<'a>(
        &'a self,
        inode: InodeId,
        layout: &'a Layout,
        length: u64,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            let trimmed = self.trim_file(inode, layout, length, deadline).await;
            trimmed.map_err(|error| error.to_string())
        })
    }
}

impl Client {
    async fn trim_file(
        &self,
        inode: InodeId,
        layout: &Layout,
        length: u64,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let what: What = Arc::from(format!("cut {inode} at {length}"));
        let mut chains = self.chains(&what, layout, deadline).await?;
        // An explicit layout may name a chain twice.
        chains.sort_unstable();
        chains.dedup();
        for chain in chains {
            self.trim_chain(&what, chain, inode, layout.chunk_bytes, length, deadline).await?;
        }
        Ok(())
    }

    async fn trim_chain(
        &self,
        what: &What,
        chain: ChainId,
        inode: InodeId,
        chunk_bytes: u32,
        length: u64,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let size = u64::from(chunk_bytes);
        // Chunks that lie wholly before the length are none of our business.
        let mut after = u32::try_from(length / size).unwrap_or(u32::MAX).checked_sub(1);
        loop {
            let (chunks, last) = self.chunks_after(what, chain, inode, after, deadline).await?;
            let mut tasks: JoinSet<Result<(), ClientError>> = JoinSet::new();
            for LastChunk { index, length: chunk_length } in &chunks {
                let start = u64::from(*index) * size;
                let change = match length.checked_sub(start) {
                    // Below chunk_bytes, so the cast holds.
                    Some(keep) if keep > 0 && keep < u64::from(*chunk_length) => {
                        ContentChange::Truncate { length: keep as u32 }
                    }
                    Some(keep) if keep > 0 => continue,
                    _ => ContentChange::Remove,
                };
                if tasks.len() >= UPDATES_IN_FLIGHT_MAX
                    && let Some(ended) = tasks.join_next().await
                {
                    joined(ended)?;
                }
                let place = Place { chain, chunk: ChunkId::new(inode, *index), chunk_bytes };
                let (client, what) = (self.clone(), Arc::clone(what));
                tasks.spawn(async move {
                    client.update(&what, place, change, Bytes::new(), deadline).await.map(drop)
                });
            }
            while let Some(ended) = tasks.join_next().await {
                joined(ended)?;
            }
            match chunks.last() {
                Some(newest) if !last => after = Some(newest.index),
                _ => return Ok(()),
            }
        }
    }
}
