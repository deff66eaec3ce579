//! Lanes: one operation of a chunk at a time, the others wait in line, boundedly.

use std::collections::VecDeque;

use bytes::Bytes;

use super::{Action, CallId, Caller, Context, OpId, Replica, Role, Timer, Token};
use crate::chunk::ChunkState;
use crate::error::{StorageError, StoreError};
use crate::ids::{ChunkId, ChunkVersion, RequestTag};
use crate::message::{
    ForwardRequest, PurgeRequest, ReplaceRequest, StorageReply, UpdateRequest, Updated,
};
use crate::routing::PublicState;
use crate::time::Millis;

/// Retries of one request that may hang on one operation; the oldest is let go beyond that.
const WAITERS_MAX: usize = 16;

/// What an operation is for.
#[derive(Clone, Debug)]
pub(super) enum Work {
    /// A client's update, here at the head.
    Update { request: UpdateRequest, payload: Bytes, expires: Option<Millis> },
    /// The predecessor's update.
    Forward { request: ForwardRequest, payload: Bytes },
    /// The predecessor's whole chunk, while this target is SYNCING.
    Receive { request: ReplaceRequest, payload: Bytes },
    /// A pending state that no_waiters works on: roll it forward.
    Resolve,
    /// Bring the SYNCING successor's copy up to date.
    Send,
    /// Get the content back from another replica.
    Repair,
    /// Drop what is known of the removed chunk, after the successor: as the head (without a
    /// request), or for the predecessor.
    Purge { version: ChunkVersion, request: Option<PurgeRequest> },
}

impl Work {
    /// The hop of the request that it is.
    pub(super) fn hop(&self) -> u8 {
        match self {
            Self::Forward { request, .. } => request.hop,
            Self::Purge { request: Some(request), .. } => request.hop,
            _ => 0,
        }
    }
}

/// Where an operation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The store makes the pending state.
    Applying,
    /// The store reads the content for the successor.
    Reading,
    /// Another replica has been asked.
    Calling(CallId),
    /// A failed call will be repeated.
    BackingOff,
    /// The sync with the successor has no session yet.
    AwaitingSession,
    /// The store flips the pending state.
    Committing,
    /// The store drops the chunk.
    Forgetting,
}

impl Step {
    /// Is the store at work? Then the lane stays taken until it is done, come what may.
    pub(super) fn in_store(self) -> bool {
        matches!(self, Self::Applying | Self::Reading | Self::Committing | Self::Forgetting)
    }
}

/// One operation: holds its chunk's lane from beginning to end.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) chunk: ChunkId,
    pub(super) work: Work,
    pub(super) step: Step,
    pub(super) version: ChunkVersion,
    pub(super) tag: Option<RequestTag>,
    /// The pending state once it is durable here.
    pub(super) pending: Option<ChunkState>,
    pub(super) waiters: VecDeque<Token>,
    pub(super) attempt: u32,
    /// The highest hop of the requests that wait for it.
    pub(super) hop: u8,
    pub(super) wake: Option<Millis>,
    /// Ends as soon as the store is done.
    pub(super) aborted: bool,
}

/// Work in line.
#[derive(Debug)]
pub(super) struct QueuedWork {
    pub(super) work: Work,
    pub(super) waiters: VecDeque<Token>,
}

/// One chunk's line.
#[derive(Debug, Default)]
pub(super) struct ChunkQueue {
    pub(super) active: Option<OpId>,
    pub(super) waiting: VecDeque<QueuedWork>,
}

/// What became of work that reached the front of its line.
pub(super) enum Started {
    /// An operation holds the lane now.
    Op(OpId),
    /// It is already answered.
    Done,
    /// Something else must be done first.
    After(Work, Box<QueuedWork>),
}

impl Replica {
    /// Puts work in its chunk's line, or onto the operation that already does it.
    pub(super) fn enqueue(
        &mut self,
        ctx: &mut Context<'_>,
        chunk: ChunkId,
        work: Work,
        token: Option<Token>,
    ) {
        if self.ops.len() >= self.config.ops_max && !matches!(work, Work::Send | Work::Resolve) {
            return self.refuse_busy(ctx, token);
        }
        let queue = self.queues.entry(chunk).or_default();
        if let Some(op) = queue.active.and_then(|id| self.ops.get_mut(&id)) {
            if op.is_same(&work) && !op.aborted {
                op.hop = op.hop.max(work.hop());
                op.waiters.extend(token);
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
        queue.waiting.push_back(QueuedWork { work, waiters: token.into_iter().collect() });
        self.run_queue(ctx, chunk);
    }

    fn refuse_busy(&self, ctx: &mut Context<'_>, token: Option<Token>) {
        if let Some(token) = token {
            ctx.reply(token, Err(self.busy()));
        }
    }

    /// Begins the next work in line, if the lane is free.
    pub(super) fn run_queue(&mut self, ctx: &mut Context<'_>, chunk: ChunkId) {
        loop {
            let Some(queue) = self.queues.get_mut(&chunk) else { return };
            if queue.active.is_some() {
                return;
            }
            let Some(queued) = queue.waiting.pop_front() else {
                self.queues.remove(&chunk);
                return;
            };
            match self.start(ctx, chunk, queued) {
                Started::Done => {}
                Started::Op(op) => {
                    self.queues.entry(chunk).or_default().active = Some(op);
                    return;
                }
                Started::After(first, queued) => {
                    let waiting = &mut self.queues.entry(chunk).or_default().waiting;
                    waiting.push_front(*queued);
                    waiting.push_front(QueuedWork { work: first, waiters: VecDeque::new() });
                }
            }
        }
    }

    fn start(&mut self, ctx: &mut Context<'_>, chunk: ChunkId, queued: QueuedWork) -> Started {
        let QueuedWork { work, waiters } = queued;
        match work {
            Work::Update { request, payload, expires } => {
                self.start_update(ctx, request, payload, expires, waiters)
            }
            Work::Forward { request, payload } => {
                self.start_forward(ctx, request, payload, waiters)
            }
            Work::Receive { request, payload } => {
                self.start_receive(ctx, request, payload, waiters)
            }
            Work::Resolve => self.start_resolve(ctx, chunk, waiters, 0),
            Work::Send => self.start_send(ctx, chunk),
            Work::Repair => self.start_repair(ctx, chunk),
            Work::Purge { version, request } => {
                self.start_purge(ctx, chunk, version, request, waiters)
            }
        }
    }

    /// The hop of a forward: above that of all requests that wait for `op`, as its own or behind
    /// it in the chunk's lane. They hold budgets of their classes until it ends, so what it waits
    /// for must be of a higher class (`message::class`).
    pub(super) fn next_hop(&self, op: OpId) -> u8 {
        let Some(state) = self.ops.get(&op) else { return 1 };
        let behind = self.queues.get(&state.chunk).into_iter().flat_map(|queue| &queue.waiting);
        let highest = behind.map(|queued| queued.work.hop()).fold(state.hop, u8::max);
        highest.saturating_add(1)
    }

    /// Registers a new operation. The caller has pushed, or will push, its first action.
    pub(super) fn add_op(&mut self, op: Op) -> OpId {
        self.next_op += 1;
        let id = OpId(self.next_op);
        self.ops.insert(id, op);
        id
    }

    /// Remembers since when the store has been at work for `op`, and hands it the action.
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

    /// The store is at work for `op` from now on: waiting for room is not a stall of the disk.
    pub(super) fn room_given(&mut self, ctx: &Context<'_>, op: OpId) {
        if self.ops.get(&op).is_some_and(|state| state.step == Step::Applying) {
            self.store_since.insert(op, ctx.now);
        }
    }

    /// The store is done with `op`, or has failed. `None` if the operation ends here because it was
    /// aborted; a failed store is given up for an aborted operation as for any other.
    pub(super) fn store_done(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        error: Option<&StoreError>,
    ) -> Option<&mut Op> {
        self.store_since.remove(&op);
        if self.ops.get(&op)?.aborted {
            // First, so that nothing is begun on it.
            if let Some(error @ (StoreError::Io { .. } | StoreError::Damaged { .. })) = error {
                self.fail(ctx, error.to_string());
            }
            self.finish(ctx, op, Err(self.not_serving()));
            return None;
        }
        self.ops.get_mut(&op)
    }

    /// Wakes `op` at a moment, unless something else happens to it before.
    pub(super) fn wake_op(&mut self, op: OpId, at: Millis) {
        if let Some(state) = self.ops.get_mut(&op) {
            if let Some(before) = state.wake.replace(at) {
                self.timers.remove(&(before, Timer::Op(op)));
            }
            self.timers.insert((at, Timer::Op(op)));
        }
    }

    /// Asks another replica on behalf of `op`, with a deadline.
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

    /// Ends an operation, answers whoever waits, and lets the next one in.
    pub(super) fn finish(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        result: Result<Updated, StorageError>,
    ) {
        let Some(ended) = self.ops.remove(&op) else { return };
        if let Step::Calling(call) = ended.step {
            self.calls.remove(&call);
        }
        if let Some(at) = ended.wake {
            self.timers.remove(&(at, Timer::Op(op)));
        }
        for token in ended.waiters {
            ctx.reply(token, result.clone().map(StorageReply::Updated));
        }
        if let Some(queue) = self.queues.get_mut(&ended.chunk) {
            queue.active = None;
        }
        let sent = matches!(ended.work, Work::Send) && !ended.aborted;
        self.run_queue(ctx, ended.chunk);
        if let Work::Purge { version, request: None } = ended.work {
            self.purge_ended(ctx, ended.chunk, version, result.is_ok());
        }
        if sent {
            self.chunk_sent(ctx, result.is_ok());
        }
    }

    /// Answers those who wait on `op` now; the operation itself goes on.
    pub(super) fn answer_waiters(&mut self, ctx: &mut Context<'_>, op: OpId, error: &StorageError) {
        let Some(state) = self.ops.get_mut(&op) else { return };
        for token in std::mem::take(&mut state.waiters) {
            ctx.reply(token, Err(error.clone()));
        }
    }

    /// This replica is out of the chain: nothing goes on, everybody is told.
    pub(super) fn abort_all(&mut self, ctx: &mut Context<'_>, state: PublicState) {
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

    /// Ends one operation as soon as the store allows.
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

    /// Everything pending that no_waiters works on is rolled forward. Called whenever the chain
    /// changed and this replica serves.
    pub(super) fn resolve_orphans(&mut self, ctx: &mut Context<'_>) {
        if self.role() != Role::Serving {
            return;
        }
        // What an aborted operation leaves behind when the store is done with it.
        let aborted: Vec<ChunkId> =
            self.ops.values().filter(|op| op.aborted).map(|op| op.chunk).collect();
        for chunk in aborted {
            self.enqueue(ctx, chunk, Work::Resolve, None);
        }
        let mut after = None;
        loop {
            let page = ctx.metas.pending(after, self.config.sync_page);
            let Some(last) = page.last().copied() else { return };
            for chunk in page {
                if self.queues.get(&chunk).is_none_or(|queue| queue.active.is_none()) {
                    self.enqueue(ctx, chunk, Work::Resolve, None);
                }
            }
            after = Some(last);
        }
    }
}

impl Op {
    /// Would `work` do again what this operation does?
    fn is_same(&self, work: &Work) -> bool {
        match work {
            Work::Update { request, .. } => self.tag == Some(request.tag),
            Work::Forward { request, .. } => {
                self.tag == Some(request.tag) && self.version == request.version
            }
            Work::Resolve => {
                matches!(self.work, Work::Resolve | Work::Update { .. } | Work::Forward { .. })
            }
            Work::Repair => matches!(self.work, Work::Repair),
            Work::Purge { version, .. } => {
                matches!(self.work, Work::Purge { .. }) && self.version == *version
            }
            Work::Receive { .. } | Work::Send => false,
        }
    }
}
