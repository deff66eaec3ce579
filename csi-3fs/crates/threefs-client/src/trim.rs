//! Taking chunks away beyond a length, and finding where they end: what the metadata service needs
//! of storage.

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
use threefs_core::ids::{ChainId, ChunkId, InodeId};
use threefs_core::layout::Layout;
use threefs_core::message::{ForgetInodes, LastChunk, StorageReply, StorageRequest};
use threefs_meta::{ChunkTrimmer, DeadFile};
use tokio::task::JoinSet;

use crate::Client;
use crate::batch::joined;
use crate::chunks::{Place, What};
use crate::error::{Attempts, ClientError};

/// Chains of one file that are asked at once.
const CHAINS_AT_ONCE: usize = 16;
/// How long one chain may take to forget removed files.
const CHAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Chunks of one chain that are cut or removed at once.
const UPDATES_IN_FLIGHT_MAX: usize = 16;

impl ChunkTrimmer for Client {
    fn trim<'a>(
        &'a self,
        inode: InodeId,
        layout: &'a Layout,
        range: Range<u64>,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            let what: What = Arc::from(format!("cut {inode} at {}", range.start));
            let chains = self.chains(&what, layout, deadline).await;
            let chains = chains.map_err(|error| error.to_string())?;
            let chains = chains_within(&chains, layout.chunk_bytes, &range);
            let cut = Cut { inode, chunk_bytes: layout.chunk_bytes, length: range.start };
            self.cut_chains(&what, chains, cut, deadline).await
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
        chains: BTreeSet<ChainId>,
        cut: Cut,
        deadline: Deadline,
    ) -> Result<(), String> {
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

    /// One request to each chain for all files that may have chunks there, side by side, but none to
    /// chains that did not answer lately.
    async fn forget_files(
        &self,
        files: &[DeadFile],
        deadline: Deadline,
    ) -> Vec<Result<(), String>> {
        let what: What = Arc::from("forget removed files");
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
            if let Err(pause) = self.breakers().admit(chain, BootInstant::now()) {
                let detail = format!("{chain} did not answer; next attempt in {pause:.1?}");
                fail((numbers, Err(detail)));
                continue;
            }
            if tasks.len() >= CHAINS_AT_ONCE
                && let Some(Ok(ended)) = tasks.join_next().await
            {
                fail(ended);
            }
            let inodes = numbers.iter().map(|number| files[*number].inode).collect();
            let (client, what) = (self.clone(), Arc::clone(&what));
            let deadline = deadline.within(CHAIN_TIMEOUT);
            tasks.spawn(async move {
                let forgotten = client.forget_on(&what, chain, inodes, deadline).await;
                let answered = !matches!(forgotten, Err(ClientError::Unavailable { .. }));
                client.breakers().asked(chain, answered, BootInstant::now());
                (numbers, forgotten.map_err(|error| error.to_string()))
            });
        }
        // A task that panicked says nothing of its files, so none counts as done.
        let mut broken = false;
        while let Some(ended) = tasks.join_next().await {
            match ended {
                Ok(ended) => fail(ended),
                Err(_) => broken = true,
            }
        }
        if broken {
            results.fill(Err("a task of this client ended early".into()));
        }
        results
    }

    /// The chains that can have chunks of the range, one after the other, but none that did not answer
    /// lately.
    async fn end_within(
        &self,
        inode: InodeId,
        layout: &Layout,
        range: Range<u64>,
        deadline: Deadline,
    ) -> Result<u64, String> {
        let what: What = Arc::from(format!("find the end of {inode}"));
        let chains = self.chains(&what, layout, deadline).await.map_err(|it| it.to_string())?;
        let mut end = range.start;
        for chain in chains_within(&chains, layout.chunk_bytes, &range) {
            if let Err(pause) = self.breakers().admit(chain, BootInstant::now()) {
                return Err(format!("{chain} did not answer; next attempt in {pause:.1?}"));
            }
            // Judged by a short question: that a file has too many chunks to see them all in time does
            // not mean that the chain does not answer.
            let size = u64::from(layout.chunk_bytes.max(1));
            let after = u32::try_from(range.start / size).unwrap_or(u32::MAX).checked_sub(1);
            let soon = Deadline::after(CHAIN_TIMEOUT);
            let found = self.first_chunks_after(&what, chain, inode, after, 1, soon).await;
            let answered = !matches!(found, Err(ClientError::Unavailable { .. }));
            self.breakers().asked(chain, answered, BootInstant::now());
            let (chunks, _) = found.map_err(|error| error.to_string())?;
            if chunks.is_empty() {
                continue;
            }
            let chunk_bytes = layout.chunk_bytes;
            let found = self.end_on(&what, chain, inode, chunk_bytes, range.start, deadline).await;
            end = end.max(found.map_err(|error| error.to_string())?);
        }
        Ok(end.min(range.end.max(range.start)))
    }

    async fn forget_on(
        &self,
        what: &What,
        chain: ChainId,
        inodes: BTreeSet<InodeId>,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        for inodes in ranges(&inodes).chunks(FORGET_INODES_MAX) {
            let mut attempts = Attempts::of(&**what);
            let ask = |to| StorageRequest::ForgetInodes(ForgetInodes::of_head(to, inodes.to_vec()));
            match self.ask_head(chain, &mut attempts, Bytes::new(), &deadline.into(), ask).await? {
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
            for LastChunk { index, length: chunk_length } in
                chunks.iter().filter(|it| it.length > 0)
            {
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

/// Those of a layout's chains that can have chunks of a range of a file's bytes.
fn chains_within(chains: &[ChainId], chunk_bytes: u32, range: &Range<u64>) -> BTreeSet<ChainId> {
    let size = u64::from(chunk_bytes.max(1));
    let (first, behind) = (range.start / size, range.end.div_ceil(size));
    let count = chains.len().max(1) as u64;
    let places = first..behind.max(first).min(first.saturating_add(count));
    places.filter_map(|index| chains.get((index % count) as usize)).copied().collect()
}

/// Neighbouring numbers as ranges.
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
    fn neighbours_are_one_range() {
        let inodes = [5, 6, 7, 9, u64::MAX].map(InodeId).into_iter().collect();
        let found: Vec<_> = ranges(&inodes).iter().map(|it| (it.first.0, it.last.0)).collect();
        assert_eq!(found, [(5, 7), (9, 9), (u64::MAX, u64::MAX)]);
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
