//! Requests: checks of sender and state, replies to reads and queries. Changes are queued.

use bytes::Bytes;

use super::queue::Work;
use super::{Action, Check, Context, Replica, Role, Token};
use crate::checksum::Checksum;
use crate::chunk::Which;
use crate::error::StorageError;
use crate::ids::{ChunkId, ChunkVersion, TargetId};
use crate::message::{
    Address, LastChunk, QueryChunks, ReadDone, ReadRequest, RepairRequest, StorageReply,
    StorageRequest,
};
use crate::time::Millis;

/// Maximum number of chunks that a query reads from the store at once.
const QUERY_PAGE: usize = 1_024;
/// Maximum number of chunks that a query examines, including removed ones: all other requests of
/// this replica wait for it.
const QUERY_CHUNKS_MAX: usize = 8 * QUERY_PAGE;

impl Replica {
    pub(super) fn on_request(
        &mut self,
        ctx: &mut Context<'_>,
        token: Token,
        request: StorageRequest,
        payload: Bytes,
        expires: Option<Millis>,
    ) {
        let to = request.to();
        if to.target != self.config.target || to.chain != self.config.chain {
            return ctx.reply(token, Err(StorageError::WrongTarget { target: to.target }));
        }
        if to.chain_version > self.chain_version() {
            ctx.out.push(Action::RefreshRouting);
        }
        let refused = match request {
            StorageRequest::Update(request) => self.check_head(ctx, request.to).map(|()| {
                let chunk = request.chunk;
                self.enqueue(ctx, chunk, Work::Update { request, payload, expires }, Some(token));
            }),
            StorageRequest::Forward(request) => {
                self.check_sender(request.to, request.from, Role::Serving).map(|()| {
                    let chunk = request.chunk;
                    self.enqueue(ctx, chunk, Work::Forward { request, payload }, Some(token));
                })
            }
            StorageRequest::Replace(request) => {
                self.check_sender(request.to, request.from, Role::Syncing).map(|()| {
                    let chunk = request.chunk;
                    self.enqueue(ctx, chunk, Work::Receive { request, payload }, Some(token));
                })
            }
            StorageRequest::Purge(request) => {
                self.check_sender(request.to, request.from, Role::Serving).map(|()| {
                    let (chunk, version) = (request.chunk, request.version);
                    let work = Work::Purge { version, request: Some(request) };
                    self.enqueue(ctx, chunk, work, Some(token));
                })
            }
            StorageRequest::Read(request) => self.read(ctx, token, request),
            StorageRequest::Repair(request) => self.serve_repair(ctx, token, request),
            StorageRequest::SyncStart(request) => self.sync_start(ctx, token, request),
            StorageRequest::SyncMetas(request) => self.sync_metas(ctx, token, request),
            StorageRequest::SyncDone(request) => self.sync_done(ctx, token, request),
            StorageRequest::ForgetInodes(request) => self.forget_inodes(ctx, token, request),
            StorageRequest::QueryChunks(request) => self.query_chunks(ctx, token, request),
            StorageRequest::QueryLastChunk(request) => self.check_head(ctx, request.to).map(|()| {
                let last = ctx.metas.last_existing(request.inode).map(|meta| LastChunk {
                    index: meta.chunk.index,
                    length: meta.committed.length,
                });
                ctx.reply(token, Ok(StorageReply::LastChunk(last)));
            }),
        };
        if let Err(error) = refused {
            ctx.reply(token, Err(error));
        }
    }

    fn mismatch(&self, to: Address) -> StorageError {
        StorageError::ChainVersionMismatch {
            chain: self.config.chain,
            theirs: to.chain_version,
            mine: self.chain_version(),
        }
    }

    /// Checks that this replica may serve clients.
    fn check_serving(&self, ctx: &Context<'_>) -> Result<(), StorageError> {
        if self.role() != Role::Serving {
            return Err(self.not_serving());
        }
        if !self.has_lease(ctx.now) {
            return Err(StorageError::NoLease { target: self.config.target });
        }
        Ok(())
    }

    pub(super) fn check_head(&self, ctx: &Context<'_>, to: Address) -> Result<(), StorageError> {
        if to.chain_version != self.chain_version() {
            return Err(self.mismatch(to));
        }
        self.check_serving(ctx)?;
        let head = self.chain.as_ref().and_then(|chain| chain.head());
        if head.is_none_or(|head| head.target != self.config.target) {
            return Err(StorageError::NotHead {
                target: self.config.target,
                chain: self.config.chain,
            });
        }
        Ok(())
    }

    /// Checks that a request is from the predecessor and for the current chain.
    pub(super) fn check_sender(
        &self,
        to: Address,
        from: TargetId,
        role: Role,
    ) -> Result<(), StorageError> {
        if to.chain_version != self.chain_version() {
            return Err(self.mismatch(to));
        }
        if self.role() != role {
            return Err(self.not_serving());
        }
        if self.predecessor().is_none_or(|place| place.target != from) {
            return Err(StorageError::NotPredecessor { from, target: self.config.target });
        }
        Ok(())
    }

    fn read(
        &mut self,
        ctx: &mut Context<'_>,
        token: Token,
        request: ReadRequest,
    ) -> Result<(), StorageError> {
        // A client with older routing may be served: the lease proves that this replica still
        // belongs to the chain. A client with newer routing knows of a change that this replica
        // does not.
        if request.to.chain_version > self.chain_version() {
            return Err(self.mismatch(request.to));
        }
        self.check_serving(ctx)?;
        let meta = ctx.meta(request.chunk);
        if meta.pending.is_some() && self.config.makes(Check::NothingPending) {
            return Err(StorageError::ChunkNotCommit { chunk: request.chunk });
        }
        let chain_version = self.chain_version();
        if meta.committed.exists() {
            ctx.out.push(Action::ServeRead { token, request, chain_version });
        } else {
            ctx.reply(
                token,
                Ok(StorageReply::Read(ReadDone {
                    version: meta.committed.version,
                    length: 0,
                    chunk_length: 0,
                    checksum: Checksum::default(),
                    chain_version,
                })),
            );
        }
        Ok(())
    }

    /// Serves the repair of another replica. Any state of that version works: the receiver
    /// compares.
    fn serve_repair(
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

    fn query_chunks(
        &mut self,
        ctx: &mut Context<'_>,
        token: Token,
        request: QueryChunks,
    ) -> Result<(), StorageError> {
        self.check_head(ctx, request.to)?;
        let limit = (request.limit as usize).clamp(1, 4_096);
        let mut after = match request.after {
            Some(index) => Some(ChunkId::new(request.inode, index)),
            None => ChunkId::first_of(request.inode).before(),
        };
        let end = ChunkId::last_of(request.inode);
        let mut chunks: Vec<LastChunk> = Vec::new();
        let mut looked_at = 0;
        let mut size = limit.min(QUERY_PAGE);
        let last = loop {
            let page = ctx.metas.metas(after, end, size);
            let existing = page.iter().filter(|meta| meta.committed.exists());
            let matches = existing
                .map(|meta| LastChunk { index: meta.chunk.index, length: meta.committed.length });
            chunks.extend(matches);
            let newest = page.last().filter(|_| page.len() == size);
            if chunks.len() > limit || chunks.len() == limit && newest.is_some() {
                chunks.truncate(limit);
                break false;
            }
            let Some(newest) = newest else { break true };
            after = Some(newest.chunk);
            looked_at += page.len();
            if looked_at >= QUERY_CHUNKS_MAX {
                // The next query continues after the last chunk of this reply.
                if chunks.last().is_none_or(|last| last.index < newest.chunk.index) {
                    chunks.push(LastChunk { index: newest.chunk.index, length: 0 });
                }
                break false;
            }
            size = (size * 2).min(QUERY_PAGE);
        };
        ctx.reply(token, Ok(StorageReply::Chunks { chunks, last }));
        Ok(())
    }
}
