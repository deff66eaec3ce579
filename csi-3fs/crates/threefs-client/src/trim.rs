//! Taking chunks away beyond a length: what the metadata service needs of storage.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fabric::BoxFuture;
use fabric::deadline::Deadline;
use fabric::moment::Moment;
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

/// Chains of one file that are asked at once.
const CHAINS_AT_ONCE: usize = 16;
/// How long one chain may take to give up the chunks of a removed file.
const CHAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Chunks of one chain that are cut or removed at once.
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
            let what: What = Arc::from(format!("cut {inode} at {length}"));
            let chains = self.chains(&what, layout, deadline).await;
            let chains = chains.map_err(|error| error.to_string())?;
            let cut = Cut { inode, chunk_bytes: layout.chunk_bytes, length };
            self.cut_chains(&what, chains, cut, deadline).await
        })
    }

    fn remove<'a>(
        &'a self,
        inode: InodeId,
        layout: &'a Layout,
        end: u64,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            let what: What = Arc::from(format!("remove {inode}"));
            let chains = self.chains(&what, layout, deadline).await;
            let mut chains = chains.map_err(|error| error.to_string())?;
            // Chunk number i lies on chain i of the layout, so a short file has few chains.
            let chunks = end.div_ceil(u64::from(layout.chunk_bytes));
            chains.truncate(usize::try_from(chunks).unwrap_or(usize::MAX));
            let cut = Cut { inode, chunk_bytes: layout.chunk_bytes, length: 0 };
            self.remove_from_chains(&what, chains, cut, deadline).await
        })
    }
}

/// What is to be cut of a file.
#[derive(Clone, Copy)]
struct Cut {
    inode: InodeId,
    chunk_bytes: u32,
    length: u64,
}

impl Client {
    /// All chains side by side, each for as long as the deadline allows: the caller waits for it.
    async fn cut_chains(
        &self,
        what: &What,
        mut chains: Vec<ChainId>,
        cut: Cut,
        deadline: Deadline,
    ) -> Result<(), String> {
        // An explicit layout may name a chain twice.
        chains.sort_unstable();
        chains.dedup();
        let mut tasks: JoinSet<Result<(), ClientError>> = JoinSet::new();
        let mut outcome = Ok(());
        for chain in chains {
            if tasks.len() >= CHAINS_AT_ONCE
                && let Some(ended) = tasks.join_next().await
            {
                outcome = outcome.and(joined(ended));
            }
            let (client, what) = (self.clone(), Arc::clone(what));
            tasks.spawn(async move { client.cut_chain(&what, chain, cut, deadline).await });
        }
        while let Some(ended) = tasks.join_next().await {
            outcome = outcome.and(joined(ended));
        }
        outcome.map_err(|error| error.to_string())
    }

    /// All chains side by side, but those that did not answer lately; of what fails the others are
    /// rid nevertheless.
    async fn remove_from_chains(
        &self,
        what: &What,
        mut chains: Vec<ChainId>,
        cut: Cut,
        deadline: Deadline,
    ) -> Result<(), String> {
        chains.sort_unstable();
        chains.dedup();
        let mut tasks: JoinSet<Result<(), String>> = JoinSet::new();
        let mut outcome = Ok(());
        for chain in chains {
            let admitted = self.breakers().admit(chain, Moment::now());
            if let Err(pause) = admitted {
                let detail = format!("{chain} did not answer; next attempt in {pause:.1?}");
                outcome = outcome.and(Err(detail));
                continue;
            }
            if tasks.len() >= CHAINS_AT_ONCE
                && let Some(ended) = tasks.join_next().await
            {
                outcome = outcome.and(ended.map_err(|error| error.to_string()).flatten());
            }
            let (client, what) = (self.clone(), Arc::clone(what));
            let deadline = deadline.within(CHAIN_TIMEOUT);
            tasks.spawn(async move {
                let removed = client.cut_chain(&what, chain, cut, deadline).await;
                // A long file ends at its deadline, too; who has removed something has answered.
                let answered = !matches!(removed, Err(ClientError::Unavailable { .. }));
                client.breakers().asked(chain, answered, Moment::now());
                removed.map_err(|error| error.to_string())
            });
        }
        while let Some(ended) = tasks.join_next().await {
            outcome = outcome.and(ended.map_err(|error| error.to_string()).flatten());
        }
        outcome
    }

    fn breakers(&self) -> std::sync::MutexGuard<'_, crate::breaker::Breakers> {
        self.0.breakers.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    async fn cut_chain(
        &self,
        what: &What,
        chain: ChainId,
        cut: Cut,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let Cut { inode, chunk_bytes, length } = cut;
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
