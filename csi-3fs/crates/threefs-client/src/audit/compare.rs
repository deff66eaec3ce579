//! Comparison of one chain with a page of inodes, and confirmation of what is leaked.

use std::collections::BTreeSet;

use threefs_core::ids::{ChainId, ChunkId, ClusterId, InodeId};
use threefs_meta::protocol::BATCH_MAX;
use threefs_meta::{AuditAnswer, AuditQuery};

use super::chain::ChainCursor;
use super::expected::Comparison;
use super::{Compared, LEAKS_OF_CHAIN_MAX, Page, SUSPECTS_MAX, unexpected};
use crate::Client;
use crate::error::ClientError;

/// The tree, which must be that of the storage services' cluster.
#[derive(Clone)]
pub(super) struct TreeOfCluster {
    pub client: Client,
    pub cluster: ClusterId,
}

/// Which side did not answer.
pub(super) enum NotCompared {
    Chain(ClientError),
    Tree(ClientError),
}

impl TreeOfCluster {
    /// Compares the chunks of a chain with a page.
    pub(super) async fn compare(
        &self,
        cursor: &mut ChainCursor,
        page: &Page,
    ) -> Result<Compared, NotCompared> {
        let (client, chain) = (&self.client, cursor.chain);
        let mut compared = Compared::default();
        let (mut missing, mut missing_more) = (Vec::new(), 0);
        let mut suspect = |chunk: ChunkId| match missing.len() < SUSPECTS_MAX {
            true => missing.push(chunk),
            false => missing_more += 1,
        };
        let mut comparison = Comparison::new(page.expected_on(chain));
        let (mut unknown, mut counted) = (BTreeSet::new(), None);
        loop {
            let next = cursor.next(client, page.until, client.deadline()).await;
            let Some(state) = next.map_err(NotCompared::Chain)? else { break };
            comparison.next(&state, &mut suspect);
            if !state.exists {
                continue;
            }
            // Once for all versions of a chunk.
            let of = Some(state.chunk.first_version());
            compared.chunks += u64::from(counted != of);
            counted = of;
            compared.bytes += u64::from(state.length);
            if page.inodes.binary_search(&state.chunk.inode).is_err() {
                // Up to a thousand: after the loss of a tree all inodes are unknown.
                if unknown.len() >= BATCH_MAX && !unknown.contains(&state.chunk.inode) {
                    let batch = std::mem::take(&mut unknown);
                    self.confirm_unknown(chain, batch, &mut compared).await?;
                }
                unknown.insert(state.chunk.inode);
            }
        }
        comparison.end(&mut suspect);
        self.confirm_unknown(chain, unknown, &mut compared).await?;
        Ok(Compared { missing, missing_more, ..compared })
    }

    /// Keeps those inodes that do not exist now and still have chunks: these were listed before.
    pub(super) async fn confirm_unknown(
        &self,
        chain: ChainId,
        inodes: BTreeSet<InodeId>,
        compared: &mut Compared,
    ) -> Result<(), NotCompared> {
        let inodes: Vec<InodeId> = inodes.into_iter().collect();
        if inodes.is_empty() {
            return Ok(());
        }
        for inode in self.unknown_of(&inodes).await.map_err(NotCompared::Tree)? {
            // Garbage collection removes chunks before their inode.
            let stored = self.client.stored_of(chain, inode).await;
            match stored.map_err(NotCompared::Chain)? {
                (0, _) => {}
                (chunks, bytes) if compared.leaked.len() < LEAKS_OF_CHAIN_MAX => {
                    compared.leaked.push((inode, chunks, bytes));
                }
                (chunks, bytes) => compared.leaked_more.add(chunks, bytes),
            }
        }
        Ok(())
    }

    /// Which inodes do not exist.
    pub(super) async fn unknown_of(&self, inodes: &[InodeId]) -> Result<Vec<InodeId>, ClientError> {
        let query = AuditQuery::Unknown { inodes: inodes.to_vec() };
        let AuditAnswer::Unknown { cluster, inodes } = self.client.ask_audit(query).await? else {
            return Err(unexpected());
        };
        if cluster != Some(self.cluster) {
            let detail = "the metadata service belongs to another cluster than the storage \
                          services: correct `meta` in the cluster file";
            return Err(ClientError::InvalidArgument { detail: detail.into() });
        }
        Ok(inodes)
    }
}

impl Client {
    /// Number of the chunks of an inode on a chain, and bytes of all their versions.
    async fn stored_of(&self, chain: ChainId, inode: InodeId) -> Result<(u64, u64), ClientError> {
        let after = ChunkId::first_of(inode).bound_before();
        let mut cursor = ChainCursor::between(chain, after, ChunkId::last_of(inode).bound_after());
        let (mut chunks, mut bytes, mut counted) = (0, 0, None);
        while let Some(state) = cursor.next(self, inode, self.deadline()).await? {
            // Later versions of the chunk before them are within the bounds.
            if state.exists && state.chunk.inode == inode {
                let of = Some(state.chunk.first_version());
                chunks += u64::from(counted != of);
                counted = of;
                bytes += u64::from(state.length);
            }
        }
        Ok((chunks, bytes))
    }
}
