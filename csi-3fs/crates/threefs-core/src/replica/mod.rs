//! One replica of one chain as a state machine: events in, actions out.
//!
//! The driver (the storage service, the simulator) owns time, sockets and the chunk store. For each
//! event it calls [`Replica::handle`] and executes the actions *in order*; the result of each comes
//! back as a later event. Between two calls, [`Replica::next_wakeup`] says when to send the next
//! [`Event::Tick`].
//!
//! An update passes from here through `queue` (one operation of a chunk at a time), `update` (checks;
//! apply) and `commit` (forward; commit; reply).
//!
//! Invariants, each of which the simulator tries to violate:
//! - One operation of a chunk at a time, whatever its version (see [`queue`]). All checks are made, or repeated, when the
//!   operation starts, in particular of the chain version.
//! - An update is durable here before it is forwarded or confirmed, and is committed here only after it
//!   is committed on all later replicas. So every replica has everything that its successors have
//!   confirmed or committed. A prepared update, which the successor may have before (see [`prepare`]), is
//!   neither until then.
//! - A replica with a pending update of a chunk does not serve reads of that chunk.
//! - A serving replica never drops a pending update: the head rolls it forward, the others wait for the
//!   head. The head keeps an update that its successor may have.
//! - An update of an epoch that has ended is not started, and a replica confirms a fence only once it
//!   has no operation and no pending state from before it.
//! - Only the newest version of a chunk is updated, and it is never dropped. A later version starts when all updates of the
//!   one before it are resolved, and continues its version numbers and tags.
//! - A replica that disagrees with its predecessor stops serving, reports that in its next
//!   heartbeat and is synced. Bad data never disables a target permanently.
//!
//! Absent: threads, clocks, sockets, files, randomness; roll-back; messages from a successor to its
//! predecessor other than replies.

mod action;
mod channels;
mod commit;
mod config;
mod epochs;
mod fences;
mod forget;
mod prepare;
mod purge;
mod queries;
mod queue;
mod receive;
mod repair;
mod resync;
mod role;
mod update;
mod versions;

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

pub use action::{Action, Alert, CallId, Event, OpId, PeerFailure, PlannedRead, Prepare, Token};
pub use config::{Check, Config};

use crate::chunk::{ChunkMeta, ChunkMetas};
use crate::error::StorageError;
use crate::ids::ChunkId;
use crate::message::{ReadRequest, StorageReply, StorageRequest};
use crate::routing::{Chain, ChainTarget};
use crate::time::Millis;
use channels::Channels;
use fences::Fencing;
use forget::Forgetting;
use prepare::Prepared;
use purge::Purges;
use queue::{ChunkQueue, Op, OpKind};
use receive::Receiving;
use resync::Sending;
use role::{DataState, Role};
use versions::Drops;

/// The state machine of one target.
pub struct Replica {
    config: Config,
    chain: Option<Chain>,
    data_state: DataState,
    // Its disk or its service ends: the replica never serves again.
    leaving: bool,
    serve_until: Option<Millis>,
    // While set, this target had no space for a sync and stays OFFLINE.
    full_until: Option<Millis>,
    // While set, the successor is full: updates that need space are refused early.
    successor_full_until: Option<Millis>,
    // By the first version of each chunk: its versions share a queue.
    queues: BTreeMap<ChunkId, ChunkQueue>,
    ops: BTreeMap<OpId, Op>,
    next_op: u64,
    calls: BTreeMap<CallId, Caller>,
    next_call: u64,
    timers: BTreeSet<(Millis, Timer)>,
    store_since: BTreeMap<OpId, Millis>,
    channels: Channels,
    forgets: BTreeMap<OpId, Forgetting>,
    purges: Purges,
    drops: Drops,
    fencing: Fencing,
    prepared: BTreeMap<ChunkId, Prepared>,
    // Updates that the successor may have, but that could not be applied here.
    lacking: BTreeMap<ChunkId, StorageError>,
    // While set, updates are not sent to the successor before they are durable here.
    prepare_from: Option<Millis>,
    sending: Option<Sending>,
    rounds: u64,
    sequence: u64,
    receiving: Option<Receiving>,
    sessions: u64,
}

/// Receiver of the reply to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caller {
    Op(OpId),
    Prepare(ChunkId),
    Forget(OpId),
    Sync,
}

/// Action that a timer starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Op(OpId),
    Forget(OpId),
    Sync,
    Purge,
    Drop,
}

/// Inputs of a step: the time, the view of the store, and the list of actions.
struct Context<'a> {
    now: Millis,
    metas: &'a dyn ChunkMetas,
    out: &'a mut Vec<Action>,
}

impl Context<'_> {
    fn meta(&self, chunk: ChunkId) -> ChunkMeta {
        self.metas.meta(chunk).unwrap_or_else(|| ChunkMeta::absent(chunk))
    }

    /// The newest version of this chunk, whatever its epoch.
    fn newest_version(&self, chunk: ChunkId) -> ChunkMeta {
        self.metas.version_up_to(chunk.last_version()).unwrap_or_else(|| ChunkMeta::absent(chunk))
    }

    /// The newest version of this chunk from before the epoch of `chunk`.
    fn version_before(&self, chunk: ChunkId) -> Option<ChunkMeta> {
        let epoch = chunk.epoch.before()?;
        self.metas.version_up_to(chunk.in_epoch(epoch))
    }

    fn reply(&mut self, token: Token, result: Result<StorageReply, StorageError>) {
        self.out.push(Action::Reply { token, result });
    }
}

impl Replica {
    /// A replica that has just started: it serves only after mgmtd has published its state.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            chain: None,
            data_state: DataState::Online,
            leaving: false,
            serve_until: None,
            full_until: None,
            successor_full_until: None,
            queues: BTreeMap::new(),
            ops: BTreeMap::new(),
            next_op: 0,
            calls: BTreeMap::new(),
            next_call: 0,
            timers: BTreeSet::new(),
            store_since: BTreeMap::new(),
            channels: Channels::default(),
            forgets: BTreeMap::new(),
            purges: Purges::default(),
            drops: Drops::default(),
            fencing: Fencing::default(),
            prepared: BTreeMap::new(),
            lacking: BTreeMap::new(),
            prepare_from: None,
            sending: None,
            rounds: 0,
            sequence: 0,
            receiving: None,
            sessions: 0,
        }
    }

    /// Handles one event; appends the resulting actions to `out`.
    pub fn handle(
        &mut self,
        now: Millis,
        event: Event,
        metas: &dyn ChunkMetas,
        out: &mut Vec<Action>,
    ) {
        let ctx = &mut Context { now, metas, out };
        // Before the event, which may end the stall: OFFLINE may have been reported by now, so the
        // replica must stop serving before anything else.
        let stalled = self.is_stalled(now) && self.config.makes(Check::Stall);
        if self.data_state == DataState::UpToDate && stalled {
            self.demote(ctx, Alert::StoreStalled { target: self.config.target });
        }
        match event {
            Event::Routing(chain) => self.on_routing(ctx, chain),
            Event::Lease { valid_until } => {
                self.serve_until = self.serve_until.max(Some(valid_until));
            }
            Event::Request { token, request, payload, expires } => {
                self.on_request(ctx, token, request, payload, expires);
            }
            Event::Answer { call, result, payload } => self.on_answer(ctx, call, result, payload),
            Event::RoomAwaited { op } => {
                self.store_since.remove(&op);
            }
            Event::RoomGiven { op } => self.room_given(ctx, op),
            Event::Applied { op, result, unsent } => self.on_applied(ctx, op, result, unsent),
            Event::Committed { op, result } => self.on_committed(ctx, op, result),
            Event::Forgotten { op, result } => self.on_forgotten(ctx, op, result),
            Event::InodesForgotten { op, result } => self.on_inodes_forgotten(ctx, op, result),
            Event::Content { op, result } => self.on_content(ctx, op, result),
            Event::DamageFound { chunk } => self.repair(ctx, chunk),
            Event::Differs { difference, chain_version } => {
                self.differs(ctx, &difference, chain_version);
            }
            Event::Fences(fences) => self.on_fences(ctx, fences),
            Event::Failed { reason } => self.fail(ctx, reason),
            Event::Retire if self.data_state == DataState::UpToDate => {
                self.demote(ctx, Alert::Retired { target: self.config.target });
            }
            Event::Leave if !self.leaving => {
                self.leaving = true;
                self.demote(ctx, Alert::Left { target: self.config.target });
            }
            Event::Retire | Event::Leave | Event::Tick => {}
        }
        self.run_timers(ctx);
        self.drain(ctx);
    }

    /// Latest time of the next [`Event::Tick`].
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Millis> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// The newest chain that this replica has.
    #[must_use]
    pub fn chain(&self) -> Option<&Chain> {
        self.chain.as_ref()
    }

    /// Whether no operation is in progress or waiting.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.ops.is_empty() && self.queues.is_empty() && self.forgets.is_empty()
    }

    /// Whether the store has failed. Such a replica never serves again.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.data_state == DataState::Broken
    }

    /// Answers a request, refuses it, or queues the requested change.
    fn on_request(
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
        let result = match request {
            StorageRequest::Update(_)
            | StorageRequest::UpdateAt(..)
            | StorageRequest::UpdateIf(..) => self.check_head(ctx, to).map(|()| {
                if let Some((&request, conditions)) = request.update() {
                    let chunk = request.chunk;
                    let kind = OpKind::Update { request, conditions, payload, expires };
                    self.enqueue(ctx, chunk, kind, Some(token));
                }
            }),
            StorageRequest::Forward(request) => {
                self.check_sender(request.to, request.from, Role::Serving).map(|()| {
                    let chunk = request.chunk;
                    self.enqueue(ctx, chunk, OpKind::Forward { request, payload }, Some(token));
                })
            }
            StorageRequest::Prepare(request) => {
                self.check_sender(request.to, request.from, Role::Serving).map(|()| {
                    let chunk = request.chunk;
                    self.enqueue(ctx, chunk, OpKind::Prepare { request, payload }, Some(token));
                })
            }
            StorageRequest::Confirm(request) => {
                self.check_sender(request.to, request.from, Role::Serving).map(|()| {
                    self.enqueue(ctx, request.chunk, OpKind::Confirm { request }, Some(token));
                })
            }
            StorageRequest::Replace(request) => {
                self.check_sender(request.to, request.from, Role::Syncing).map(|()| {
                    let chunk = request.chunk;
                    self.enqueue(ctx, chunk, OpKind::Receive { request, payload }, Some(token));
                })
            }
            StorageRequest::Purge(request) => {
                self.check_sender(request.to, request.from, Role::Serving).map(|()| {
                    let (chunk, version) = (request.chunk, request.version);
                    let kind = OpKind::Purge { version, request: Some(request) };
                    self.enqueue(ctx, chunk, kind, Some(token));
                })
            }
            StorageRequest::Read(request) => {
                let chunk = request.chunk.last_version();
                self.read(ctx, token, ReadRequest { chunk, ..request })
            }
            StorageRequest::ReadUpTo(request) => self.read_snapshot(ctx, token, request),
            StorageRequest::ReadMany(request) => self.read_many(ctx, token, &request),
            StorageRequest::Repair(request) => self.serve_repair(ctx, token, request),
            StorageRequest::SyncStart(request) => self.sync_start(ctx, token, request),
            StorageRequest::SyncMetas(request) => self.sync_metas(ctx, token, request),
            StorageRequest::SyncDone(request) => self.sync_done(ctx, token, request),
            StorageRequest::ForgetInodes(request) => self.forget_inodes(ctx, token, request),
            StorageRequest::QueryChunks(request) => self.query_chunks(ctx, token, request, false),
            StorageRequest::QueryVersions(request) => self.query_chunks(ctx, token, request, true),
            StorageRequest::QueryLastChunk(request) => self.query_last_chunk(ctx, token, request),
            StorageRequest::QueryStates(to, request) => self.query_states(ctx, token, to, request),
            StorageRequest::Scrub(..) => Err(StorageError::InvalidRequest {
                reason: "a scrub is a request to the service".into(),
            }),
        };
        if let Err(error) = result {
            ctx.reply(token, Err(error));
        }
    }

    fn call(
        &mut self,
        ctx: &mut Context<'_>,
        caller: Caller,
        to: ChainTarget,
        request: StorageRequest,
        payload: Bytes,
    ) -> CallId {
        self.next_call += 1;
        let call = CallId(self.next_call);
        self.calls.insert(call, caller);
        let timeout_ms = self.config.call_timeout_ms;
        ctx.out.push(Action::Call { call, node: to.node, request, payload, timeout_ms });
        call
    }

    fn on_answer(
        &mut self,
        ctx: &mut Context<'_>,
        call: CallId,
        result: Result<StorageReply, PeerFailure>,
        payload: Bytes,
    ) {
        if let Err(PeerFailure::Refused(StorageError::ChainVersionMismatch {
            replica_version, ..
        })) = &result
            && *replica_version > self.chain_version()
        {
            ctx.out.push(Action::RefreshRouting);
        }
        match self.calls.remove(&call) {
            Some(Caller::Op(op)) => self.on_op_answer(ctx, op, call, result, payload),
            Some(Caller::Prepare(chunk)) => self.on_prepare_answer(ctx, chunk, call, &result),
            Some(Caller::Forget(op)) => self.on_forget_answer(ctx, op, result),
            Some(Caller::Sync) => self.on_sync_answer(ctx, call, result),
            None => {} // A late answer to a call that was given up.
        }
    }

    fn run_timers(&mut self, ctx: &mut Context<'_>) {
        while let Some(&(at, timer)) = self.timers.first() {
            if at > ctx.now {
                break;
            }
            self.timers.pop_first();
            match timer {
                Timer::Op(op) => self.on_op_timer(ctx, op, at),
                Timer::Forget(op) => self.on_forget_timer(ctx, op),
                Timer::Sync => self.on_sync_timer(ctx, at),
                Timer::Purge => self.on_purge_timer(ctx, at),
                Timer::Drop => self.on_drop_timer(ctx, at),
            }
        }
    }

    /// Pause after attempt number `attempt` (from 1).
    fn retry_wait_ms(&self, attempt: u32) -> u64 {
        let factor = 1_u64 << attempt.saturating_sub(1).min(16);
        self.config.retry_wait_ms.saturating_mul(factor).min(self.config.retry_wait_ms_max)
    }
}

#[cfg(test)]
#[path = "../admission_test.rs"]
mod admission_tests;
#[cfg(test)]
#[path = "../replica_test.rs"]
mod tests;
