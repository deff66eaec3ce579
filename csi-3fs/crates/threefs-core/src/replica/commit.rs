//! Commit of a pending state, which is durable here: forward it to the successor and wait, or
//! commit immediately as the tail; then reply.

use std::collections::VecDeque;

use bytes::Bytes;

use super::queue::{Op, OpKind, StartResult, Step};
use super::update::answer;
use super::{Action, Alert, CallId, Context, OpId, PeerFailure, Replica, Role, Timer, Token};
use crate::checksum::Checksum;
use crate::chunk::{ChunkState, ContentChange, Which};
use crate::error::{StorageError, StoreError};
use crate::ids::ChunkId;
use crate::message::{ForwardRequest, ReplaceRequest, StorageReply, StorageRequest, Updated};
use crate::routing::{ChainTarget, PublicState};

impl Replica {
    /// Resumes a pending state without an operation: after a restart or a change of role, or for the
    /// predecessor (Confirm, or Forward with its payload).
    pub(super) fn start_resolve(
        &mut self,
        ctx: &mut Context<'_>,
        chunk: ChunkId,
        kind: OpKind,
        waiters: VecDeque<Token>,
        hop: u8,
    ) -> StartResult {
        let meta = ctx.meta(chunk);
        let Some(pending) = meta.pending.filter(|_| self.role() == Role::Serving) else {
            return answer(ctx, waiters, Err(self.not_serving()));
        };
        if self.is_forgotten(ctx, chunk.inode) {
            // Otherwise the operation would block the queue forever.
            let error = StorageError::InodeForgotten { inode: chunk.inode };
            return answer(ctx, waiters, Err(error));
        }
        let prepare = self.prepared.get(&chunk).and_then(|prepared| prepared.sent);
        let is_confirm = matches!(kind, OpKind::Confirm { .. });
        if is_confirm && prepare.is_none() && self.needs_payload(&pending) {
            let update = pending.version;
            return answer(ctx, waiters, Err(StorageError::NotPrepared { chunk, update }));
        }
        let version = pending.version;
        let op = self.add_op(Op {
            tag: pending.tags.newest().map(|newest| newest.tag),
            pending: Some(pending),
            waiters,
            prepare,
            hop,
            ..Op::new(chunk, kind, version)
        });
        self.proceed(ctx, op);
        StartResult::Op(op)
    }

    /// Called after a new chain version: calls to the former successor are repeated to the current one.
    pub(super) fn proceed_all(&mut self, ctx: &mut Context<'_>) {
        let waiting: Vec<OpId> = self
            .ops
            .iter()
            .filter(|(_, op)| !op.step.in_store() && !op.aborted)
            .map(|(id, _)| *id)
            .collect();
        for op in waiting {
            if let Some(state) = self.ops.get_mut(&op) {
                state.attempt = 0;
                state.asked = false;
            }
            self.proceed(ctx, op);
        }
    }

    /// Takes the next step of an operation for the current role and chain.
    pub(super) fn proceed(&mut self, ctx: &mut Context<'_>, op: OpId) {
        let role = self.role();
        let Some(state) = self.ops.get_mut(&op) else { return };
        if let Step::Calling(call) = state.step {
            self.calls.remove(&call);
        }
        state.step = Step::BackingOff;
        if let Some(at) = state.wake.take() {
            self.timers.remove(&(at, Timer::Op(op)));
        }
        if self.ends_forgotten(ctx, op) {
            return;
        }
        let Some(state) = self.ops.get(&op) else { return };
        match state.kind {
            OpKind::Send => return self.proceed_send(ctx, op),
            OpKind::Repair => return self.proceed_repair(ctx, op),
            // Retried later, so that it does not block the chunk's queue.
            OpKind::Purge { .. } | OpKind::Drop => return self.finish(ctx, op, Err(self.busy())),
            _ => {}
        }
        let may = match role {
            Role::Serving => true,
            Role::Syncing => matches!(state.kind, OpKind::Receive { .. }),
            Role::Idle(_) => false,
        };
        if !may {
            let error = self.not_serving();
            return self.abort(ctx, op, &error);
        }
        if matches!(state.kind, OpKind::Update { .. }) && state.pending.is_none() {
            return self.apply_again(ctx, op);
        }
        match self.successor() {
            None => self.commit(ctx, op),
            Some(next) if next.state == PublicState::Syncing => self.send_whole(ctx, op, next),
            Some(next) if state.prepare.is_some() => self.confirm_prepared(ctx, op, next),
            Some(next) if matches!(state.kind, OpKind::Resolve | OpKind::Confirm { .. }) => {
                self.resolve(ctx, op, next);
            }
            Some(next) => self.forward(ctx, op, next),
        }
    }

    pub(super) fn commit(&mut self, ctx: &mut Context<'_>, op: OpId) {
        let chain_version = self.chain_version();
        let Some(state) = self.ops.get(&op) else { return };
        let (chunk, version) = (state.chunk, state.version);
        let action = Action::Commit { op, chunk, version, chain_version };
        self.store(ctx, op, Step::Committing, action);
    }

    /// Forwards the client's payload to a SERVING successor, or the whole
    /// content if the payload was dropped.
    pub(super) fn forward(&mut self, ctx: &mut Context<'_>, op: OpId, next: ChainTarget) {
        let Some(state) = self.ops.get(&op) else { return };
        let (change, payload, payload_checksum) = match &state.kind {
            OpKind::Update { request, payload, .. } => {
                (request.change, payload.clone(), request.payload_checksum)
            }
            OpKind::Forward { request, payload } | OpKind::Prepare { request, payload } => {
                (request.change, payload.clone(), request.payload_checksum)
            }
            _ if state.pending.as_ref().is_some_and(|pending| pending.removed) => {
                (ContentChange::Remove, Bytes::new(), Checksum::default())
            }
            _ => return self.read_newest(ctx, op),
        };
        self.call_forward(ctx, op, next, change, payload, payload_checksum);
    }

    pub(super) fn call_forward(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        next: ChainTarget,
        change: ContentChange,
        payload: Bytes,
        payload_checksum: Checksum,
    ) {
        let request = self.forward_request(ctx, op, next, change, payload_checksum);
        if let Some(request) = request {
            self.op_call(ctx, op, next, StorageRequest::Forward(request), payload);
        }
    }

    /// The request that forwards, prepares or confirms the update of `op`.
    pub(super) fn forward_request(
        &self,
        ctx: &Context<'_>,
        op: OpId,
        next: ChainTarget,
        change: ContentChange,
        payload_checksum: Checksum,
    ) -> Option<ForwardRequest> {
        let state = self.ops.get(&op)?;
        Some(ForwardRequest {
            to: self.address_of(next.target),
            from: self.config.target,
            chunk: state.chunk,
            version: state.version,
            // Every update has a tag; a state without one does not come from an update.
            tag: state.tag.unwrap_or_default(),
            change,
            payload_checksum,
            chunk_checksum: state.pending.as_ref().map_or(Checksum(0), |pending| pending.checksum),
            fresh: !ctx.meta(state.chunk).committed.exists(),
            purges: self.purges.number(),
            hop: self.next_hop(op),
        })
    }

    /// Sends the whole chunk to a SYNCING successor.
    fn send_whole(&mut self, ctx: &mut Context<'_>, op: OpId, next: ChainTarget) {
        let Some(state) = self.ops.get(&op) else { return };
        let Some(pending) = state.pending.clone() else { return };
        if self.session().is_none() {
            if let Some(state) = self.ops.get_mut(&op) {
                state.step = Step::AwaitingSession;
            }
        } else if pending.removed {
            self.call_replace(ctx, op, next, &pending, Bytes::new());
        } else {
            self.read_newest(ctx, op);
        }
    }

    fn read_newest(&mut self, ctx: &mut Context<'_>, op: OpId) {
        let Some(chunk) = self.ops.get(&op).map(|state| state.chunk) else { return };
        let action = Action::ReadContent { op, chunk, which: Which::Newest };
        self.store(ctx, op, Step::Reading, action);
    }

    /// Sends a whole chunk with the state `content`. The session must be known.
    pub(super) fn call_replace(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        next: ChainTarget,
        content: &ChunkState,
        payload: Bytes,
    ) {
        let Some(session) = self.session() else { return };
        let Some(chunk) = self.ops.get(&op).map(|state| state.chunk) else { return };
        self.sequence += 1;
        let request = ReplaceRequest {
            to: self.address_of(next.target),
            from: self.config.target,
            session,
            sequence: self.sequence,
            chunk,
            version: content.version,
            removed: content.removed,
            tags: content.tags.clone(),
            checksum: content.checksum,
        };
        self.op_call(ctx, op, next, StorageRequest::Replace(request), payload);
    }

    pub(super) fn on_content(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        result: Result<(ChunkState, Bytes), StoreError>,
    ) {
        let Some(state) = self.store_done(ctx, op, result.as_ref().err()) else { return };
        state.step = Step::BackingOff;
        if self.is_copy(op) {
            return self.on_copied(ctx, op, result);
        }
        let Some(state) = self.ops.get(&op) else { return };
        let (chunk, expected) = (state.chunk, state.pending.clone().unwrap_or_default());
        if matches!(state.kind, OpKind::Send) {
            return self.send_content(ctx, op, result);
        }
        let (content, payload) = match result {
            Ok(read) => read,
            Err(error @ StoreError::Io { .. }) => return self.fail(ctx, error.to_string()),
            Err(_) if self.ends_forgotten(ctx, op) => return,
            Err(_) => {
                let target = self.config.target;
                ctx.out.push(Action::Alert(Alert::NotRepaired { target, chunk }));
                return self.confirm_without_content(ctx, op, &expected);
            }
        };
        match self.successor() {
            Some(next) if next.state == PublicState::Syncing && self.session().is_some() => {
                self.call_replace(ctx, op, next, &content, payload);
            }
            Some(next) if next.state == PublicState::Serving => {
                let checksum = content.checksum;
                self.call_forward(ctx, op, next, ContentChange::Replace, payload, checksum);
            }
            // The chain changed during the read.
            _ => self.proceed(ctx, op),
        }
    }

    pub(super) fn on_op_answer(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        call: CallId,
        result: Result<StorageReply, PeerFailure>,
        payload: Bytes,
    ) {
        let Some(state) = self.ops.get_mut(&op) else { return };
        if state.step != Step::Calling(call) {
            return;
        }
        state.step = Step::BackingOff;
        if matches!(state.kind, OpKind::Repair) {
            return self.on_repair_answer(ctx, op, result, payload);
        }
        if matches!(state.kind, OpKind::Purge { .. }) {
            return self.on_purge_answer(ctx, op, result);
        }
        // Whether it was confirmed or forwarded: next time it is forwarded.
        state.prepare = None;
        if let Some(prepared) = self.prepared.get_mut(&state.chunk) {
            prepared.sent = None;
        }
        match result {
            Ok(StorageReply::Updated(reply)) if state.is_done_by(&reply) => {
                if matches!(state.kind, OpKind::Send) {
                    self.sent(ctx, op, reply);
                } else {
                    self.commit(ctx, op);
                }
            }
            Err(PeerFailure::Refused(StorageError::NotPrepared { .. })) => {
                self.proceed(ctx, op);
            }
            Err(PeerFailure::Refused(StorageError::SyncSessionMismatch { .. })) => {
                self.back_off(ctx, op);
                self.restart_sending(ctx);
            }
            Err(PeerFailure::Refused(StorageError::InodeForgotten { .. })) => {
                self.learn_forgotten(ctx, op);
            }
            Err(PeerFailure::Refused(error @ StorageError::NoSpace { .. })) => {
                self.successor_is_full(ctx, op, &error);
            }
            Err(PeerFailure::Refused(_)) if self.is_damaged_send(op) => self.not_sent(ctx, op),
            Err(PeerFailure::Refused(_)) => {
                // It said nothing of this update, for example because it has an earlier routing.
                if let Some(state) = self.ops.get_mut(&op) {
                    state.asked = false;
                }
                self.back_off(ctx, op);
            }
            _ => self.back_off(ctx, op),
        }
    }

    /// The update stays pending and is retried: it must not be dropped, because a delayed copy of
    /// the call may still be executed. But its waiters are answered, and other updates that need
    /// space are refused early.
    fn successor_is_full(&mut self, ctx: &mut Context<'_>, op: OpId, error: &StorageError) {
        self.answer_waiters(ctx, op, error);
        if let Some(next) = self.successor().filter(|next| next.state == PublicState::Serving) {
            if self.successor_full_until.is_none_or(|until| until <= ctx.now) {
                let (target, successor) = (self.config.target, next.target);
                ctx.out.push(Action::Alert(Alert::SuccessorFull { target, successor }));
            }
            let until = ctx.now.after(self.config.retry_wait_ms_max.saturating_mul(2));
            self.successor_full_until = Some(until);
        }
        self.back_off(ctx, op);
    }

    /// Retries a failed call later, to the successor at that time.
    pub(super) fn back_off(&mut self, ctx: &mut Context<'_>, op: OpId) {
        let Some(state) = self.ops.get_mut(&op) else { return };
        state.step = Step::BackingOff;
        let attempt = state.attempt;
        self.wake_op(op, ctx.now.after(self.retry_wait_ms(attempt)));
    }

    pub(super) fn on_op_timer(&mut self, ctx: &mut Context<'_>, op: OpId, at: crate::time::Millis) {
        let Some(state) = self.ops.get(&op) else { return };
        if state.wake != Some(at) || state.step.in_store() {
            return;
        }
        if state.step == Step::Preparing {
            self.give_up_prepare(op);
        }
        self.proceed(ctx, op);
    }

    pub(super) fn on_committed(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        result: Result<ChunkState, StoreError>,
    ) {
        // The commit of an aborted operation is valid: the successors have committed.
        self.store_since.remove(&op);
        let Some(state) = self.ops.get_mut(&op) else { return };
        state.step = Step::BackingOff;
        if matches!(result, Err(StoreError::NotFound { .. })) && self.ends_forgotten(ctx, op) {
            return;
        }
        let Some(state) = self.ops.get(&op) else { return };
        match result {
            Ok(committed) => {
                let chunk = state.chunk;
                self.prepared.remove(&chunk);
                if matches!(state.kind, OpKind::Repair) {
                    let target = self.config.target;
                    ctx.out.push(Action::Alert(Alert::Repaired { target, chunk }));
                } else if let Some(tag) = state.tag {
                    self.channels.record_result(tag, chunk, committed.version);
                }
                let reply = Updated {
                    version: committed.version,
                    length: committed.length,
                    checksum: committed.checksum,
                    chain_version: committed.chain_version,
                };
                self.finish(ctx, op, Ok(reply));
                if committed.removed {
                    self.purge_later(ctx, chunk, committed.version);
                }
                self.drop_before(ctx, chunk);
            }
            Err(error) => {
                let reason = error.to_string();
                self.finish(ctx, op, Err(error.at(self.config.target)));
                self.fail(ctx, reason);
            }
        }
    }

    pub(super) fn on_forgotten(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        result: Result<(), StoreError>,
    ) {
        let state = self.store_done(ctx, op, result.as_ref().err());
        let Some(version) = state.map(|state| state.version) else { return };
        match result {
            Ok(()) => {
                let chain_version = self.chain_version();
                self.finish(ctx, op, Ok(Updated { version, chain_version, ..Updated::nothing() }));
            }
            Err(error) => {
                let reason = error.to_string();
                self.finish(ctx, op, Err(error.at(self.config.target)));
                self.fail(ctx, reason);
            }
        }
    }
}

impl Op {
    /// Whether the reply confirms that the successor has the same version and content.
    fn is_done_by(&self, reply: &Updated) -> bool {
        let checksum = self.pending.as_ref().map_or(Checksum(0), |pending| pending.checksum);
        reply.version == self.version && reply.checksum == checksum
    }
}

/// Waiters of an operation that the replica starts by itself.
pub(super) fn no_waiters() -> VecDeque<Token> {
    VecDeque::new()
}
