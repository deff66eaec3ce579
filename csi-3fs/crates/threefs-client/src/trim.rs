//! Removal of chunks beyond a length, and search for the end of a file's chunks, for the metadata
//! service.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fabric::BoxFuture;
use fabric::boot_instant::BootInstant;
use fabric::deadline::Deadline;
use threefs_core::chunk::ContentChange;
use threefs_core::forgotten::{FORGET_INODES_MAX, InodeRange};
use threefs_core::ids::{ChainId, ChunkId, ChunkVersion, InodeId};
use threefs_core::layout::Layout;
use threefs_core::message::{ForgetInodes, LastChunk, QueryChunks, StorageReply, StorageRequest};
use threefs_meta::{ChunkTrimmer, DeadFile, Pending};
use tokio::task::JoinSet;

use crate::Client;
use crate::error::{Attempts, ClientError, OperationName};
use crate::inodes::PAGE;
use crate::routing::ChunkLocation;
use crate::window::task_result;

/// Maximum number of chains called concurrently.
const CHAINS_AT_ONCE: usize = 16;
/// Timeout of one chain for forgetting removed files.
const CHAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of chunks of a chain truncated or removed concurrently.
const UPDATES_IN_FLIGHT_MAX: usize = 16;

impl ChunkTrimmer for Client {
    fn trim<'a>(
        &'a self,
        inode: InodeId,
        layout: &'a Layout,
        range: Range<u64>,
        pending: Pending,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            let what: OperationName = Arc::from(format!("cut {inode} at {}", range.start));
            let chains = self.chains(&what, layout, deadline).await;
            let chains = chains.map_err(|error| error.to_string())?;
            let chains = chains_within(&chains, layout.chunk_bytes, &range);
            let (chunk_bytes, length) = (layout.chunk_bytes, range.start);
            let truncation = Truncation { inode, chunk_bytes, length, pending };
            self.truncate_chains(&what, chains, truncation, deadline).await
        })
    }

    fn forget<'a>(
        &'a self,
        files: &'a [DeadFile],
        deadline: Deadline,
    ) -> BoxFuture<'a, Vec<Result<(), String>>> {
        Box::pin(self.forget_files(files, deadline))
    }

    fn stored_end<'a>(
        &'a self,
        inode: InodeId,
        layout: &'a Layout,
        range: Range<u64>,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<u64, String>> {
        Box::pin(self.end_within(inode, layout, range, deadline))
    }
}

/// A truncation of a file.
#[derive(Clone)]
struct Truncation {
    inode: InodeId,
    chunk_bytes: u32,
    length: u64,
    pending: Pending,
}

impl Client {
    /// Truncates on all chains concurrently, each until the deadline: the caller waits for it.
    async fn truncate_chains(
        &self,
        what: &OperationName,
        chains: BTreeSet<ChainId>,
        truncation: Truncation,
        deadline: Deadline,
    ) -> Result<(), String> {
        let mut tasks: JoinSet<Result<(), String>> = JoinSet::new();
        let mut outcome = Ok(());
        for chain in chains {
            if tasks.len() >= CHAINS_AT_ONCE
                && let Some(finished) = tasks.join_next().await
            {
                outcome = outcome.and(finished.unwrap_or_else(|error| Err(error.to_string())));
            }
            let (client, what) = (self.clone(), Arc::clone(what));
            let truncation = truncation.clone();
            tasks.spawn(
                async move { client.truncate_chain(&what, chain, truncation, deadline).await },
            );
        }
        while let Some(finished) = tasks.join_next().await {
            outcome = outcome.and(finished.unwrap_or_else(|error| Err(error.to_string())));
        }
        outcome
    }

    /// Sends one request to each chain for all files that may have chunks there, concurrently,
    /// skipping chains that did not answer recently.
    async fn forget_files(
        &self,
        files: &[DeadFile],
        deadline: Deadline,
    ) -> Vec<Result<(), String>> {
        let what: OperationName = Arc::from("forget removed files");
        let mut results: Vec<Result<(), String>> = vec![Ok(()); files.len()];
        let mut of_chain: BTreeMap<ChainId, Vec<usize>> = BTreeMap::new();
        for (number, file) in files.iter().enumerate() {
            match self.chains(&what, &file.layout, deadline).await {
                Ok(chains) => {
                    for chain in chains_within(&chains, file.layout.chunk_bytes, &(0..file.end)) {
                        of_chain.entry(chain).or_default().push(number);
                    }
                }
                Err(error) => results[number] = Err(error.to_string()),
            }
        }
        let mut tasks: JoinSet<(Vec<usize>, Result<(), String>)> = JoinSet::new();
        let mut fail = |(numbers, result): (Vec<usize>, Result<(), String>)| {
            if let Err(error) = result {
                numbers.iter().for_each(|number| results[*number] = Err(error.clone()));
            }
        };
        for (chain, numbers) in of_chain {
            if let Err(pause) = self.breakers().check(chain, BootInstant::now()) {
                let detail = format!("{chain} did not answer; next attempt in {pause:.1?}");
                fail((numbers, Err(detail)));
                continue;
            }
            if tasks.len() >= CHAINS_AT_ONCE
                && let Some(Ok(finished)) = tasks.join_next().await
            {
                fail(finished);
            }
            let inodes = numbers.iter().map(|number| files[*number].inode).collect();
            let (client, what) = (self.clone(), Arc::clone(&what));
            let deadline = deadline.within(CHAIN_TIMEOUT);
            tasks.spawn(async move {
                let forgotten = client.forget_on(&what, chain, inodes, deadline).await;
                let answered = !matches!(forgotten, Err(ClientError::Unavailable { .. }));
                client.breakers().record(chain, answered, BootInstant::now());
                (numbers, forgotten.map_err(|error| error.to_string()))
            });
        }
        // The files of a panicked task are unknown, so none counts as done.
        let mut broken = false;
        while let Some(finished) = tasks.join_next().await {
            match finished {
                Ok(finished) => fail(finished),
                Err(_) => broken = true,
            }
        }
        if broken {
            results.fill(Err("a task of this client panicked".into()));
        }
        results
    }

    /// Queries the chains that can have chunks of the range, one after the other, except those that
    /// did not answer recently.
    async fn end_within(
        &self,
        inode: InodeId,
        layout: &Layout,
        range: Range<u64>,
        deadline: Deadline,
    ) -> Result<u64, String> {
        let what: OperationName = Arc::from(format!("find the end of {inode}"));
        let chains = self.chains(&what, layout, deadline).await.map_err(|it| it.to_string())?;
        let mut end = range.start;
        for chain in chains_within(&chains, layout.chunk_bytes, &range) {
            if let Err(pause) = self.breakers().check(chain, BootInstant::now()) {
                return Err(format!("{chain} did not answer; next attempt in {pause:.1?}"));
            }
            // Judged by a short query: a file with too many chunks to list in time does not mean
            // that the chain does not answer.
            let size = u64::from(layout.chunk_bytes.max(1));
            let after = u32::try_from(range.start / size).unwrap_or(u32::MAX).checked_sub(1);
            let soon = Deadline::after(CHAIN_TIMEOUT);
            let result = self.first_chunks_after(&what, chain, inode, after, 1, soon).await;
            let answered = !matches!(result, Err(ClientError::Unavailable { .. }));
            self.breakers().record(chain, answered, BootInstant::now());
            let (chunks, _) = result.map_err(|error| error.to_string())?;
            if chunks.is_empty() {
                continue;
            }
            let chunk_bytes = layout.chunk_bytes;
            let result = self.end_on(&what, chain, inode, chunk_bytes, range.start, deadline).await;
            end = end.max(result.map_err(|error| error.to_string())?);
        }
        Ok(end.min(range.end.max(range.start)))
    }

    pub(crate) async fn forget_on(
        &self,
        what: &OperationName,
        chain: ChainId,
        inodes: BTreeSet<InodeId>,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        for inodes in ranges(&inodes).chunks(FORGET_INODES_MAX) {
            let mut attempts = Attempts::of(&**what);
            let build_request =
                |to| StorageRequest::ForgetInodes(ForgetInodes::of_head(to, inodes.to_vec()));
            match self
                .call_head(chain, &mut attempts, Bytes::new(), &deadline.into(), build_request)
                .await?
            {
                Some((_, StorageReply::InodesForgotten)) => {}
                Some((who, other)) => return Err(ClientError::unexpected(&who, &other)),
                None => return Err(attempts.unavailable(self.0.config.timeout)),
            }
        }
        Ok(())
    }

    fn breakers(&self) -> std::sync::MutexGuard<'_, crate::breaker::Breakers> {
        self.0.breakers.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Truncates the chunks of one chain, page by page. Chunks are cut only at the versions that they
    /// had while the truncation was pending: another service may complete it at any time, and later
    /// data must stay.
    async fn truncate_chain(
        &self,
        what: &OperationName,
        chain: ChainId,
        truncation: Truncation,
        deadline: Deadline,
    ) -> Result<(), String> {
        let size = u64::from(truncation.chunk_bytes);
        // Skip chunks that are entirely before the length.
        let mut after = u32::try_from(truncation.length / size).unwrap_or(u32::MAX).checked_sub(1);
        loop {
            let page = self.versions_after(what, chain, truncation.inode, after, deadline).await;
            let (chunks, last) = page.map_err(|error| error.to_string())?;
            let cuts: Vec<_> = chunks.iter().filter_map(|chunk| truncation.cut(chunk)).collect();
            if !cuts.is_empty() {
                (truncation.pending)().await?;
            }
            let cut = self.cut_chunks(what, chain, &truncation, cuts, deadline).await;
            match (cut, chunks.last()) {
                // It was written meanwhile: its new version is cut if the truncation is still pending.
                (Err(ClientError::Changed { .. }), _) => {}
                (Err(error), _) => return Err(error.to_string()),
                (Ok(()), Some((current, _))) if !last => after = Some(current.index),
                (Ok(()), _) => return Ok(()),
            }
        }
    }

    async fn cut_chunks(
        &self,
        what: &OperationName,
        chain: ChainId,
        truncation: &Truncation,
        cuts: Vec<(u32, ChunkVersion, ContentChange)>,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let Truncation { inode, chunk_bytes, .. } = *truncation;
        let mut tasks: JoinSet<Result<(), ClientError>> = JoinSet::new();
        for (index, version, change) in cuts {
            if tasks.len() >= UPDATES_IN_FLIGHT_MAX
                && let Some(finished) = tasks.join_next().await
            {
                task_result(finished)?;
            }
            let location = ChunkLocation { chain, chunk: ChunkId::new(inode, index), chunk_bytes };
            let (client, what) = (self.clone(), Arc::clone(what));
            tasks.spawn(async move {
                client.update_at(&what, location, version, change, deadline).await.map(drop)
            });
        }
        while let Some(finished) = tasks.join_next().await {
            task_result(finished)?;
        }
        Ok(())
    }

    /// One page of the chunks of a file on a chain, with their versions.
    async fn versions_after(
        &self,
        what: &OperationName,
        chain: ChainId,
        inode: InodeId,
        after: Option<u32>,
        deadline: Deadline,
    ) -> Result<(Vec<(LastChunk, ChunkVersion)>, bool), ClientError> {
        let mut attempts = Attempts::of(&**what);
        let request =
            |to| StorageRequest::QueryVersions(QueryChunks { to, inode, after, limit: PAGE });
        let reply =
            self.call_head(chain, &mut attempts, Bytes::new(), &deadline.into(), request).await?;
        match reply {
            Some((_, StorageReply::ChunkVersions { chunks, last })) => Ok((chunks, last)),
            Some((who, other)) => Err(ClientError::unexpected(&who, &other)),
            None => Err(attempts.unavailable(self.0.config.timeout)),
        }
    }
}

impl Truncation {
    /// The update that a chunk needs, with its index and version.
    fn cut(
        &self,
        (chunk, version): &(LastChunk, ChunkVersion),
    ) -> Option<(u32, ChunkVersion, ContentChange)> {
        let start = u64::from(chunk.index) * u64::from(self.chunk_bytes);
        let change = match self.length.checked_sub(start) {
            _ if chunk.length == 0 => return None,
            // Below `chunk_bytes`, so the cast is exact.
            Some(keep) if keep > 0 && keep < u64::from(chunk.length) => {
                ContentChange::Truncate { length: keep as u32 }
            }
            Some(keep) if keep > 0 => return None,
            _ => ContentChange::Remove,
        };
        Some((chunk.index, *version, change))
    }
}

/// The chains of a layout that can have chunks of a byte range of a file.
fn chains_within(chains: &[ChainId], chunk_bytes: u32, range: &Range<u64>) -> BTreeSet<ChainId> {
    let size = u64::from(chunk_bytes.max(1));
    let (first, end) = (range.start / size, range.end.div_ceil(size));
    let count = chains.len().max(1) as u64;
    let places = first..end.max(first).min(first.saturating_add(count));
    places.filter_map(|index| chains.get((index % count) as usize)).copied().collect()
}

/// Merges consecutive numbers into ranges.
fn ranges(inodes: &BTreeSet<InodeId>) -> Vec<InodeRange> {
    let mut ranges: Vec<InodeRange> = Vec::new();
    for inode in inodes {
        match ranges.last_mut() {
            Some(range) if range.last.0.checked_add(1) == Some(inode.0) => range.last = *inode,
            _ => ranges.push(InodeRange::one(*inode)),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_inodes_are_one_range() {
        let inodes = [5, 6, 7, 9, u64::MAX].map(InodeId).into_iter().collect();
        let actual: Vec<_> = ranges(&inodes).iter().map(|it| (it.first.0, it.last.0)).collect();
        assert_eq!(actual, [(5, 7), (9, 9), (u64::MAX, u64::MAX)]);
    }

    #[test]
    fn a_range_lies_on_the_chains_of_its_chunks() {
        let chains: Vec<ChainId> = (0..16).map(ChainId).collect();
        let within = |range: Range<u64>| -> Vec<u32> {
            chains_within(&chains, 1 << 20, &range).iter().map(|chain| chain.0).collect()
        };
        assert_eq!(within(0..0), [0_u32; 0]);
        assert_eq!(within(0..1), [0]);
        assert_eq!(within(5..1 << 20), [0]);
        assert_eq!(within(1 << 20..(2 << 20) + 1), [1, 2]);
        assert_eq!(within(15 << 20..17 << 20), [0, 15]);
        assert_eq!(within(7..u64::MAX).len(), 16);
        assert_eq!(chains_within(&[ChainId(3); 4], 1 << 20, &(0..9 << 20)).len(), 1);
    }

    #[test]
    fn a_short_file_lies_on_few_chains() {
        let chains: Vec<ChainId> = (0..16).map(ChainId).collect();
        let count = |end| chains_within(&chains, 1 << 20, &(0..end)).len();
        assert_eq!([0, 1, 1 << 20, (1 << 20) + 1, u64::MAX].map(count), [0, 1, 1, 2, 16]);
    }
}
