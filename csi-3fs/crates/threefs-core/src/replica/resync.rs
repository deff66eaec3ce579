//! Sending side of a resync: the predecessor compares its chunks with those of a SYNCING successor,
//! page by page, and sends each chunk that differs. The predecessor's copy is authoritative.
//!
//! Updates in the meantime are sent to the successor as whole chunks (see `commit`), so a chunk is
//! equal once it was sent or updated, and stays equal.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

use bytes::Bytes;

use super::commit::no_waiters;
use super::queue::{Op, OpKind, QueuedOp, StartResult, Step};
use super::{Action, Alert, CallId, Caller, Context, OpId, PeerFailure, Replica, Role, Timer};
use crate::chunk::{ChunkMeta, ChunkState, Which};
use crate::error::{StorageError, StoreError};
use crate::forgotten::FORGET_INODES_MAX;
use crate::ids::{ChunkId, ChunkVersion, InodeId};
use crate::message::{
    ForgetInodes, StorageReply, StorageRequest, SyncDone, SyncMetas, SyncSession, SyncStart,
    Updated,
};
use crate::routing::{ChainTarget, PublicState};
use crate::time::Millis;

/// Progress of a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Starting,
    /// The successor receives the forgotten inodes, whose chunks need no comparison, and the
    /// version floor.
    Fencing,
    Comparing,
    Copying,
    Ending,
    /// Everything is equal. The end is repeated from time to time: a successor that has restarted
    /// replies that the session is unknown.
    Ended,
}

/// The sync of this replica's successor.
#[derive(Debug)]
pub(super) struct Sending {
    successor: ChainTarget,
    round: u64,
    stage: Stage,
    session: Option<SyncSession>,
    /// Ranges of forgotten inodes that start here or before were sent.
    fenced: Option<InodeId>,
    /// All chunks up to here are compared.
    cursor: Option<ChunkId>,
    /// End of the page being copied; `None` = the last page.
    page_end: Option<ChunkId>,
    queue: VecDeque<ChunkId>,
    /// Chunks that could not be read here: retried after all others.
    damaged_chunks: BTreeSet<ChunkId>,
    /// Chunks whose pending update the predecessor has not confirmed: retried soon.
    prepared_chunks: BTreeSet<ChunkId>,
    outstanding: usize,
    sent_chunks: u64,
    call: Option<CallId>,
    attempt: u32,
    wake: Option<Millis>,
}

impl Replica {
    /// The session with the SYNCING successor, once it is known.
    pub(super) fn session(&self) -> Option<SyncSession> {
        self.sending.as_ref().and_then(|sending| sending.session)
    }

    /// Starts the sync of the successor, if it is SYNCING.
    pub(super) fn start_sending(&mut self, ctx: &mut Context<'_>) {
        let Some(successor) = self.successor().filter(|next| next.state == PublicState::Syncing)
        else {
            return;
        };
        if self.role() != Role::Serving {
            return;
        }
        self.rounds += 1;
        self.sending = Some(Sending {
            successor,
            round: self.rounds,
            stage: Stage::Starting,
            session: None,
            fenced: None,
            cursor: None,
            page_end: None,
            queue: VecDeque::new(),
            damaged_chunks: BTreeSet::new(),
            prepared_chunks: BTreeSet::new(),
            outstanding: 0,
            sent_chunks: 0,
            call: None,
            attempt: 0,
            wake: None,
        });
        self.sync_call(ctx);
    }

    /// Stops the sync without a result.
    pub(super) fn stop_sending(&mut self, ctx: &mut Context<'_>) {
        let Some(sending) = self.sending.take() else { return };
        if let Some(call) = sending.call {
            self.calls.remove(&call);
        }
        let error = StorageError::SyncSessionMismatch { target: sending.successor.target };
        for queue in self.queues.values_mut() {
            queue.waiting.retain(|queued| !matches!(queued.kind, OpKind::Send));
        }
        let sends: Vec<OpId> = self
            .ops
            .iter()
            .filter(|(_, op)| matches!(op.kind, OpKind::Send))
            .map(|(id, _)| *id)
            .collect();
        for op in sends {
            self.abort(ctx, op, &error);
        }
    }

    /// The session is unknown to the successor: it has restarted, or it treated an older start as a
    /// newer one.
    pub(super) fn restart_sending(&mut self, ctx: &mut Context<'_>) {
        self.stop_sending(ctx);
        self.start_sending(ctx);
    }

    /// Sends the request of the current stage.
    fn sync_call(&mut self, ctx: &mut Context<'_>) {
        let Some(sending) = &self.sending else { return };
        let successor = sending.successor;
        let to = self.address_of(successor.target);
        let session = sending.session.unwrap_or_default();
        let request = match sending.stage {
            Stage::Starting => StorageRequest::SyncStart(SyncStart {
                to,
                from: self.config.target,
                round: sending.round,
            }),
            Stage::Fencing => {
                let inodes = ctx.metas.forgotten(sending.fenced, FORGET_INODES_MAX);
                let from = Some(self.config.target);
                let version_floor = ctx.metas.version_floor();
                // No request that holds a budget waits for it.
                let hop = 1;
                StorageRequest::ForgetInodes(ForgetInodes { to, from, inodes, version_floor, hop })
            }
            Stage::Comparing => StorageRequest::SyncMetas(SyncMetas {
                to,
                session,
                after: sending.cursor,
                limit: u32::try_from(self.config.sync_page).unwrap_or(u32::MAX),
            }),
            Stage::Copying => return,
            Stage::Ending | Stage::Ended => StorageRequest::SyncDone(SyncDone { to, session }),
        };
        let call = self.call(ctx, Caller::Sync, successor, request, Bytes::new());
        if let Some(sending) = &mut self.sending {
            sending.call = Some(call);
        }
        self.wake_sync(ctx.now.after(self.config.call_timeout_ms));
    }

    fn wake_sync(&mut self, at: Millis) {
        if let Some(sending) = &mut self.sending {
            sending.wake = Some(at);
            self.timers.insert((at, Timer::Sync));
        }
    }

    pub(super) fn on_sync_timer(&mut self, ctx: &mut Context<'_>, at: Millis) {
        let Some(sending) = &mut self.sending else { return };
        if sending.wake != Some(at) {
            return;
        }
        sending.wake = None;
        if let Some(call) = sending.call.take() {
            self.calls.remove(&call);
        }
        if sending.stage == Stage::Copying {
            sending.queue.extend(std::mem::take(&mut sending.damaged_chunks));
            sending.queue.extend(std::mem::take(&mut sending.prepared_chunks));
            return self.copy_more(ctx);
        }
        self.sync_call(ctx);
    }

    pub(super) fn on_sync_answer(
        &mut self,
        ctx: &mut Context<'_>,
        call: CallId,
        result: Result<StorageReply, PeerFailure>,
    ) {
        let Some(sending) = &mut self.sending else { return };
        if sending.call != Some(call) {
            return;
        }
        (sending.call, sending.wake) = (None, None);
        match (sending.stage, result) {
            (Stage::Starting, Ok(StorageReply::SyncStarted { session, round }))
                if round == sending.round =>
            {
                sending.session = Some(session);
                sending.stage = Stage::Fencing;
                sending.attempt = 0;
                if ctx.metas.version_floor() > ChunkVersion(0) {
                    self.sync_call(ctx);
                } else {
                    self.fence_or_compare(ctx);
                }
                self.session_is_known(ctx);
            }
            (Stage::Fencing, Ok(StorageReply::InodesForgotten)) => {
                // Inodes forgotten since the page was sent were forwarded down the chain.
                let page = ctx.metas.forgotten(sending.fenced, FORGET_INODES_MAX);
                sending.fenced = page.last().map(|range| range.first).or(sending.fenced);
                sending.attempt = 0;
                self.fence_or_compare(ctx);
            }
            (Stage::Comparing, Ok(StorageReply::Metas { metas, last })) => {
                sending.attempt = 0;
                self.compare(ctx, metas, last);
            }
            (Stage::Ending | Stage::Ended, Ok(StorageReply::SyncEnded)) => {
                if sending.stage == Stage::Ending {
                    let (target, successor) = (self.config.target, sending.successor.target);
                    let sent_chunks = sending.sent_chunks;
                    ctx.out.push(Action::Alert(Alert::SyncEnded {
                        target,
                        successor,
                        sent_chunks,
                    }));
                }
                sending.stage = Stage::Ended;
                self.wake_sync(ctx.now.after(self.config.retry_wait_ms_max));
            }
            (stage, Err(PeerFailure::Refused(StorageError::SyncSessionMismatch { .. })))
                if stage != Stage::Starting =>
            {
                self.restart_sending(ctx);
            }
            _ => {
                sending.attempt = sending.attempt.saturating_add(1);
                // A refused start is not repeated with the same number: it may have been overtaken
                // by an older one that arrived late.
                if sending.stage == Stage::Starting {
                    self.rounds += 1;
                    sending.round = self.rounds;
                }
                let attempt = sending.attempt;
                self.wake_sync(ctx.now.after(self.retry_wait_ms(attempt)));
            }
        }
    }

    /// Sends the next page of forgotten inodes, or starts the comparison.
    fn fence_or_compare(&mut self, ctx: &mut Context<'_>) {
        if let Some(sending) = &mut self.sending
            && ctx.metas.forgotten(sending.fenced, 1).is_empty()
        {
            sending.stage = Stage::Comparing;
        }
        self.sync_call(ctx);
    }

    fn session_is_known(&mut self, ctx: &mut Context<'_>) {
        let waiting: Vec<OpId> = self
            .ops
            .iter()
            .filter(|(_, op)| op.step == Step::AwaitingSession)
            .map(|(id, _)| *id)
            .collect();
        for op in waiting {
            self.proceed(ctx, op);
        }
    }

    /// Merges one page of the successor's chunks with the same range of this replica.
    fn compare(&mut self, ctx: &mut Context<'_>, remote: Vec<ChunkMeta>, last: bool) {
        let Some(sending) = &mut self.sending else { return };
        let mut end = match remote.last() {
            Some(meta) if !last => meta.chunk,
            _ => ChunkId::MAX,
        };
        let limit = self.config.sync_page;
        let local = ctx.metas.metas(sending.cursor, end, limit);
        if local.len() == limit
            && let Some(meta) = local.last()
        {
            end = meta.chunk;
        }
        let mut pairs: BTreeMap<ChunkId, (Option<&ChunkMeta>, Option<&ChunkMeta>)> =
            BTreeMap::new();
        for meta in &local {
            pairs.entry(meta.chunk).or_default().0 = Some(meta);
        }
        for meta in remote.iter().filter(|meta| meta.chunk <= end) {
            pairs.entry(meta.chunk).or_default().1 = Some(meta);
        }
        let mut unlike: BTreeSet<ChunkId> = pairs
            .into_iter()
            .filter(|(_, (local, remote))| differ(*local, *remote))
            .map(|(chunk, _)| chunk)
            .collect();
        // Chunks with operations in progress may have been read, or even acknowledged, before this
        // sync: by a former tail, or in an earlier incarnation of this replica, whose commit the
        // disk has lost. So the sync waits for them: their chunks are sent after the operations
        // ahead of them.
        let first =
            sending.cursor.map_or(Bound::Unbounded, |it| Bound::Included(it.first_version()));
        let queues = self.queues.range((first, Bound::Included(end))).map(|(_, queue)| queue);
        let under_way = queues.flat_map(|queue| {
            let active = queue.active.and_then(|op| self.ops.get(&op)).map(|op| op.chunk);
            active.into_iter().chain(queue.waiting.iter().map(|queued| queued.chunk))
        });
        let cursor = sending.cursor;
        unlike.extend(under_way.filter(|it| cursor.is_none_or(|after| *it > after) && *it <= end));
        sending.queue = unlike.into_iter().collect();
        sending.page_end = (end < ChunkId::MAX).then_some(end);
        sending.stage = Stage::Copying;
        self.copy_more(ctx);
    }

    /// Keeps the window full; at the end of the page, requests the next one or ends.
    fn copy_more(&mut self, ctx: &mut Context<'_>) {
        loop {
            let Some(sending) = &mut self.sending else { return };
            if sending.stage != Stage::Copying || sending.outstanding >= self.config.sync_window {
                return;
            }
            let Some(chunk) = sending.queue.pop_front() else { break };
            sending.outstanding += 1;
            self.enqueue_send(ctx, chunk);
        }
        let Some(sending) = &mut self.sending else { return };
        if sending.outstanding > 0 {
            return;
        }
        let (damaged, prepared) = (&sending.damaged_chunks, &sending.prepared_chunks);
        if !prepared.is_empty() || !damaged.is_empty() {
            let wait_ms = if prepared.is_empty() { self.config.retry_wait_ms_max } else { 0 };
            return self.wake_sync(ctx.now.after(wait_ms.max(self.config.retry_wait_ms)));
        }
        if let Some(end) = sending.page_end {
            sending.cursor = Some(end);
            sending.stage = Stage::Comparing;
        } else {
            sending.stage = Stage::Ending;
        }
        self.sync_call(ctx);
    }

    /// A chunk of the window was sent.
    pub(super) fn chunk_sent(&mut self, ctx: &mut Context<'_>, equal: bool) {
        if let Some(sending) = &mut self.sending {
            sending.sent_chunks += u64::from(equal);
            sending.outstanding = sending.outstanding.saturating_sub(1);
        }
        self.copy_more(ctx);
    }

    fn enqueue_send(&mut self, ctx: &mut Context<'_>, chunk: ChunkId) {
        let queue = self.queues.entry(chunk.first_version()).or_default();
        queue.waiting.push_back(QueuedOp { chunk, kind: OpKind::Send, waiters: no_waiters() });
        self.run_queue(ctx, chunk);
    }

    /// A chunk has a pending update that the predecessor has not confirmed.
    fn send_later(&mut self, ctx: &Context<'_>, chunk: ChunkId) -> StartResult {
        if let Some(sending) = &mut self.sending {
            sending.prepared_chunks.insert(chunk);
            sending.outstanding = sending.outstanding.saturating_sub(1);
        }
        self.wake_sync(ctx.now.after(self.config.retry_wait_ms));
        StartResult::Done
    }

    pub(super) fn start_send(&mut self, ctx: &mut Context<'_>, chunk: ChunkId) -> StartResult {
        if self.session().is_none() || self.role() != Role::Serving {
            return StartResult::Done;
        }
        let meta = ctx.meta(chunk);
        if meta.pending.is_some() && !self.is_forgotten(ctx, chunk.inode) {
            if !self.may_resolve() {
                return self.send_later(ctx, chunk);
            }
            // Left behind by an aborted operation: it is rolled forward first.
            let queued = QueuedOp { chunk, kind: OpKind::Send, waiters: no_waiters() };
            return StartResult::Resolve(chunk, Box::new(queued));
        }
        let version = meta.committed.version;
        let pending = Some(meta.committed);
        let op = self.add_op(Op { pending, ..Op::new(chunk, OpKind::Send, version) });
        self.proceed_send(ctx, op);
        StartResult::Op(op)
    }

    pub(super) fn proceed_send(&mut self, ctx: &mut Context<'_>, op: OpId) {
        let Some(state) = self.ops.get(&op) else { return };
        let Some(content) = state.pending.clone() else { return };
        let Some(successor) = self.sending.as_ref().map(|sending| sending.successor) else {
            let error = self.not_serving();
            return self.abort(ctx, op, &error);
        };
        if content.exists() {
            let action = Action::ReadContent { op, chunk: state.chunk, which: Which::Committed };
            self.store(ctx, op, Step::Reading, action);
        } else {
            self.call_replace(ctx, op, successor, &content, Bytes::new());
        }
    }

    /// Handles the content of a chunk to be sent.
    pub(super) fn send_content(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        result: Result<(ChunkState, Bytes), StoreError>,
    ) {
        let Some(state) = self.ops.get(&op) else { return };
        let (chunk, state) = (state.chunk, state.pending.clone().unwrap_or_default());
        let Some(successor) = self.sending.as_ref().map(|sending| sending.successor) else {
            let error = self.not_serving();
            return self.abort(ctx, op, &error);
        };
        match result {
            Ok((content, payload)) => self.call_replace(ctx, op, successor, &content, payload),
            Err(error @ StoreError::Io { .. }) => self.fail(ctx, error.to_string()),
            Err(_) if self.is_forgotten(ctx, chunk.inode) => {
                self.finish(ctx, op, Ok(Updated::nothing()));
            }
            Err(_) => {
                if let Some(sending) = &mut self.sending {
                    sending.damaged_chunks.insert(chunk);
                }
                self.confirm_without_content(ctx, op, &state);
            }
        }
    }

    /// Whether `op` sends a chunk that cannot be read here.
    pub(super) fn is_damaged_send(&self, op: OpId) -> bool {
        let chunk = self.ops.get(&op).filter(|op| matches!(op.kind, OpKind::Send));
        chunk.is_some_and(|op| {
            self.sending.as_ref().is_some_and(|it| it.damaged_chunks.contains(&op.chunk))
        })
    }

    /// The successor needs the content of a chunk that cannot be read here: other chunks are sent
    /// first, and updates of this one are not blocked.
    pub(super) fn not_sent(&mut self, ctx: &mut Context<'_>, op: OpId) {
        let Some(chunk) = self.ops.get(&op).map(|op| op.chunk) else { return };
        self.finish(ctx, op, Err(self.not_serving()));
        self.repair(ctx, chunk);
    }

    /// The successor has the chunk.
    pub(super) fn sent(&mut self, ctx: &mut Context<'_>, op: OpId, reply: Updated) {
        let Some(chunk) = self.ops.get(&op).map(|op| op.chunk) else { return };
        let damaged =
            self.sending.as_mut().is_some_and(|sending| sending.damaged_chunks.remove(&chunk));
        self.finish(ctx, op, Ok(reply));
        if damaged {
            self.repair(ctx, chunk);
        }
    }
}

/// Whether the successor's copy must be replaced. Chain versions may differ: they are not content.
fn differ(local: Option<&ChunkMeta>, remote: Option<&ChunkMeta>) -> bool {
    let same = |a: &ChunkState, b: &ChunkState| {
        a.version == b.version
            && a.length == b.length
            && a.checksum == b.checksum
            && a.removed == b.removed
            && a.tags == b.tags
    };
    match (local, remote) {
        (Some(local), Some(remote)) => {
            let settled = local.pending.is_none() && remote.pending.is_none();
            !settled || !same(&local.committed, &remote.committed)
        }
        (Some(local), None) => local.pending.is_some() || local.committed.version > ChunkVersion(0),
        (None, _) => true,
    }
}
