//! Chunk queues: one operation of a chunk at a time, of whatever version; others wait in a bounded
//! queue.

use std::collections::VecDeque;

use bytes::Bytes;

use super::{Action, CallId, Caller, Context, OpId, Replica, Role, Timer, Token};
use crate::chunk::ChunkState;
use crate::error::{StorageError, StoreError};
use crate::ids::{ChunkId, ChunkVersion, RequestTag};
use crate::message::{
    ForwardRequest, PurgeRequest, ReplaceRequest, StorageReply, UpdateConditions, UpdateRequest,
    Updated,
};
use crate::routing::PublicState;
use crate::time::Millis;

/// Maximum number of retries of a request that wait for one operation; beyond it the oldest times
/// out.
const WAITERS_MAX: usize = 16;

/// Kind of an operation, with its request.
#[derive(Clone, Debug)]
pub(super) enum OpKind {
    /// A client's update, on the head.
    Update {
        request: UpdateRequest,
        conditions: UpdateConditions,
        payload: Bytes,
        expires: Option<Millis>,
    },
    /// An update from the predecessor.
    Forward { request: ForwardRequest, payload: Bytes },
    /// An update from the predecessor, which does not have it yet.
    Prepare { request: ForwardRequest, payload: Bytes },
    /// The predecessor has a prepared update.
    Confirm { request: ForwardRequest },
    /// A whole chunk from the predecessor, while this target is SYNCING.
    Receive { request: ReplaceRequest, payload: Bytes },
    /// Roll forward a pending state without an operation.
    Resolve,
    /// Send the chunk to the SYNCING successor.
    Send,
    /// Restore the content from another replica.
    Repair,
    /// Drop the state of a removed chunk, after the successor: on the head (without a request), or
    /// for the predecessor.
    Purge { version: ChunkVersion, request: Option<PurgeRequest> },
    /// Drop an old version that no snapshot shows.
    Drop,
}

impl OpKind {
    /// The hop of its request.
    pub(super) fn hop(&self) -> u8 {
        match self {
            Self::Forward { request, .. }
            | Self::Prepare { request, .. }
            | Self::Confirm { request } => request.hop,
            Self::Purge { request: Some(request), .. } => request.hop,
            _ => 0,
        }
    }
}

/// Progress of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The store makes the state pending.
    Applying,
    /// The store reads the content for the successor.
    Reading,
    /// Waiting for the reply of another replica.
    Calling(CallId),
    /// Waiting for the answer to the prepare of the successor.
    Preparing,
    /// Waiting to repeat a failed call.
    BackingOff,
    /// Waiting for the sync session with the successor.
    AwaitingSession,
    /// The store commits the pending state.
    Committing,
    /// The store drops the chunk.
    Forgetting,
}

impl Step {
    /// Whether the store is working. Then the queue stays blocked until it has finished.
    pub(super) fn in_store(self) -> bool {
        matches!(self, Self::Applying | Self::Reading | Self::Committing | Self::Forgetting)
    }
}

/// One operation, which blocks its chunk's queue until it ends.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) chunk: ChunkId,
    pub(super) kind: OpKind,
    pub(super) step: Step,
    pub(super) version: ChunkVersion,
    pub(super) tag: Option<RequestTag>,
    /// The pending state, once it is durable here.
    pub(super) pending: Option<ChunkState>,
    /// The successor was sent this update in this chain version, and has not refused it.
    pub(super) prepare: Option<CallId>,
    /// A successor may have this update pending, although it is not durable here.
    pub(super) announced: bool,
    /// Without a payload: the successor was asked, in this chain version, whether it has the update.
    pub(super) asked: bool,
    pub(super) waiters: VecDeque<Token>,
    pub(super) attempt: u32,
    /// The highest hop of the requests that wait for it.
    pub(super) hop: u8,
    pub(super) wake: Option<Millis>,
    /// Ends as soon as the store has finished.
    pub(super) aborted: bool,
}

/// An operation that waits in a queue.
#[derive(Debug)]
pub(super) struct QueuedOp {
    pub(super) chunk: ChunkId,
    pub(super) kind: OpKind,
    pub(super) waiters: VecDeque<Token>,
}

/// Queue of one chunk: of all its versions.
#[derive(Debug, Default)]
pub(super) struct ChunkQueue {
    pub(super) active: Option<OpId>,
    pub(super) waiting: VecDeque<QueuedOp>,
}

/// Result of starting the next operation of a queue.
pub(super) enum StartResult {
    /// An operation has started.
    Op(OpId),
    /// The request was answered immediately.
    Done,
    /// The pending state of this version must be resolved first.
    Resolve(ChunkId, Box<QueuedOp>),
}

impl Replica {
    /// Appends an operation to its chunk's queue, or joins an equal one in progress.
    pub(super) fn enqueue(
        &mut self,
        ctx: &mut Context<'_>,
        chunk: ChunkId,
        kind: OpKind,
        token: Option<Token>,
    ) {
        if self.ops.len() >= self.config.ops_max && !matches!(kind, OpKind::Send | OpKind::Resolve)
        {
            return self.refuse_busy(ctx, token);
        }
        let queue = self.queues.entry(chunk.first_version()).or_default();
        if let Some(op) = queue.active.and_then(|id| self.ops.get_mut(&id)) {
            if op.is_same(chunk, &kind) && !op.aborted {
                op.hop = op.hop.max(kind.hop());
                op.waiters.extend(token);
                if matches!(op.kind, OpKind::Confirm { .. } | OpKind::Resolve)
                    && matches!(kind, OpKind::Forward { .. })
                    && kind.is_intact()
                {
                    op.kind = kind; // With the payload.
                }
                if op.waiters.len() > WAITERS_MAX
                    && let Some(oldest) = op.waiters.pop_front()
                {
                    let target = self.config.target;
                    ctx.reply(oldest, Err(StorageError::Timeout { target }));
                }
                return;
            }
            if queue.waiting.len() >= self.config.chunk_queue_max {
                return self.refuse_busy(ctx, token);
            }
        }
        let waiters = token.into_iter().collect();
        queue.waiting.push_back(QueuedOp { chunk, kind, waiters });
        self.run_queue(ctx, chunk);
    }

    fn refuse_busy(&self, ctx: &mut Context<'_>, token: Option<Token>) {
        if let Some(token) = token {
            ctx.reply(token, Err(self.busy()));
        }
    }

    /// Starts the next operation, if the queue is not blocked.
    pub(super) fn run_queue(&mut self, ctx: &mut Context<'_>, chunk: ChunkId) {
        let key = chunk.first_version();
        loop {
            let Some(queue) = self.queues.get_mut(&key) else { return };
            if queue.active.is_some() {
                return;
            }
            let Some(queued) = queue.waiting.pop_front() else {
                self.queues.remove(&key);
                return;
            };
            match self.start(ctx, queued) {
                StartResult::Done => {}
                StartResult::Op(op) => {
                    self.queues.entry(key).or_default().active = Some(op);
                    return;
                }
                StartResult::Resolve(pending, queued) => {
                    let waiting = &mut self.queues.entry(key).or_default().waiting;
                    waiting.push_front(*queued);
                    let (kind, waiters) = (OpKind::Resolve, VecDeque::new());
                    waiting.push_front(QueuedOp { chunk: pending, kind, waiters });
                }
            }
        }
    }

    fn start(&mut self, ctx: &mut Context<'_>, queued: QueuedOp) -> StartResult {
        let QueuedOp { chunk, kind, waiters } = queued;
        match kind {
            OpKind::Update { request, conditions, payload, expires } => {
                self.start_update(ctx, request, conditions, payload, expires, waiters)
            }
            OpKind::Forward { request, payload } => {
                self.start_forward(ctx, request, payload, waiters)
            }
            OpKind::Prepare { request, payload } => {
                self.start_prepare(ctx, request, payload, waiters)
            }
            OpKind::Confirm { request } => self.start_confirm(ctx, request, waiters),
            OpKind::Receive { request, payload } => {
                self.start_receive(ctx, request, payload, waiters)
            }
            OpKind::Resolve => self.start_resolve(ctx, chunk, OpKind::Resolve, waiters, 0),
            OpKind::Send => self.start_send(ctx, chunk),
            OpKind::Repair => self.start_repair(ctx, chunk),
            OpKind::Purge { version, request } => {
                self.start_purge(ctx, chunk, version, request, waiters)
            }
            OpKind::Drop => self.start_drop(ctx, chunk),
        }
    }

    /// The hop of a forward: above that of all requests that wait for `op` itself or behind it in
    /// the chunk's queue. They hold budgets of their classes until it ends, so it may only wait for
    /// requests of a higher class (`message::class`).
    pub(super) fn next_hop(&self, op: OpId) -> u8 {
        let Some(state) = self.ops.get(&op) else { return 1 };
        let queue = self.queues.get(&state.chunk.first_version());
        let behind = queue.into_iter().flat_map(|queue| &queue.waiting);
        let highest = behind.map(|queued| queued.kind.hop()).fold(state.hop, u8::max);
        highest.saturating_add(1)
    }

    /// Registers a new operation. The caller pushes its first action.
    pub(super) fn add_op(&mut self, op: Op) -> OpId {
        self.next_op += 1;
        let id = OpId(self.next_op);
        self.ops.insert(id, op);
        id
    }

    /// Passes an action for `op` to the store, and records the time.
    pub(super) fn store(&mut self, ctx: &mut Context<'_>, op: OpId, step: Step, action: Action) {
        self.store_since.insert(op, ctx.now);
        if let Some(state) = self.ops.get_mut(&op) {
            state.step = step;
            if let Some(at) = state.wake.take() {
                self.timers.remove(&(at, Timer::Op(op)));
            }
        }
        ctx.out.push(action);
    }

    /// The store starts to work on `op`: waiting for space does not count as a stall of the disk.
    pub(super) fn room_given(&mut self, ctx: &Context<'_>, op: OpId) {
        if self.ops.get(&op).is_some_and(|state| state.step == Step::Applying) {
            self.store_since.insert(op, ctx.now);
        }
    }

    /// Handles the result of the store. `None` if the operation ends here because it was aborted; a
    /// failed store is handled for an aborted operation as well.
    pub(super) fn store_done(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        error: Option<&StoreError>,
    ) -> Option<&mut Op> {
        self.store_since.remove(&op);
        if self.ops.get(&op)?.aborted {
            // Before the operation ends, so that no other starts on the failed store.
            if let Some(error @ (StoreError::Io { .. } | StoreError::Damaged { .. })) = error {
                self.fail(ctx, error.to_string());
            }
            self.finish(ctx, op, Err(self.not_serving()));
            return None;
        }
        self.ops.get_mut(&op)
    }

    /// Sets the wake-up time of `op`, unless it makes progress before.
    pub(super) fn wake_op(&mut self, op: OpId, at: Millis) {
        if let Some(state) = self.ops.get_mut(&op) {
            if let Some(before) = state.wake.replace(at) {
                self.timers.remove(&(before, Timer::Op(op)));
            }
            self.timers.insert((at, Timer::Op(op)));
        }
    }

    /// Calls another replica for `op`, with a timeout.
    pub(super) fn op_call(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        to: crate::routing::ChainTarget,
        request: crate::message::StorageRequest,
        payload: Bytes,
    ) {
        let call = self.call(ctx, Caller::Op(op), to, request, payload);
        if let Some(state) = self.ops.get_mut(&op) {
            state.step = Step::Calling(call);
            state.attempt = state.attempt.saturating_add(1);
        }
        self.wake_op(op, ctx.now.after(self.config.call_timeout_ms));
    }

    /// Ends an operation, answers its waiters, and starts the next one.
    pub(super) fn finish(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        result: Result<Updated, StorageError>,
    ) {
        let Some(operation) = self.ops.remove(&op) else { return };
        if let Step::Calling(call) = operation.step {
            self.calls.remove(&call);
        }
        if let Some(at) = operation.wake {
            self.timers.remove(&(at, Timer::Op(op)));
        }
        let is_prepare = matches!(operation.kind, OpKind::Prepare { .. });
        for token in operation.waiters {
            let reply = result.clone().map(|updated| match is_prepare {
                true => StorageReply::Prepared,
                false => StorageReply::Updated(updated),
            });
            ctx.reply(token, reply);
        }
        if let Some(queue) = self.queues.get_mut(&operation.chunk.first_version()) {
            queue.active = None;
        }
        let is_send = matches!(operation.kind, OpKind::Send) && !operation.aborted;
        self.run_queue(ctx, operation.chunk);
        if let OpKind::Purge { version, request: None } = operation.kind {
            self.purge_ended(ctx, operation.chunk, version, result.is_ok());
        }
        if matches!(operation.kind, OpKind::Drop) {
            self.drop_ended(ctx, operation.chunk);
        }
        if is_send {
            self.chunk_sent(ctx, result.is_ok());
        }
    }

    /// Answers the waiters of `op`; the operation itself continues.
    pub(super) fn answer_waiters(&mut self, ctx: &mut Context<'_>, op: OpId, error: &StorageError) {
        let Some(state) = self.ops.get_mut(&op) else { return };
        for token in std::mem::take(&mut state.waiters) {
            ctx.reply(token, Err(error.clone()));
        }
    }

    /// Aborts all operations and answers all waiters: this replica has left the chain.
    pub(super) fn abort_all(&mut self, ctx: &mut Context<'_>, state: PublicState) {
        self.prepared.clear();
        self.lacking.clear();
        let error = StorageError::NotServing { target: self.config.target, state };
        for queue in self.queues.values_mut() {
            for queued in queue.waiting.drain(..) {
                for token in queued.waiters {
                    ctx.reply(token, Err(error.clone()));
                }
            }
        }
        let ops: Vec<OpId> = self.ops.keys().copied().collect();
        for op in ops {
            self.abort(ctx, op, &error);
        }
    }

    /// Ends one operation as soon as the store has finished.
    pub(super) fn abort(&mut self, ctx: &mut Context<'_>, op: OpId, error: &StorageError) {
        self.answer_waiters(ctx, op, error);
        let Some(state) = self.ops.get_mut(&op) else { return };
        state.aborted = true;
        if !state.step.in_store() {
            self.finish(ctx, op, Err(error.clone()));
        }
    }

    pub(super) fn busy(&self) -> StorageError {
        StorageError::Busy { target: self.config.target }
    }

    pub(super) fn not_serving(&self) -> StorageError {
        StorageError::NotServing { target: self.config.target, state: self.public_state() }
    }

    /// Rolls forward all pending states without an operation. Called when the chain has changed and
    /// this replica serves: as the head, because the others wait for it (see `prepare`).
    pub(super) fn resolve_orphans(&mut self, ctx: &mut Context<'_>) {
        if self.role() != Role::Serving || !self.may_resolve() {
            return;
        }
        // Pending states that aborted operations leave behind.
        let aborted: Vec<ChunkId> =
            self.ops.values().filter(|op| op.aborted).map(|op| op.chunk).collect();
        for chunk in aborted {
            self.enqueue(ctx, chunk, OpKind::Resolve, None);
        }
        let mut after = None;
        loop {
            let page = ctx.metas.pending(after, self.config.sync_page);
            let Some(last) = page.last().copied() else { return };
            for chunk in page {
                self.enqueue(ctx, chunk, OpKind::Resolve, None);
            }
            after = Some(last);
        }
    }
}

impl Op {
    /// An operation whose first step follows.
    pub(super) fn new(chunk: ChunkId, kind: OpKind, version: ChunkVersion) -> Self {
        Self {
            chunk,
            hop: kind.hop(),
            kind,
            step: Step::BackingOff,
            version,
            tag: None,
            pending: None,
            prepare: None,
            announced: false,
            asked: false,
            waiters: VecDeque::new(),
            attempt: 0,
            wake: None,
            aborted: false,
        }
    }

    /// Whether an operation of `kind` on this version would do the same as this one. A repeated
    /// update is the same in whatever epoch.
    fn is_same(&self, chunk: ChunkId, kind: &OpKind) -> bool {
        match kind {
            // The end of a prepare is not that of its update.
            OpKind::Update { .. } | OpKind::Forward { .. } | OpKind::Confirm { .. }
                if matches!(self.kind, OpKind::Prepare { .. }) =>
            {
                false
            }
            OpKind::Update { request, .. } => self.tag == Some(request.tag),
            _ if self.chunk != chunk => false,
            OpKind::Forward { request, .. }
            | OpKind::Prepare { request, .. }
            | OpKind::Confirm { request } => {
                self.tag == Some(request.tag) && self.version == request.version
            }
            OpKind::Resolve => {
                matches!(
                    self.kind,
                    OpKind::Resolve
                        | OpKind::Update { .. }
                        | OpKind::Forward { .. }
                        | OpKind::Confirm { .. }
                )
            }
            OpKind::Repair => matches!(self.kind, OpKind::Repair),
            OpKind::Drop => matches!(self.kind, OpKind::Drop),
            OpKind::Purge { version, .. } => {
                matches!(self.kind, OpKind::Purge { .. }) && self.version == *version
            }
            OpKind::Receive { .. } | OpKind::Send => false,
        }
    }
}
