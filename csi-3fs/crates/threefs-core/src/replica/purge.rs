//! Purge of removed chunks of existing files: their state is dropped, from the tail of the chain to
//! its head.
//!
//! A removed chunk keeps its version and its tags, so that a retry of an update from before the
//! removal is recognised, until all such updates have expired. The head keeps a list of the chunks
//! that it has removed, with times, and scans its store for chunks that were removed before it was
//! the head. It blocks the chunk's queue and asks its successor to purge, which asks its own; each
//! drops the chunk after its successor. So a chunk that is unknown on one replica is unknown on all
//! later ones, unless one of them is synced. New writes of a purged chunk get versions above the
//! floor of the head's store.
//!
//! A forward of an update from before the removal may be delayed until the receiver has dropped the
//! chunk. Forwards and purges carry the number of purges of their sender, and a forward with a
//! lower number than the purge of its chunk is refused.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;

use super::queue::{Op, OpKind, StartResult, Step};
use super::update::answer;
use super::{Action, Check, Context, OpId, PeerFailure, Replica, Role, Timer, Token};
use crate::chunk::ChunkMeta;
use crate::error::StorageError;
use crate::ids::{ChunkId, ChunkVersion};
use crate::message::{ForwardRequest, PurgeRequest, StorageReply, StorageRequest};
use crate::routing::PublicState;
use crate::time::Millis;

/// Removed chunks that wait to be purged; further ones are found by another scan of the store.
const DUE_MAX: usize = 1 << 18;
/// Purges in progress.
const WINDOW: usize = 32;
/// Chunks per page of a scan.
const PAGE: usize = 1_024;
/// Pause between two pages.
const PAGE_WAIT_MS: u64 = 50;
/// Remembered purges of the predecessor.
const PREDECESSOR_PURGES_MAX: usize = 1 << 12;

/// State of the purges.
#[derive(Debug, Default)]
pub(super) struct Purges {
    /// As the head: time, chunk and version of each removal, in order.
    removals: VecDeque<(Millis, ChunkId, ChunkVersion)>,
    scan: StoreScan,
    /// Whether a removed chunk did not fit into `removals`.
    has_missed: bool,
    under_way: usize,
    wake: Option<Millis>,
    /// Number of purges that this replica has sent to its successor.
    number: u64,
    /// The predecessor's last purges, under this version of the chain, by chunk and in order.
    predecessor_purges: BTreeMap<ChunkId, u64>,
    in_order: VecDeque<(u64, ChunkId)>,
    /// The number of the last purge that was evicted from `predecessor_purges`.
    forgotten_number: u64,
}

/// Position of the scan of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StoreScan {
    #[default]
    Done,
    /// The chunks after this one remain to be scanned, from this instant on.
    At(Option<ChunkId>, Millis),
}

impl Purges {
    /// Number of purges that this replica has sent to its successor.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Whether this forward was sent before the predecessor purged the chunk.
    pub(super) fn is_from_before(&self, request: &ForwardRequest) -> bool {
        request.purges
            < *self.predecessor_purges.get(&request.chunk).unwrap_or(&self.forgotten_number)
    }

    fn record(&mut self, request: &PurgeRequest) {
        let newest = self.predecessor_purges.entry(request.chunk).or_insert(0);
        *newest = request.number.max(*newest);
        self.in_order.push_back((request.number, request.chunk));
        if self.in_order.len() > PREDECESSOR_PURGES_MAX
            && let Some((number, chunk)) = self.in_order.pop_front()
        {
            self.forgotten_number = self.forgotten_number.max(number);
            if self.predecessor_purges.get(&chunk) == Some(&number) {
                self.predecessor_purges.remove(&chunk);
            }
        }
    }

    fn push(&mut self, now: Millis, chunk: ChunkId, version: ChunkVersion) {
        if self.removals.len() < DUE_MAX {
            self.removals.push_back((now, chunk, version));
        } else {
            self.has_missed = true;
        }
    }
}

impl Replica {
    fn is_head(&self) -> bool {
        let head = self.chain.as_ref().and_then(|chain| chain.head());
        self.role() == Role::Serving && head.is_some_and(|it| it.target == self.config.target)
    }

    /// After a change of the chain: this replica may be the head, or have another predecessor.
    pub(super) fn restart_purges(&mut self, ctx: &mut Context<'_>) {
        let (number, under_way) = (self.purges.number, self.purges.under_way);
        if let Some(at) = self.purges.wake.take() {
            self.timers.remove(&(at, Timer::Purge));
        }
        self.purges = Purges { number, under_way, ..Purges::default() };
        if self.is_head() {
            self.purges.scan = StoreScan::At(None, ctx.now);
            self.schedule_purges(ctx.now);
        }
    }

    /// Records the removal of a chunk on the head.
    pub(super) fn purge_later(
        &mut self,
        ctx: &mut Context<'_>,
        chunk: ChunkId,
        version: ChunkVersion,
    ) {
        if self.is_head() {
            self.purges.push(ctx.now, chunk, version);
            self.schedule_purges(ctx.now);
        }
    }

    /// After the end of version `chunk`: the next one may be a removed one that hides no older
    /// version any more.
    pub(super) fn purge_next(&mut self, ctx: &mut Context<'_>, chunk: ChunkId) {
        let next = ctx.metas.metas(Some(chunk), chunk.last_version(), 1).pop();
        let is_oldest = |next: &ChunkMeta| ctx.version_before(next.chunk).is_none();
        if let Some(next) = next.filter(|next| next.committed.removed && is_oldest(next)) {
            self.purge_later(ctx, next.chunk, next.committed.version);
        }
    }

    fn purge_wait_ms(&self) -> u64 {
        if self.config.makes(Check::PurgeAge) { self.config.purge_after_ms } else { 0 }
    }

    /// Sets the timer to the next due time.
    fn schedule_purges(&mut self, now: Millis) {
        let wait_ms = self.purge_wait_ms();
        let purges = &mut self.purges;
        let oldest = purges.removals.front().filter(|_| purges.under_way < WINDOW);
        let oldest = oldest.map(|(since, ..)| since.after(wait_ms));
        let page = match purges.scan {
            StoreScan::At(_, at) if purges.removals.len() + PAGE <= DUE_MAX => Some(at),
            _ => None,
        };
        let next = oldest.into_iter().chain(page).min().map(|at| at.max(now));
        if next == purges.wake {
            return;
        }
        if let Some(before) = std::mem::replace(&mut purges.wake, next) {
            self.timers.remove(&(before, Timer::Purge));
        }
        self.timers.extend(next.map(|at| (at, Timer::Purge)));
    }

    pub(super) fn on_purge_timer(&mut self, ctx: &mut Context<'_>, at: Millis) {
        if self.purges.wake != Some(at) {
            return;
        }
        self.purges.wake = None;
        if !self.is_head() {
            return;
        }
        self.scan_for_removed(ctx);
        self.purge_due(ctx);
        let now = ctx.now;
        self.schedule_purges(now.after(1));
    }

    /// Scans the next page of the store, if it is due and there is room.
    fn scan_for_removed(&mut self, ctx: &Context<'_>) {
        let purges = &mut self.purges;
        if purges.has_missed
            && purges.scan == StoreScan::Done
            && purges.removals.len() < DUE_MAX / 2
        {
            (purges.has_missed, purges.scan) = (false, StoreScan::At(None, ctx.now));
        }
        let StoreScan::At(after, at) = purges.scan else { return };
        if at > ctx.now || purges.removals.len() + PAGE > DUE_MAX {
            return;
        }
        let page = ctx.metas.metas(after, ChunkId::MAX, PAGE);
        for meta in page.iter().filter(|meta| meta.committed.removed && meta.pending.is_none()) {
            purges.push(ctx.now, meta.chunk, meta.committed.version);
        }
        purges.scan = match page.last() {
            Some(last) if page.len() == PAGE => {
                StoreScan::At(Some(last.chunk), ctx.now.after(PAGE_WAIT_MS))
            }
            _ => StoreScan::Done,
        };
    }

    fn purge_due(&mut self, ctx: &mut Context<'_>) {
        let wait_ms = self.purge_wait_ms();
        let syncs = self.successor().is_some_and(|next| next.state == PublicState::Syncing);
        for _ in 0..self.purges.removals.len() {
            let Some(&(since, chunk, version)) = self.purges.removals.front() else { return };
            if since.after(wait_ms) > ctx.now || self.purges.under_way >= WINDOW {
                return;
            }
            self.purges.removals.pop_front();
            if syncs || self.queues.contains_key(&chunk.first_version()) || !self.has_lease(ctx.now)
            {
                self.purges.push(ctx.now, chunk, version);
            } else {
                self.enqueue(ctx, chunk, OpKind::Purge { version, request: None }, None);
            }
        }
    }

    /// Starts a purge, with the queue of the chunk blocked.
    pub(super) fn start_purge(
        &mut self,
        ctx: &mut Context<'_>,
        chunk: ChunkId,
        version: ChunkVersion,
        request: Option<PurgeRequest>,
        waiters: VecDeque<Token>,
    ) -> StartResult {
        if let Some(request) = &request {
            if let Err(error) = self.check_sender(request.to, request.from, Role::Serving) {
                return answer(ctx, waiters, Err(error));
            }
            self.purges.record(request);
        } else if !self.is_head() {
            return StartResult::Done;
        }
        let meta = ctx.meta(chunk);
        let is_removed = !meta.committed.exists() && meta.committed.version <= version;
        // An older version would reappear.
        let is_oldest = ctx.version_before(chunk).is_none();
        let may = is_removed && (is_oldest || !self.config.makes(Check::PurgeOldest));
        if meta.pending.is_some() || !may || self.is_forgotten(ctx, chunk.inode) {
            return answer(ctx, waiters, Err(StorageError::ChunkConflict { chunk, version }));
        }
        let successor = self.successor();
        if successor.is_some_and(|next| next.state == PublicState::Syncing) {
            return answer(ctx, waiters, Err(self.busy()));
        }
        self.purges.under_way += usize::from(request.is_none());
        let kind = OpKind::Purge { version, request };
        let op = self.add_op(Op { waiters, ..Op::new(chunk, kind, version) });
        let Some(next) = successor.filter(|_| self.config.makes(Check::PurgeDownChain)) else {
            self.store(ctx, op, Step::Forgetting, Action::Purge { op, chunk, version });
            return StartResult::Op(op);
        };
        self.purges.number += 1;
        let request = PurgeRequest {
            to: self.address_of(next.target),
            from: self.config.target,
            chunk,
            version,
            number: self.purges.number,
            hop: self.next_hop(op),
        };
        self.op_call(ctx, op, next, StorageRequest::Purge(request), Bytes::new());
        StartResult::Op(op)
    }

    pub(super) fn on_purge_answer(
        &mut self,
        ctx: &mut Context<'_>,
        op: OpId,
        result: Result<StorageReply, PeerFailure>,
    ) {
        let Some(state) = self.ops.get(&op) else { return };
        let (chunk, version) = (state.chunk, state.version);
        match result {
            Ok(StorageReply::Updated(done)) if done.version == version => {
                self.store(ctx, op, Step::Forgetting, Action::Purge { op, chunk, version });
            }
            _ => self.finish(ctx, op, Err(self.busy())),
        }
    }

    /// Ends a purge that this replica started.
    pub(super) fn purge_ended(
        &mut self,
        ctx: &mut Context<'_>,
        chunk: ChunkId,
        version: ChunkVersion,
        purged: bool,
    ) {
        self.purges.under_way = self.purges.under_way.saturating_sub(1);
        if !self.is_head() {
            return;
        }
        if purged {
            self.purge_next(ctx, chunk);
        } else {
            self.purges.push(ctx.now, chunk, version);
        }
        self.schedule_purges(ctx.now);
    }
}
