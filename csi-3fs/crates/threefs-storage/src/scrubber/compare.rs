//! Comparison with the predecessor. A difference counts if it is the same a minute later: until
//! then, the chunks of removed files may be dropped by one replica after the other.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fabric::deadline::Deadline;
use threefs_core::ids::{ChainVersion, ChunkId, NodeId};
use threefs_core::message::{Address, StorageReply, StorageRequest};
use threefs_core::replica::Event;
use threefs_core::scrub::{ChunkSummary, Difference, DifferenceKind, QueryStates, compare};
use tokio::time::Instant;

use super::{Ended, Scrubber};
use crate::target::Target;

/// Chunks of one query.
const STATES: usize = 1_024;
/// Timeout of one query; far below the time after which a removed chunk is purged.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Attempts to compare a range, with pauses, before it is left to the next pass.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of chunks that wait for their second comparison; the next pass compares others.
const SUSPECTS_MAX: usize = 1_024;

/// Chunks that differed once.
#[derive(Default)]
pub(super) struct Suspects(VecDeque<(Instant, ChainVersion, Difference)>);

/// A comparison of a range of chunks.
struct Compared {
    /// The last chunk that was compared.
    last: ChunkId,
    chain_version: ChainVersion,
    differences: Vec<Difference>,
}

impl Scrubber {
    /// Compares the chunks after `after` up to `last`, then those that are due a second time.
    pub(super) async fn compare(
        &mut self,
        mut after: Option<ChunkId>,
        last: ChunkId,
    ) -> Result<(), Ended> {
        while after < Some(last) {
            let Some(compared) = self.compare_range(after, last).await? else { break };
            let suspects: Vec<ChunkId> =
                compared.differences.iter().map(|difference| difference.chunk).collect();
            self.scrub.progress().compared(after, compared.last, &suspects);
            let due = Instant::now() + self.limits.confirm_after;
            for difference in compared.differences {
                if self.suspects.0.len() < SUSPECTS_MAX {
                    self.suspects.0.push_back((due, compared.chain_version, difference));
                }
            }
            after = Some(compared.last);
        }
        self.confirm_due().await
    }

    /// Waits until all suspects have been compared a second time.
    pub(super) async fn confirm_all(&mut self) -> Result<(), Ended> {
        while let Some((due, ..)) = self.suspects.0.front() {
            tokio::time::sleep_until(*due).await;
            self.confirm_due().await?;
        }
        Ok(())
    }

    async fn confirm_due(&mut self) -> Result<(), Ended> {
        while let Some(&(due, chain_version, difference)) = self.suspects.0.front()
            && due <= Instant::now()
        {
            self.suspects.0.pop_front();
            let before = difference.chunk.bound_before();
            let Some(compared) = self.compare_range(before, difference.chunk).await? else {
                continue;
            };
            if compared.chain_version == chain_version && compared.differences.contains(&difference)
            {
                self.confirmed(difference, chain_version)?;
            }
        }
        Ok(())
    }

    fn confirmed(&self, difference: Difference, chain_version: ChainVersion) -> Result<(), Ended> {
        let (target, chunk) = (self.target()?, difference.chunk);
        self.scrub.progress().differs(chunk, difference.kind);
        if difference.kind == DifferenceKind::Newer {
            tracing::error!(
                "scrub: {} has a later state of {chunk} than its predecessor: {difference:?}; \
                 nothing is changed",
                target.id()
            );
        }
        target.handle(Event::Differs { difference, chain_version });
        Ok(())
    }

    /// As `compare_once`, with retries.
    async fn compare_range(
        &self,
        after: Option<ChunkId>,
        last: ChunkId,
    ) -> Result<Option<Compared>, Ended> {
        for _ in 1..ATTEMPTS {
            let compared = self.compare_once(after, last).await?;
            if compared.is_some() || self.predecessor()?.is_none() {
                return Ok(compared);
            }
            tokio::time::sleep(PAUSE).await;
        }
        self.compare_once(after, last).await
    }

    /// `None`: the replica has no predecessor, or it does not answer.
    async fn compare_once(
        &self,
        after: Option<ChunkId>,
        last: ChunkId,
    ) -> Result<Option<Compared>, Ended> {
        let Some((node, to)) = self.predecessor()? else { return Ok(None) };
        let before = self.states(after, last).await?;
        let limit = STATES as u32;
        let request = StorageRequest::QueryStates(to, QueryStates { after, last, limit });
        let Some(theirs) = self.query(node, &request).await? else { return Ok(None) };
        let mut end = last;
        for states in [&before, &theirs] {
            if let Some(state) = states.last().filter(|_| states.len() >= STATES) {
                end = end.min(state.chunk);
            }
        }
        let current = self.states(after, end).await?;
        let until = |states: Vec<ChunkSummary>| -> Vec<ChunkSummary> {
            states.into_iter().filter(|state| state.chunk <= end).collect()
        };
        // Chunks that were created meanwhile may exceed the limit: they are compared next time.
        let end = current.last().filter(|_| current.len() >= STATES).map_or(end, |it| it.chunk);
        let differences = compare(&until(before), &until(theirs), &until(current));
        let mut differences: Vec<Difference> =
            differences.into_iter().filter(|it| it.chunk <= end).collect();
        if !differences.is_empty() {
            // Either side may have dropped it.
            let without_hidden = move |target: &Target| {
                differences.retain(|it| !target.hides(it.chunk));
                differences
            };
            differences = self.on_worker(without_hidden).await?;
        }
        Ok(Some(Compared { last: end, chain_version: to.chain_version, differences }))
    }

    async fn states(
        &self,
        after: Option<ChunkId>,
        last: ChunkId,
    ) -> Result<Vec<ChunkSummary>, Ended> {
        let metas = self.metas(after, last, STATES).await?;
        Ok(metas.iter().map(ChunkSummary::from).collect())
    }

    fn predecessor(&self) -> Result<Option<(NodeId, Address)>, Ended> {
        let target = self.target()?;
        let routing = target.context.routing();
        let chain = routing.chain(target.chain());
        let place = chain.and_then(|chain| Some((chain, chain.predecessor(target.id())?)));
        Ok(place.map(|(chain, place)| {
            let to =
                Address { chain: chain.id, chain_version: chain.version, target: place.target };
            (place.node, to)
        }))
    }

    /// `None`: the predecessor does not answer, has another version of the chain, or is of a release
    /// without this query.
    async fn query(
        &self,
        node: NodeId,
        request: &StorageRequest,
    ) -> Result<Option<Vec<ChunkSummary>>, Ended> {
        let context = Arc::clone(&self.target()?.context);
        let routing = context.routing();
        let address = routing.address(node).unwrap_or_default();
        let deadline = Deadline::after(QUERY_TIMEOUT);
        let (result, _) = context.peers.call(address, request, Bytes::new(), deadline).await;
        match result {
            Ok(StorageReply::States(states)) => Ok(Some(states)),
            _ => Ok(None),
        }
    }
}
