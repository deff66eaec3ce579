//! Admission of requests: checks of sender and state, and the operations that requests become.

use std::collections::VecDeque;

use bytes::Bytes;

use super::channels::TagStatus;
use super::queue::{Op, QueuedWork, Started, Step, Work};
use super::{Action, Alert, Check, Context, Replica, Role, Token};
use crate::checksum::Checksum;
use crate::chunk::{ChunkMeta, ContentChange, StoreUpdate, Which};
use crate::error::StorageError;
use crate::ids::{ChunkId, ChunkVersion, RequestTag, TargetId};
use crate::layout::CHUNK_BYTES_MAX;
use crate::message::{
    Address, ForwardRequest, LastChunk, QueryChunks, ReadDone, ReadRequest, RepairRequest,
    StorageReply, StorageRequest, UpdateRequest, Updated, class,
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

    pub(super) fn start_update(
        &mut self,
        ctx: &mut Context<'_>,
        request: UpdateRequest,
        payload: Bytes,
        expires: Option<Millis>,
        waiters: VecDeque<Token>,
    ) -> Started {
        if let Err(error) = self.check_head(ctx, request.to) {
            return answer(ctx, waiters, Err(error));
        }
        let meta = ctx.meta(request.chunk);
        if meta.pending.is_some() {
            let inode = request.chunk.inode;
            if self.is_forgotten(ctx, inode) {
                // The pending state is dropped with its inode and not resolved.
                return answer(ctx, waiters, Err(StorageError::InodeForgotten { inode }));
            }
            let queued = QueuedWork { work: Work::Update { request, payload, expires }, waiters };
            return Started::After(Work::Resolve, Box::new(queued));
        }
        match self.admit_update(ctx, &request, &payload, &meta) {
            Err(error) => answer(ctx, waiters, Err(error)),
            Ok(Some(done)) => answer(ctx, waiters, Ok(done)),
            // Checked here as well: the update may have waited in the queue until now.
            Ok(None)
                if expires.is_some_and(|at| ctx.now >= at) && self.config.makes(Check::Expiry) =>
            {
                answer(ctx, waiters, Err(StorageError::Expired { target: self.config.target }))
            }
            Ok(None) => {
                self.channels.started(request.tag);
                let before = match meta.committed.version {
                    // It may have been purged.
                    ChunkVersion(0) => ctx.metas.version_floor(),
                    version => version,
                };
                let version = before.next();
                let update = StoreUpdate {
                    chunk: request.chunk,
                    version,
                    chain_version: self.chain_version(),
                    tags: meta.committed.tags.with(request.tag, version),
                    change: request.change,
                };
                let tag = request.tag;
                let work = Work::Update { request, payload: payload.clone(), expires };
                self.apply(ctx, work, update, payload, Some(tag), waiters)
            }
        }
    }

    /// Checks a client's update when it starts. `Some` = it is already done.
    fn admit_update(
        &self,
        ctx: &Context<'_>,
        request: &UpdateRequest,
        payload: &Bytes,
        meta: &ChunkMeta,
    ) -> Result<Option<Updated>, StorageError> {
        let tag = request.tag;
        let committed = &meta.committed;
        if request.change != ContentChange::Remove && self.is_forgotten(ctx, request.chunk.inode) {
            return Err(StorageError::InodeForgotten { inode: request.chunk.inode });
        }
        if let Some(successor) = committed.tags.successor_of(&tag) {
            return Err(StorageError::Superseded { tag, successor });
        }
        if let Some(known) = committed.tags.of_channel(&tag)
            && self.config.makes(Check::Tags)
        {
            if known.tag == tag {
                return Ok(Some(self.updated(meta, known.version)));
            }
            if known.tag.sequence > tag.sequence {
                return Err(StorageError::DuplicateUpdate { tag });
            }
        }
        match self.channels.status(tag, request.chunk) {
            TagStatus::New => {}
            TagStatus::Done(version) => return Ok(Some(self.updated(meta, version))),
            TagStatus::Outdated => return Err(StorageError::DuplicateUpdate { tag }),
            TagStatus::Superseded(successor) => {
                return Err(StorageError::Superseded { tag, successor });
            }
        }
        if payload.is_empty() && matches!(request.change, ContentChange::Write { .. }) {
            let reason = "a write of 0 bytes: use a truncate to change the length".to_owned();
            return Err(StorageError::InvalidRequest { reason });
        }
        let (end, grows) = match request.change {
            ContentChange::Write { offset } => (u64::from(offset) + payload.len() as u64, true),
            ContentChange::Truncate { length } => (u64::from(length), true),
            ContentChange::Replace => (payload.len() as u64, true),
            ContentChange::Remove => (0, false),
        };
        // The client's chunk size does not bound the chunk; a larger chunk could not be copied.
        let chunk_bytes = request.chunk_bytes.min(CHUNK_BYTES_MAX);
        if end > u64::from(chunk_bytes) {
            return Err(StorageError::ChunkSizeMismatch { chunk: request.chunk, end, chunk_bytes });
        }
        if request.change == ContentChange::Remove && !committed.exists() {
            return Ok(Some(self.updated(meta, committed.version)));
        }
        if grows && self.successor_full_until.is_some_and(|until| ctx.now < until) {
            let target = self.successor().map_or(self.config.target, |place| place.target);
            return Err(StorageError::NoSpace { target });
        }
        Ok(None)
    }

    /// The reply for an update that made `version` earlier.
    fn updated(&self, meta: &ChunkMeta, version: ChunkVersion) -> Updated {
        let newest = meta.committed.version == version;
        Updated {
            version,
            length: if newest { meta.committed.length } else { 0 },
            checksum: if newest { meta.committed.checksum } else { Checksum::default() },
            chain_version: self.chain_version(),
        }
    }

    pub(super) fn start_forward(
        &mut self,
        ctx: &mut Context<'_>,
        request: ForwardRequest,
        payload: Bytes,
        waiters: VecDeque<Token>,
    ) -> Started {
        if let Err(error) = self.check_sender(request.to, request.from, Role::Serving) {
            return answer(ctx, waiters, Err(error));
        }
        if self.is_forgotten(ctx, request.chunk.inode) {
            let error = StorageError::InodeForgotten { inode: request.chunk.inode };
            return answer(ctx, waiters, Err(error));
        }
        if self.purges.is_from_before(&request) {
            // If it is not a delayed copy, it is repeated.
            return answer(ctx, waiters, Err(self.busy()));
        }
        let meta = ctx.meta(request.chunk);
        let (chunk, update) = (request.chunk, request.version);
        if let Some(pending) = &meta.pending {
            let same_tag = pending.tags.newest().is_some_and(|newest| newest.tag == request.tag);
            if pending.version == update && same_tag {
                return self.start_resolve(ctx, chunk, waiters, request.hop);
            }
            let reason = StorageError::ChunkConflict { chunk, version: pending.version };
            return self.disagree(ctx, chunk, waiters, reason);
        }
        let have = meta.committed.version;
        if have == update {
            if meta.committed.checksum == request.chunk_checksum {
                return answer(ctx, waiters, Ok(self.updated(&meta, update)));
            }
            let (expected, got) = (request.chunk_checksum, meta.committed.checksum);
            let reason = StorageError::ChecksumMismatch { chunk, expected, got };
            return self.disagree(ctx, chunk, waiters, reason);
        }
        if have > update {
            let error = StorageError::ChunkStaleUpdate { chunk, have, update };
            return answer(ctx, waiters, Err(error));
        }
        // Neither replica has content that the update depends on.
        let fresh = request.fresh && !meta.committed.exists();
        if have.next() != update && !fresh {
            let reason = StorageError::ChunkMissingUpdate { chunk, have, update };
            return self.disagree(ctx, chunk, waiters, reason);
        }
        self.channels.started(request.tag);
        let update = StoreUpdate {
            chunk,
            version: update,
            chain_version: self.chain_version(),
            tags: meta.committed.tags.with(request.tag, update),
            change: request.change,
        };
        let tag = request.tag;
        let work = Work::Forward { request, payload: payload.clone() };
        self.apply(ctx, work, update, payload, Some(tag), waiters)
    }

    fn disagree(
        &mut self,
        ctx: &mut Context<'_>,
        chunk: ChunkId,
        waiters: VecDeque<Token>,
        reason: StorageError,
    ) -> Started {
        let target = self.config.target;
        self.demote(ctx, Alert::Disagreement { target, chunk, reason: reason.clone() });
        answer(ctx, waiters, Err(reason))
    }

    /// First step of every operation that changes content.
    pub(super) fn apply(
        &mut self,
        ctx: &mut Context<'_>,
        work: Work,
        update: StoreUpdate,
        payload: Bytes,
        tag: Option<RequestTag>,
        waiters: VecDeque<Token>,
    ) -> Started {
        // An update that waits for space blocks the requests behind it: their class counts.
        let hop = match &work {
            Work::Update { .. } => Some(class::UPDATE),
            Work::Forward { .. } => Some(1),
            _ => None,
        };
        let op = self.add_op(Op {
            chunk: update.chunk,
            hop: work.hop(),
            work,
            step: Step::Applying,
            version: update.version,
            tag,
            pending: None,
            waiters,
            attempt: 0,
            wake: None,
            aborted: false,
        });
        let class = match hop {
            Some(hop) => (self.next_hop(op) - 1).clamp(hop, class::HOP_MAX),
            None => class::REPLACE,
        };
        self.store(ctx, op, Step::Applying, Action::Apply { op, update, payload, class });
        Started::Op(op)
    }
}

/// Sends the same reply to all waiters.
pub(super) fn answer(
    ctx: &mut Context<'_>,
    waiters: VecDeque<Token>,
    result: Result<Updated, StorageError>,
) -> Started {
    for token in waiters {
        ctx.reply(token, result.clone().map(StorageReply::Updated));
    }
    Started::Done
}
