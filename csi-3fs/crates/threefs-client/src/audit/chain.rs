//! The chunks of one chain, page by page, in the order of their ids.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use fabric::deadline::Deadline;
use threefs_core::ids::{ChainId, ChunkId, InodeId};
use threefs_core::message::{StorageReply, StorageRequest};
use threefs_core::scrub::{ChunkSummary, QueryStates};

use crate::Client;
use crate::error::{Attempts, ClientError, OperationName};

/// Chunks of one reply.
const PAGE: u32 = 1024;

/// A place among the chunks of a chain, with a page of the next ones.
#[derive(Debug)]
pub(super) struct ChainCursor {
    pub chain: ChainId,
    page: VecDeque<ChunkSummary>,
    after: Option<ChunkId>,
    last: ChunkId,
    ended: bool,
}

impl ChainCursor {
    /// All chunks of a chain.
    pub(super) fn new(chain: ChainId) -> Self {
        Self::between(chain, None, ChunkId::MAX)
    }

    /// The chunks after `after`, up to `last`.
    pub(super) fn between(chain: ChainId, after: Option<ChunkId>, last: ChunkId) -> Self {
        Self { chain, page: VecDeque::new(), after, last, ended: false }
    }

    /// The next chunk, if it is of an inode up to this one.
    pub(super) async fn next(
        &mut self,
        client: &Client,
        until: InodeId,
        deadline: Deadline,
    ) -> Result<Option<ChunkSummary>, ClientError> {
        if self.page.is_empty() && !self.ended {
            let states = client.chunk_states(self.chain, self.after, self.last, deadline).await?;
            // Not at a short page: the limit of the service may be lower.
            self.ended = states.is_empty();
            self.after = states.last().map(|state| state.chunk).or(self.after);
            self.page = states.into();
        }
        match self.page.front() {
            Some(state) if state.chunk.inode <= until => Ok(self.page.pop_front()),
            _ => Ok(None),
        }
    }
}

impl Client {
    /// One page of the states of a chain's chunks, from its head.
    async fn chunk_states(
        &self,
        chain: ChainId,
        after: Option<ChunkId>,
        last: ChunkId,
        deadline: Deadline,
    ) -> Result<Vec<ChunkSummary>, ClientError> {
        let what: OperationName = Arc::from(format!("list the chunks of {chain}"));
        let mut attempts = Attempts::of(&*what);
        let query = QueryStates { after, last, limit: PAGE };
        let request = |to| StorageRequest::QueryStates(to, query);
        let reply =
            self.call_head(chain, &mut attempts, Bytes::new(), &deadline.into(), request).await?;
        match reply {
            Some((_, StorageReply::States(states))) => Ok(states),
            Some((who, other)) => Err(ClientError::unexpected(&who, &other)),
            None => Err(attempts.unavailable(self.0.config.timeout)),
        }
    }
}
