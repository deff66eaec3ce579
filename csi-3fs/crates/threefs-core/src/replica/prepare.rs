//! Prepared updates: the successor is sent an update while it is written here, so that all replicas write
//! at the same time (decision 0180).
//!
//! A `Prepare` makes the update pending on the successor, which prepares its own successor. Once the
//! update is durable on both, and confirmed here if there is a predecessor, a `Confirm` with the checksum
//! of the chunk continues it on the successor, which confirms, or commits as the tail. What the successor
//! has not prepared is forwarded. So a prepare may be lost, or refused, without effect.
//!
//! It is sent once the update is verified here and has its space, so that hardly any update fails
//! afterwards (`Action::Apply`). That of a small update may be left out, if it is not the consequence
//! of another one.
//!
//! A replica with a predecessor does not continue a pending update by itself: the predecessor may not
//! have it, and readers would see an update that the chain loses with this replica. It waits for a
//! `Confirm` or `Forward`, or until it is the head. The head, in turn, never drops an update that it
//! has announced: otherwise the successor would keep it, and later execute it. If the head cannot
//! apply it, it tries again, or leaves the chain; so does a replica that becomes the head.

use std::collections::VecDeque;

use bytes::Bytes;

use super::action::Prepare;
use super::queue::{OpKind, StartResult, Step};
use super::update::{Standing, answer};
use super::{
    Action, Alert, CallId, Caller, Check, Context, OpId, PeerFailure, Replica, Role, Token,
};
use crate::chunk::{ChunkMeta, ChunkState, ContentChange, StoreUpdate};
use crate::error::{StorageError, StoreError};
use crate::ids::ChunkId;
use crate::message::{ForwardRequest, StorageReply, StorageRequest, Updated};
use crate::routing::{ChainTarget, PublicState};

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

    /// Whether a SERVING successor is not prepared now.
    fn pauses_prepares(&self, ctx: &Context<'_>) -> bool {
        self.successor_serves() && self.prepare_from.is_some_and(|from| ctx.now < from)
    }

    /// The request that prepares a SERVING successor for the update of `op`.
    pub(super) fn prepare_successor(&mut self, ctx: &Context<'_>, op: OpId) -> Option<Prepare> {
        let next = self.successor().filter(|next| next.state == PublicState::Serving)?;
        if self.pauses_prepares(ctx) || self.role() != Role::Serving {
            return None;
        }
        let kind = &self.ops.get(&op)?.kind;
        let is_optional = !matches!(kind, OpKind::Prepare { .. });
        let (change, payload_checksum) = match kind {
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
        self.calls.insert(call, Caller::Prepare(request.chunk));
        (state.prepare, state.announced) = (Some(call), true);
        let timeout_ms = self.config.call_timeout_ms;
        Some(Prepare { call, node: next.node, request, timeout_ms, is_optional })
    }

    /// The successor was not sent the update of `op`.
    pub(super) fn not_announced(&mut self, op: OpId) {
        if let Some(state) = self.ops.get_mut(&op) {
            state.announced = false;
            if let Some(call) = state.prepare.take() {
                self.calls.remove(&call);
            }
        }
    }

    /// Continues the update with a confirmation, or with a forward if the successor did not prepare
    /// it. One that does not answer, or has no space now, is not prepared for a while.
    pub(super) fn on_prepare_answer(
        &mut self,
        ctx: &mut Context<'_>,
        chunk: ChunkId,
        call: CallId,
        result: &Result<StorageReply, PeerFailure>,
    ) {
        let pause_ms = match result {
            Err(PeerFailure::Unreachable) => Some(self.config.call_timeout_ms),
            // It would get the bytes twice: a forward waits for space, and for its turn.
            Err(PeerFailure::Refused(StorageError::NoSpace { .. } | StorageError::Busy { .. })) => {
                Some(self.config.retry_wait_ms_max)
            }
            _ => None,
        };
        if let Some(pause_ms) = pause_ms {
            self.prepare_from = self.prepare_from.max(Some(ctx.now.after(pause_ms)));
        }
        if result.is_err()
            && let Some(prepared) = self.prepared.get_mut(&chunk)
        {
            prepared.sent.take_if(|sent| *sent == call);
        }
        let Some(op) = self.queues.get(&chunk.first_version()).and_then(|queue| queue.active)
        else {
            return;
        };
        let Some(state) = self.ops.get_mut(&op).filter(|op| op.prepare == Some(call)) else {
            return;
        };
        if result.is_err() {
            state.prepare = None;
        }
        if state.step == Step::Preparing {
            self.proceed(ctx, op);
        }
    }

    /// The successor does not answer.
    pub(super) fn give_up_prepare(&mut self, op: OpId) {
        let Some(state) = self.ops.get_mut(&op) else { return };
        if let Some(prepared) = self.prepared.get_mut(&state.chunk) {
            prepared.sent = None;
        }
        if let Some(call) = state.prepare.take() {
            self.calls.remove(&call);
        }
    }

    /// After a change of the chain: the successor may be another one.
    pub(super) fn forget_prepares(&mut self) {
        self.prepare_from = None;
        self.calls.retain(|_, caller| !matches!(caller, Caller::Prepare(_)));
        for state in self.ops.values_mut() {
            state.prepare = None;
        }
        for prepared in self.prepared.values_mut() {
            prepared.sent = None;
        }
    }

    /// Some inodes are forgotten, with their pending updates.
    pub(super) fn drop_prepared(&mut self, ctx: &Context<'_>) {
        let mut prepared = std::mem::take(&mut self.prepared);
        prepared.retain(|chunk, _| !self.is_forgotten(ctx, chunk.inode));
        self.prepared = prepared;
        let mut lacking = std::mem::take(&mut self.lacking);
        lacking.retain(|chunk, _| !self.is_forgotten(ctx, chunk.inode));
        self.lacking = lacking;
    }

    /// Whether this replica became the head but lacks an update that it has announced: its successor
    /// must lead.
    pub(super) fn must_leave(&mut self, ctx: &mut Context<'_>) -> bool {
        if !self.successor_serves() {
            // It will be synced from here.
            self.lacking.clear();
        }
        if self.predecessor().is_some() {
            return false;
        }
        let Some((chunk, reason)) = self.lacking.pop_first() else { return false };
        self.demote(ctx, Alert::Outdated { target: self.config.target, chunk, reason });
        true
    }

    fn successor_serves(&self) -> bool {
        self.successor().is_some_and(|next| next.state == PublicState::Serving)
    }

    /// Whether `op` waits for space for an update that it has announced.
    pub(super) fn waits_for_space(&self, op: OpId) -> bool {
        self.ops.get(&op).is_some_and(|state| {
            let is_update = matches!(state.kind, OpKind::Update { .. });
            let waits = state.pending.is_none() && state.step == Step::BackingOff;
            is_update && state.announced && waits
        })
    }

    pub(super) fn start_prepare(
        &mut self,
        ctx: &mut Context<'_>,
        request: ForwardRequest,
        payload: Bytes,
        waiters: VecDeque<Token>,
    ) -> StartResult {
        let result = match self.standing(ctx, &request) {
            // The payload would be needed again for the confirmation.
            Standing::Follows(_)
                if self.pauses_prepares(ctx) && request.change != ContentChange::Remove =>
            {
                Err(self.busy())
            }
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
            Standing::Has { pending } => {
                let kind = OpKind::Confirm { request };
                self.end_forward(ctx, kind, &request, pending, waiters)
            }
            Standing::Refused(error) => answer(ctx, waiters, Err(error)),
            Standing::Follows(_) | Standing::Disagrees(_) => {
                let (chunk, update) = (request.chunk, request.version);
                answer(ctx, waiters, Err(StorageError::NotPrepared { chunk, update }))
            }
        }
    }

    /// Confirms an update to the successor, once that has prepared it.
    pub(super) fn confirm_prepared(&mut self, ctx: &mut Context<'_>, op: OpId, next: ChainTarget) {
        let Some(state) = self.ops.get_mut(&op) else { return };
        if state.prepare.is_some_and(|call| self.calls.contains_key(&call)) {
            state.step = Step::Preparing;
            return self.wake_op(op, ctx.now.after(self.config.call_timeout_ms));
        }
        self.confirm(ctx, op, next);
    }

    /// Continues an update whose payload is gone and which `next` did not prepare. The predecessor
    /// still has the payload, and forwards it; without one, `next` is asked before the whole chunk is
    /// read and sent: after a failure of the head it has most updates.
    pub(super) fn resolve(&mut self, ctx: &mut Context<'_>, op: OpId, next: ChainTarget) {
        let Some(state) = self.ops.get(&op) else { return };
        let (chunk, update) = (state.chunk, state.version);
        let Some(pending) = &state.pending else { return };
        let (is_removal, needs_payload) = (pending.removed, self.needs_payload(pending));
        if needs_payload && matches!(state.kind, OpKind::Confirm { .. }) {
            return self.finish(ctx, op, Err(StorageError::NotPrepared { chunk, update }));
        }
        let Some(state) = self.ops.get_mut(&op) else { return };
        if is_removal || std::mem::replace(&mut state.asked, true) {
            return self.forward(ctx, op, next);
        }
        self.confirm(ctx, op, next);
    }

    /// Whether the predecessor must forward this pending state again, for the successor.
    pub(super) fn needs_payload(&self, pending: &ChunkState) -> bool {
        !pending.removed && self.successor_serves() && !self.may_resolve()
    }

    fn confirm(&mut self, ctx: &mut Context<'_>, op: OpId, next: ChainTarget) {
        // The successor has the change.
        let change = ContentChange::Replace;
        let checksum = crate::checksum::Checksum::default();
        if let Some(request) = self.forward_request(ctx, op, next, change, checksum) {
            self.op_call(ctx, op, next, StorageRequest::Confirm(request), Bytes::new());
        }
    }

    /// Whether an update that could not be applied, but was announced, is kept, or has made the head
    /// leave.
    pub(super) fn keeps_announced(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        error: &StoreError,
    ) -> bool {
        let serves = self.successor_serves();
        let Some(state) = self.ops.get_mut(&op) else { return false };
        let (chunk, target) = (state.chunk, self.config.target);
        // Its store is opened again after the others.
        let is_full = matches!(error, StoreError::NoSpace { .. } | StoreError::NotFound { .. });
        let is_damaged = matches!(error, StoreError::Corrupt { .. });
        if !state.announced || !serves || !(is_full || is_damaged) {
            return false;
        }
        let reason = error.clone().at(target);
        if !matches!(state.kind, OpKind::Update { .. }) {
            if self.predecessor().is_none() {
                self.demote(ctx, Alert::Outdated { target, chunk, reason });
                return true;
            }
            // The predecessor repeats it.
            self.lacking.insert(chunk, reason);
            return false;
        }
        if !self.config.makes(Check::Announced) {
            return false;
        }
        if is_damaged {
            self.demote(ctx, Alert::Outdated { target, chunk, reason });
        } else {
            state.attempt = state.attempt.saturating_add(1);
            if state.attempt == 1 {
                ctx.out.push(Action::Alert(Alert::Full { target, chunk }));
            }
            self.answer_waiters(ctx, op, &reason);
            self.back_off(ctx, op);
            // Others that fail are dropped, as they are not announced.
            let pause_ms = self.config.retry_wait_ms_max.saturating_mul(2);
            self.prepare_from = self.prepare_from.max(Some(ctx.now.after(pause_ms)));
        }
        true
    }

    /// Applies an announced update that did not fit on the disk before.
    pub(super) fn apply_again(&mut self, ctx: &mut Context<'_>, op: OpId) {
        let Some(state) = self.ops.get(&op) else { return };
        if self.is_forgotten(ctx, state.chunk.inode) {
            return self.back_off(ctx, op); // Its inode is being forgotten.
        }
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
        let (class, waits, prepare) = (self.class_of(op), true, None);
        let action = Action::Apply { op, update, payload, payload_checksum, class, waits, prepare };
        self.store(ctx, op, Step::Applying, action);
    }
}
