//! Prepared updates: the successor is sent an update while it is written here, so that all replicas write
//! at the same time (decision 0180).
//!
//! A `Prepare` makes the update pending on the successor, which prepares its own successor. Once the
//! update is durable here, and confirmed if there is a predecessor, a `Confirm` with the checksum of the
//! chunk continues it on the successor, which confirms, or commits as the tail. What the successor does
//! not have is forwarded. So a prepare may be lost, or refused, without effect.
//!
//! A replica with a predecessor does not continue a pending update by itself: the predecessor may not
//! have it, and readers would see an update that the chain loses with this replica. It waits for a
//! `Confirm` or `Forward`, or until it is the head. The head, in turn, never drops an update that it
//! has announced: otherwise the successor would keep it, and later execute it. If the head cannot
//! apply it, it tries again, or leaves the chain.

use std::collections::VecDeque;

use bytes::Bytes;

use super::queue::{OpKind, StartResult, Step};
use super::update::{Standing, answer};
use super::{
    Action, Alert, CallId, Caller, Check, Context, OpId, PeerFailure, Replica, Role, Token,
};
use crate::chunk::{ChunkMeta, StoreUpdate};
use crate::error::{StorageError, StoreError};
use crate::ids::ChunkId;
use crate::message::{ForwardRequest, StorageReply, StorageRequest, Updated};
use crate::routing::{ChainTarget, PublicState};

use super::action::Prepare;

/// How many timeouts of a call pass before a successor that did not answer is prepared again: it is
/// overloaded, or an older version that does not know the request.
const PAUSE_TIMEOUTS: u64 = 10;

/// A pending update that the predecessor has not confirmed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prepared {
    /// The operation that made it pending.
    pub(super) op: OpId,
    /// The call that prepared the successor, in this chain version.
    pub(super) sent: Option<CallId>,
}

impl Replica {
    /// Whether this replica may continue pending updates by itself.
    pub(super) fn may_resolve(&self) -> bool {
        self.predecessor().is_none() || !self.config.makes(Check::Confirmed)
    }

    /// The request that prepares a SERVING successor for the update of `op`.
    pub(super) fn prepare_successor(&mut self, ctx: &Context<'_>, op: OpId) -> Option<Prepare> {
        let next = self.successor().filter(|next| next.state == PublicState::Serving)?;
        let pauses = self.prepare_from.is_some_and(|from| ctx.now < from);
        if pauses || self.role() != Role::Serving {
            return None;
        }
        let (change, payload_checksum) = match &self.ops.get(&op)?.kind {
            OpKind::Update { request, .. } => (request.change, request.payload_checksum),
            OpKind::Forward { request, .. } | OpKind::Prepare { request, .. } => {
                (request.change, request.payload_checksum)
            }
            _ => return None,
        };
        let request = self.forward_request(ctx, op, next, change, payload_checksum)?;
        let state = self.ops.get_mut(&op)?;
        self.next_call += 1;
        let call = CallId(self.next_call);
        self.calls.insert(call, Caller::Prepare(op, request.chunk));
        (state.prepare, state.announced) = (Some(call), true);
        Some(Prepare { call, node: next.node, request, timeout_ms: self.config.call_timeout_ms })
    }

    /// There was no space for `op`, so its successor was not sent the update either.
    pub(super) fn not_sent_ahead(&mut self, op: OpId) {
        if let Some(state) = self.ops.get_mut(&op)
            && let Some(call) = state.prepare.take()
        {
            state.announced = false;
            self.calls.remove(&call);
        }
    }

    /// A refused prepare is followed by a forward. Without an answer the successor is confirmed, as it
    /// may only be slow, but not prepared for a while.
    pub(super) fn on_prepare_answer(
        &mut self,
        ctx: &Context<'_>,
        op: OpId,
        chunk: ChunkId,
        call: CallId,
        result: &Result<StorageReply, PeerFailure>,
    ) {
        match result {
            Ok(_) => {}
            Err(PeerFailure::Refused(_)) => {
                let sent = self.ops.get_mut(&op).map(|state| &mut state.prepare);
                let left = self.prepared.get_mut(&chunk).map(|prepared| &mut prepared.sent);
                for prepare in [sent, left].into_iter().flatten() {
                    prepare.take_if(|it| *it == call);
                }
            }
            Err(PeerFailure::Unreachable) => {
                let pause = self.config.call_timeout_ms.saturating_mul(PAUSE_TIMEOUTS);
                self.prepare_from = Some(ctx.now.after(pause));
            }
        }
    }

    /// Some inodes are forgotten, with their pending updates.
    pub(super) fn drop_prepared(&mut self, ctx: &Context<'_>) {
        let mut prepared = std::mem::take(&mut self.prepared);
        prepared.retain(|chunk, _| !self.is_forgotten(ctx, chunk.inode));
        self.prepared = prepared;
    }

    /// After a change of the chain: the successor may be another one.
    pub(super) fn forget_prepares(&mut self) {
        self.prepare_from = None;
        for state in self.ops.values_mut() {
            state.prepare = None;
        }
        for prepared in self.prepared.values_mut() {
            prepared.sent = None;
        }
    }

    pub(super) fn start_prepare(
        &mut self,
        ctx: &mut Context<'_>,
        request: ForwardRequest,
        payload: Bytes,
        waiters: VecDeque<Token>,
    ) -> StartResult {
        let result = match self.standing(ctx, &request) {
            Standing::Follows(newest) => {
                let kind = OpKind::Prepare { request, payload };
                return self.apply_forward(ctx, kind, &request, &newest, waiters);
            }
            Standing::Has { .. } => Ok(StorageReply::Prepared),
            // A forward of it decides whether this replica disagrees.
            Standing::Refused(error) | Standing::Disagrees(error) => Err(error),
        };
        for token in waiters {
            ctx.reply(token, result.clone());
        }
        StartResult::Done
    }

    /// A prepared update is durable here.
    pub(super) fn prepared(&mut self, ctx: &mut Context<'_>, op: OpId) {
        if self.may_resolve() {
            // The predecessor has left the chain meanwhile.
            return self.proceed(ctx, op);
        }
        let Some(state) = self.ops.get(&op) else { return };
        let (chunk, sent, version) = (state.chunk, state.prepare, state.version);
        self.prepared.insert(chunk, Prepared { op, sent });
        self.finish(ctx, op, Ok(Updated { version, ..Updated::nothing() }));
    }

    pub(super) fn start_confirm(
        &mut self,
        ctx: &mut Context<'_>,
        request: ForwardRequest,
        waiters: VecDeque<Token>,
    ) -> StartResult {
        match self.standing(ctx, &request) {
            Standing::Has { pending } => self.end_forward(ctx, &request, pending, waiters),
            Standing::Refused(error) => answer(ctx, waiters, Err(error)),
            Standing::Follows(_) | Standing::Disagrees(_) => {
                let (chunk, update) = (request.chunk, request.version);
                answer(ctx, waiters, Err(StorageError::NotPrepared { chunk, update }))
            }
        }
    }

    /// Confirms an update to the prepared successor.
    pub(super) fn confirm(&mut self, ctx: &mut Context<'_>, op: OpId, next: ChainTarget) {
        // The successor has the change.
        let change = crate::chunk::ContentChange::Replace;
        let checksum = crate::checksum::Checksum::default();
        if let Some(request) = self.forward_request(ctx, op, next, change, checksum) {
            self.op_call(ctx, op, next, StorageRequest::Confirm(request), Bytes::new());
        }
    }

    /// Whether the head keeps, or has handled, an update that it could not apply but has announced.
    pub(super) fn keeps_announced(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        error: &StoreError,
    ) -> bool {
        let Some(state) = self.ops.get(&op) else { return false };
        let is_update = matches!(state.kind, OpKind::Update { .. });
        if !is_update || !state.announced || !self.config.makes(Check::Announced) {
            return false;
        }
        let (chunk, target) = (state.chunk, self.config.target);
        match error {
            // Its store is opened again.
            StoreError::Io { .. } | StoreError::Damaged { .. } => false,
            // All replicas verify the payload.
            StoreError::PayloadDamaged { .. } => false,
            StoreError::Corrupt { .. } => {
                let reason = error.clone().at(target);
                self.demote(ctx, Alert::Outdated { target, chunk, reason });
                true
            }
            StoreError::NoSpace { .. } | StoreError::NotFound { .. } => {
                self.answer_waiters(ctx, op, &error.clone().at(target));
                if let Some(state) = self.ops.get_mut(&op) {
                    state.attempt = state.attempt.saturating_add(1);
                }
                self.back_off(ctx, op);
                true
            }
        }
    }

    /// Applies an announced update for which there was no space before.
    pub(super) fn apply_again(&mut self, ctx: &mut Context<'_>, op: OpId) {
        let Some(state) = self.ops.get(&op) else { return };
        let OpKind::Update { request, payload, .. } = &state.kind else { return };
        let (chunk, version, tag) = (request.chunk, state.version, request.tag);
        let (change, payload_checksum) = (request.change, request.payload_checksum);
        let payload = payload.clone();
        let newest: ChunkMeta = ctx.newest_version(chunk);
        let update = StoreUpdate {
            chunk,
            version,
            chain_version: self.chain_version(),
            tags: self.tags_before(&newest, chunk).with(tag, version),
            change,
        };
        let (class, prepare) = (self.class_of(op), None);
        let action = Action::Apply { op, update, payload, payload_checksum, class, prepare };
        self.store(ctx, op, Step::Applying, action);
    }
}
