//! Confirmation of missing chunks, and comparison of the written chunks that an inode does not list.

use std::collections::{BTreeMap, BTreeSet};

use threefs_core::ids::{ChainId, ChunkId, Epoch, InodeId};
use threefs_meta::protocol::BATCH_MAX;
use threefs_meta::{
    At, AuditAnswer, AuditQuery, InodeKind, MetaError, MetaQuery, MetaReply, Written,
};

use super::chain::ChainCursor;
use super::expected::{Comparison, LocatedFile};
use super::{Audit, Page, unexpected};
use crate::Client;
use crate::error::ClientError;

/// Chunks that must exist, and the state of their file for which this holds.
struct MustExist {
    written: Written,
    truncate_version: u64,
    chunk_bytes: u32,
}

impl Audit {
    /// Reports those chunks that are missing. The tree is asked before and after the chain.
    pub(super) async fn confirm_missing(
        &mut self,
        page: &Page,
        suspects: Vec<(ChainId, ChunkId)>,
    ) -> Result<(), ClientError> {
        let mut of_file: BTreeMap<(InodeId, Epoch, ChainId), Vec<u32>> = BTreeMap::new();
        for (chain, chunk) in suspects {
            of_file.entry((chunk.inode, chunk.epoch, chain)).or_default().push(chunk.index);
        }
        for ((inode, up_to, chain), mut indexes) in of_file {
            let Some(file) = page.file(inode, up_to) else { continue };
            indexes.sort_unstable();
            for indexes in indexes.chunks(BATCH_MAX) {
                self.confirm_on(file, chain, indexes).await?;
            }
        }
        Ok(())
    }

    async fn confirm_on(
        &mut self,
        file: &LocatedFile,
        chain: ChainId,
        indexes: &[u32],
    ) -> Result<(), ClientError> {
        // Of a removed snapshot: not found.
        let inode = file.file.inode;
        let Some(before) = self.client.must_exist(inode, indexes).await? else { return Ok(()) };
        let absent = match self.client.absent_on(chain, file, indexes).await {
            Ok(absent) => absent,
            Err(error) => {
                self.report.not_read(chain, &error);
                return Ok(());
            }
        };
        if absent.is_empty() {
            return Ok(());
        }
        let Some(after) = self.client.must_exist(inode, indexes).await? else { return Ok(()) };
        if before.truncate_version != after.truncate_version {
            return Ok(());
        }
        let both = |index: &u32| before.written.contains(*index) && after.written.contains(*index);
        let lost: Vec<u32> = absent.into_iter().filter(both).collect();
        if !lost.is_empty() {
            self.report.add_missing(file, after.chunk_bytes, &lost);
        }
        Ok(())
    }

    /// Compares written chunks of a file beyond those in its inode.
    pub(super) async fn compare_further(&mut self, file: &LocatedFile) -> Result<(), ClientError> {
        let inode = file.file.inode;
        let chains: BTreeSet<ChainId> = file.chains.iter().copied().collect();
        let mut after = None;
        loop {
            let query = AuditQuery::Written { inode, after };
            let AuditAnswer::Written { written, next } = self.client.ask_audit(query).await? else {
                return Err(unexpected());
            };
            for chain in &chains {
                let expected: Vec<u32> =
                    file.chunks_on(&written, *chain).map(|chunk| chunk.index).collect();
                for indexes in expected.chunks(BATCH_MAX) {
                    match self.client.absent_on(*chain, file, indexes).await {
                        Ok(absent) if absent.is_empty() => {}
                        Ok(absent) => self.confirm_on(file, *chain, &absent).await?,
                        Err(error) => self.report.not_read(*chain, &error),
                    }
                }
            }
            match next {
                Some(_) => after = next,
                None => return Ok(()),
            }
        }
    }
}

impl Client {
    /// Those of the chunks of a file that must exist; `None` if it is removed.
    async fn must_exist(
        &self,
        inode: InodeId,
        indexes: &[u32],
    ) -> Result<Option<MustExist>, ClientError> {
        let query = MetaQuery::StatChunks { at: At::inode(inode), chunks: indexes.to_vec() };
        match self.0.metadata.query("audit", query, self.deadline()).await {
            Ok(MetaReply::Inode(inode)) => match inode.kind {
                InodeKind::File { written, truncate_version, layout, .. } => {
                    let chunk_bytes = layout.chunk_bytes;
                    Ok(Some(MustExist { written, truncate_version, chunk_bytes }))
                }
                _ => Ok(None),
            },
            Ok(other) => Err(ClientError::unexpected("meta", &other)),
            Err(ClientError::Meta(MetaError::NotFound { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Those of the chunks of a file, which are sorted, that have no content on a chain.
    async fn absent_on(
        &self,
        chain: ChainId,
        file: &LocatedFile,
        indexes: &[u32],
    ) -> Result<Vec<u32>, ClientError> {
        let (Some(first), Some(last)) = (indexes.first(), indexes.last()) else {
            return Ok(Vec::new());
        };
        let last = file.expected(*last).bound_after();
        let after = file.expected(*first).bound_before();
        let mut cursor = ChainCursor::between(chain, after, last);
        let mut absent = Vec::new();
        let mut report = |chunk: ChunkId| absent.push(chunk.index);
        let expected = indexes.iter().map(|index| file.expected(*index));
        let mut comparison = Comparison::new(Box::new(expected));
        while let Some(state) = cursor.next(self, file.stored, self.deadline()).await? {
            comparison.next(&state, &mut report);
        }
        comparison.end(&mut report);
        Ok(absent)
    }
}
