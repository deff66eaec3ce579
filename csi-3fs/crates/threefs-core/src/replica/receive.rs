//! Receiving side of a resync: a SYNCING replica takes whole chunks from its predecessor.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;

use super::queue::{Op, OpKind, StartResult, Step};
use super::update::answer;
use super::{Action, Check, Context, DataState, Replica, Role, Token};
use crate::checksum::Checksum;
use crate::chunk::{ContentChange, StoreUpdate};
use crate::error::{StorageError, StoreError};
use crate::ids::{ChunkId, ChunkVersion, TargetId};
use crate::message::{ReplaceRequest, StorageReply, SyncDone, SyncMetas, SyncSession, SyncStart};

/// Maximum number of chunk metas in one page: some 100 bytes each, well below a frame.
const PAGE_MAX: usize = 1_024;

/// The sync that this replica is receiving.
#[derive(Debug)]
pub(super) struct Receiving {
    from: TargetId,
    round: u64,
    session: SyncSession,
    /// The sequence of the newest message received for each chunk: older ones are late and refused.
    /// Kept for the session, so that any content of the predecessor can be accepted.
    newest: BTreeMap<ChunkId, u64>,
}

impl Replica {
    pub(super) fn sync_start(
        &mut self,
        ctx: &mut Context<'_>,
        token: Token,
        request: SyncStart,
    ) -> Result<(), StorageError> {
        self.check_sender(request.to, request.from, Role::Syncing)?;
        if self.is_full(ctx.now) {
            return Err(StorageError::NoSpace { target: self.config.target });
        }
        let current =
            self.receiving.as_ref().map(|current| (current.from, current.round, current.session));
        let session = match current {
            Some((from, round, session)) if from == request.from && round == request.round => {
                session
            }
            Some((from, round, _)) if from == request.from && round > request.round => {
                return Err(StorageError::SyncSessionMismatch { target: self.config.target });
            }
            // The store is still working on an earlier operation: the comparison must see its
            // result.
            _ if !self.ops.is_empty() => {
                return Err(self.busy());
            }
            _ => {
                // The data is no longer known to be up to date: the predecessor starts over.
                self.data_state = DataState::Online;
                self.sessions += 1;
                let incarnation = self.config.incarnation;
                let session = SyncSession { incarnation, number: self.sessions };
                self.receiving = Some(Receiving {
                    from: request.from,
                    round: request.round,
                    session,
                    newest: BTreeMap::new(),
                });
                session
            }
        };
        ctx.reply(token, Ok(StorageReply::SyncStarted { session, round: request.round }));
        Ok(())
    }

    fn check_session(&self, session: SyncSession) -> Result<(), StorageError> {
        match &self.receiving {
            Some(receiving) if receiving.session == session => Ok(()),
            _ => Err(StorageError::SyncSessionMismatch { target: self.config.target }),
        }
    }

    pub(super) fn sync_metas(
        &mut self,
        ctx: &mut Context<'_>,
        token: Token,
        request: SyncMetas,
    ) -> Result<(), StorageError> {
        self.check_session(request.session)?;
        let limit = (request.limit as usize).clamp(1, PAGE_MAX);
        let metas = ctx.metas.metas(request.after, ChunkId::MAX, limit);
        let last = metas.len() < limit;
        ctx.reply(token, Ok(StorageReply::Metas { metas, last }));
        Ok(())
    }

    pub(super) fn sync_done(
        &mut self,
        ctx: &mut Context<'_>,
        token: Token,
        request: SyncDone,
    ) -> Result<(), StorageError> {
        if request.to.chain_version != self.chain_version() || self.role() != Role::Syncing {
            return Err(self.not_serving());
        }
        self.check_session(request.session)?;
        self.data_state = DataState::UpToDate;
        ctx.reply(token, Ok(StorageReply::SyncEnded));
        Ok(())
    }

    /// Refuses whole chunks that are still being received when this target starts to serve. It may
    /// have to forward them to a SYNCING successor, while their senders hold the class REPLACE
    /// here. Two nodes that did so for each other, in two chains, would deadlock
    /// (`message::class`). The predecessor repeats them as forwards.
    pub(super) fn release_received(&mut self, ctx: &mut Context<'_>) {
        let busy = self.busy();
        let mut released: Vec<Token> = Vec::new();
        for queue in self.queues.values_mut() {
            queue.waiting.retain_mut(|queued| {
                let is_receive = matches!(queued.kind, OpKind::Receive { .. });
                if is_receive {
                    released.extend(queued.waiters.drain(..));
                }
                !is_receive
            });
        }
        for op in self.ops.values_mut().filter(|op| matches!(op.kind, OpKind::Receive { .. })) {
            released.extend(op.waiters.drain(..));
        }
        for token in released {
            ctx.reply(token, Err(busy.clone()));
        }
    }

    pub(super) fn start_receive(
        &mut self,
        ctx: &mut Context<'_>,
        request: ReplaceRequest,
        payload: Bytes,
        waiters: VecDeque<Token>,
    ) -> StartResult {
        if let Err(error) = self
            .check_sender(request.to, request.from, Role::Syncing)
            .and_then(|()| self.check_session(request.session))
        {
            return answer(ctx, waiters, Err(error));
        }
        let chunk = request.chunk;
        if request.version > ChunkVersion(0) && self.is_forgotten(ctx, chunk.inode) {
            let error = StorageError::InodeForgotten { inode: chunk.inode };
            return answer(ctx, waiters, Err(error));
        }
        if let Some(receiving) = &mut self.receiving {
            let newest = receiving.newest.entry(chunk).or_insert(0);
            if request.sequence <= *newest && self.config.makes(Check::Sequence) {
                let have = ctx.meta(chunk).committed.version;
                let error = StorageError::ChunkStaleUpdate { chunk, have, update: request.version };
                return answer(ctx, waiters, Err(error));
            }
            *newest = request.sequence;
        }
        if request.version == ChunkVersion(0) {
            return self.start_forget(ctx, request, waiters);
        }
        if payload.is_empty() && !request.removed && request.checksum != Checksum::default() {
            return self.receive_without_content(ctx, request, waiters);
        }
        let update = StoreUpdate {
            chunk,
            version: request.version,
            chain_version: self.chain_version(),
            tags: request.tags.clone(),
            change: if request.removed { ContentChange::Remove } else { ContentChange::Replace },
        };
        let tag = request.tags.newest().map(|newest| newest.tag);
        let kind = OpKind::Receive { request, payload };
        self.apply(ctx, kind, update, tag, waiters)
    }

    /// The predecessor cannot read this chunk. Its state is confirmed if it is the same here: the
    /// content is not looked at, and may be intact or damaged.
    fn receive_without_content(
        &mut self,
        ctx: &mut Context<'_>,
        request: ReplaceRequest,
        waiters: VecDeque<Token>,
    ) -> StartResult {
        let (chunk, meta) = (request.chunk, ctx.meta(request.chunk));
        let newest = meta.newest().clone();
        let is_same = newest.exists()
            && newest.version == request.version
            && newest.checksum == request.checksum
            && newest.tags == request.tags;
        if !is_same {
            let (expected, computed) = (request.checksum, Checksum::default());
            let error = StoreError::PayloadDamaged { chunk, expected, computed };
            return answer(ctx, waiters, Err(error.at(self.config.target)));
        }
        if meta.pending.is_none() {
            return answer(ctx, waiters, Ok(self.updated(&meta, request.version)));
        }
        let version = request.version;
        let kind = OpKind::Receive { request, payload: Bytes::new() };
        let op = self.add_op(Op {
            tag: newest.tags.newest().map(|newest| newest.tag),
            pending: Some(newest),
            waiters,
            ..Op::new(chunk, kind, version)
        });
        self.proceed(ctx, op);
        StartResult::Op(op)
    }

    /// The predecessor does not have this chunk: it was purged or never acknowledged. The local
    /// copy must not reappear after a loss of power following the sync.
    fn start_forget(
        &mut self,
        ctx: &mut Context<'_>,
        request: ReplaceRequest,
        waiters: VecDeque<Token>,
    ) -> StartResult {
        let chunk = request.chunk;
        let version = request.version;
        let kind = OpKind::Receive { request, payload: Bytes::new() };
        let op = self.add_op(Op { waiters, ..Op::new(chunk, kind, version) });
        self.store(ctx, op, Step::Forgetting, Action::Forget { op, chunk });
        StartResult::Op(op)
    }
}
