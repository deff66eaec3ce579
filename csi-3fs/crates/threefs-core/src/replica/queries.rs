//! Reads and queries: answered from the store, without an operation.

use super::config::Check;
use super::{Action, Context, PlannedRead, Replica, Token};
use crate::checksum::Checksum;
use crate::chunk::{ChunkMeta, Which};
use crate::error::StorageError;
use crate::ids::{ChunkId, ChunkVersion};
use crate::message::{
    Address, LastChunk, QueryChunks, QueryLastChunk, ReadDone, ReadMany, ReadRequest,
    RepairRequest, StorageReply,
};
use crate::scrub::{ChunkSummary, QueryStates};
use crate::snapshot_inode;

/// Maximum number of chunks that a query reads from the store in one step.
const QUERY_PAGE: usize = 1_024;
/// Maximum number of chunks that a query examines, including removed ones: all other requests of
/// this replica wait for it.
const QUERY_CHUNKS_MAX: usize = 8 * QUERY_PAGE;
/// Maximum number of versions of one chunk: one for each snapshot, and the current one.
const VERSIONS_MAX: usize = 256;
/// Maximum number of chunk states in a reply.
const STATES_MAX: usize = 1_024;

impl Replica {
    pub(super) fn read(
        &mut self,
        ctx: &mut Context<'_>,
        token: Token,
        request: ReadRequest,
    ) -> Result<(), StorageError> {
        self.check_read(ctx, request.to)?;
        match self.plan_read(ctx, request) {
            PlannedRead::Serve(request) => {
                let chain_version = self.chain_version();
                ctx.out.push(Action::ServeRead { token, request, chain_version });
            }
            PlannedRead::Done(result) => ctx.reply(token, result.map(StorageReply::Read)),
        }
        Ok(())
    }

    /// Reads the newest version up to the epoch of a snapshot. What a removed snapshot showed may be
    /// dropped: then an older version must not be taken for it.
    pub(super) fn read_snapshot(
        &mut self,
        ctx: &mut Context<'_>,
        token: Token,
        request: ReadRequest,
    ) -> Result<(), StorageError> {
        let chunk = request.chunk;
        if self.hides_epoch(chunk.epoch) {
            return Err(StorageError::ChunkNotFound { chunk });
        }
        let chunk = ChunkId { inode: snapshot_inode::raw(chunk.inode), ..chunk };
        self.read(ctx, token, ReadRequest { chunk, ..request })
    }

    pub(super) fn read_many(
        &mut self,
        ctx: &mut Context<'_>,
        token: Token,
        request: &ReadMany,
    ) -> Result<(), StorageError> {
        let requests = request.requests()?;
        self.check_read(ctx, request.to)?;
        let newest = |request: ReadRequest| request.chunk.last_version();
        let plan = |request| self.plan_read(ctx, ReadRequest { chunk: newest(request), ..request });
        let reads: Vec<PlannedRead> = requests.into_iter().map(plan).collect();
        if reads.iter().any(|read| matches!(read, PlannedRead::Serve(_))) {
            let chain_version = self.chain_version();
            ctx.out.push(Action::ServeReads { token, reads, chain_version });
        } else {
            let results = reads.into_iter().filter_map(|read| match read {
                PlannedRead::Serve(_) => None,
                PlannedRead::Done(result) => Some(result),
            });
            ctx.reply(token, Ok(StorageReply::ReadMany(results.collect())));
        }
        Ok(())
    }

    fn check_read(&self, ctx: &Context<'_>, to: Address) -> Result<(), StorageError> {
        // A client with older routing may be served: the lease proves that this replica still
        // belongs to the chain. A client with newer routing has a change that this replica has not
        // received.
        if to.chain_version > self.chain_version() {
            return Err(self.mismatch(to));
        }
        self.check_serving(ctx)
    }

    /// Plans a read of the newest version up to the epoch in the request.
    fn plan_read(&self, ctx: &Context<'_>, request: ReadRequest) -> PlannedRead {
        let meta = ctx
            .metas
            .version_up_to(request.chunk)
            .unwrap_or_else(|| ChunkMeta::absent(request.chunk.first_version()));
        let request = ReadRequest { chunk: meta.chunk, ..request };
        if meta.pending.is_some() && self.config.makes(Check::NothingPending) {
            return PlannedRead::Done(Err(StorageError::ChunkNotCommit { chunk: request.chunk }));
        }
        if meta.committed.exists() {
            return PlannedRead::Serve(request);
        }
        PlannedRead::Done(Ok(ReadDone {
            version: meta.committed.version,
            length: 0,
            chunk_length: 0,
            checksum: Checksum::default(),
            chain_version: self.chain_version(),
        }))
    }

    /// Serves the repair of another replica. Any state of that version works: the receiver
    /// compares.
    pub(super) fn serve_repair(
        &mut self,
        ctx: &mut Context<'_>,
        token: Token,
        request: RepairRequest,
    ) -> Result<(), StorageError> {
        let meta = ctx.meta(request.chunk);
        let has = |version: ChunkVersion| version == request.version;
        if meta.committed.exists() && has(meta.committed.version) {
            ctx.out.push(Action::ServeRepair { token, request, which: Which::Committed });
        } else if meta.pending.is_some_and(|pending| pending.exists() && has(pending.version)) {
            ctx.out.push(Action::ServeRepair { token, request, which: Which::Newest });
        } else {
            return Err(StorageError::ChunkNotFound { chunk: request.chunk });
        }
        Ok(())
    }

    pub(super) fn query_chunks(
        &mut self,
        ctx: &mut Context<'_>,
        token: Token,
        request: QueryChunks,
        versions: bool,
    ) -> Result<(), StorageError> {
        self.check_head(ctx, request.to)?;
        let limit = (request.limit as usize).clamp(1, 4_096);
        let mut after = match request.after {
            Some(index) => Some(ChunkId::new(request.inode, index).last_version()),
            None => ChunkId::first_of(request.inode).before_chunk(),
        };
        let end = ChunkId::last_of(request.inode);
        let mut chunks: Vec<(LastChunk, ChunkVersion)> = Vec::new();
        let mut looked_at = 0;
        let mut size = limit.min(QUERY_PAGE);
        let last = loop {
            let page = page_of_chunks(ctx, after, end, size);
            let existing = newest_versions(&page).filter(|meta| meta.committed.exists());
            let matches = existing.map(|meta| {
                let (index, length) = (meta.chunk.index, meta.committed.length);
                (LastChunk { index, length }, meta.committed.version)
            });
            chunks.extend(matches);
            let newest = page.last().filter(|_| page.len() >= size);
            if chunks.len() > limit || chunks.len() == limit && newest.is_some() {
                chunks.truncate(limit);
                break false;
            }
            let Some(newest) = newest else { break true };
            after = Some(newest.chunk);
            looked_at += page.len();
            if looked_at >= QUERY_CHUNKS_MAX {
                // The next query continues after the last chunk of this reply.
                if chunks.last().is_none_or(|(last, _)| last.index < newest.chunk.index) {
                    let marker = LastChunk { index: newest.chunk.index, length: 0 };
                    chunks.push((marker, ChunkVersion(0)));
                }
                break false;
            }
            size = (size * 2).min(QUERY_PAGE);
        };
        let reply = match versions {
            true => StorageReply::ChunkVersions { chunks, last },
            false => {
                let chunks = chunks.into_iter().map(|(chunk, _)| chunk).collect();
                StorageReply::Chunks { chunks, last }
            }
        };
        ctx.reply(token, Ok(reply));
        Ok(())
    }

    /// Serves the comparison of a successor with this replica.
    pub(super) fn query_states(
        &mut self,
        ctx: &mut Context<'_>,
        token: Token,
        to: Address,
        request: QueryStates,
    ) -> Result<(), StorageError> {
        if to.chain_version != self.chain_version() {
            return Err(self.mismatch(to));
        }
        self.check_serving(ctx)?;
        let limit = (request.limit as usize).clamp(1, STATES_MAX);
        let metas = ctx.metas.metas(request.after, request.last, limit);
        let states = metas.iter().map(ChunkSummary::from).collect();
        ctx.reply(token, Ok(StorageReply::States(states)));
        Ok(())
    }

    pub(super) fn query_last_chunk(
        &mut self,
        ctx: &mut Context<'_>,
        token: Token,
        request: QueryLastChunk,
    ) -> Result<(), StorageError> {
        self.check_head(ctx, request.to)?;
        let last = ctx
            .metas
            .last_existing(request.inode)
            .map(|meta| LastChunk { index: meta.chunk.index, length: meta.committed.length });
        ctx.reply(token, Ok(StorageReply::LastChunk(last)));
        Ok(())
    }
}

/// At least `size` states, if there are as many, with all versions of the last chunk.
fn page_of_chunks(
    ctx: &Context<'_>,
    after: Option<ChunkId>,
    end: ChunkId,
    size: usize,
) -> Vec<ChunkMeta> {
    let mut page = ctx.metas.metas(after, end, size);
    if page.len() == size
        && let Some(last) = page.last().map(|meta| meta.chunk)
    {
        page.extend(ctx.metas.metas(Some(last), last.last_version(), VERSIONS_MAX));
    }
    page
}

/// The newest committed version of each chunk of a page.
fn newest_versions(page: &[ChunkMeta]) -> impl Iterator<Item = &ChunkMeta> {
    let committed = || page.iter().filter(|meta| meta.committed.version > ChunkVersion(0));
    let next = committed().skip(1).map(Some).chain([None]);
    let newest = committed().zip(next).filter(|(meta, next)| {
        next.is_none_or(|next: &ChunkMeta| !next.chunk.is_version_of(meta.chunk))
    });
    newest.map(|(meta, _)| meta)
}
