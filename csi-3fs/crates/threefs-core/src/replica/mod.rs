//! One replica of one chain as a state machine: events in, actions out.
//!
//! The driver (the storage service, the simulator) owns time, sockets and the chunk store. For each
//! event it calls [`Replica::handle`] and executes the actions *in order*; the result of each comes
//! back as a later event. Between two calls, [`Replica::next_wakeup`] says when to send the next
//! [`Event::Tick`].
//!
//! Invariants, each of which the simulator tries to violate:
//! - One operation of a chunk at a time (see [`queue`]). All checks are made, or repeated, when the
//!   operation starts, in particular of the chain version.
//! - An update is durable here before it is forwarded, and is committed here only after it is
//!   committed on all later replicas. So every replica has everything that its successors have.
//! - A replica with a pending update of a chunk does not serve reads of that chunk.
//! - A serving replica never drops a pending update: it is rolled forward.
//! - A replica that disagrees with its predecessor stops serving, reports that in its next
//!   heartbeat and is synced. Bad data never disables a target permanently.
//!
//! Absent: threads, clocks, sockets, files, randomness; roll-back; messages from a successor to its
//! predecessor other than replies.

mod action;
mod channels;
mod check;
mod commit;
mod forget;
mod purge;
mod queue;
mod receive;
mod repair;
mod request;
mod resync;
mod update;

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

pub use check::Check;

pub use action::{Action, Alert, CallId, Event, OpId, PeerFailure, Token};

use crate::chunk::{ChunkMeta, ChunkMetas};
use crate::error::StorageError;
use crate::heartbeat::{LocalReport, LocalState};
use crate::ids::{ChainId, ChainVersion, ChunkId, Incarnation, TargetId};
use crate::message::{Address, StorageReply, StorageRequest};
use crate::routing::{Chain, ChainTarget, PublicState};
use crate::time::Millis;
use channels::Channels;
use forget::Forgetting;
use purge::Purges;
use queue::{ChunkQueue, Op};
use receive::Receiving;
use resync::Sending;

/// Limits and timeouts of a replica.
#[derive(Clone, Debug)]
pub struct Config {
    /// This target.
    pub target: TargetId,
    /// Its chain.
    pub chain: ChainId,
    /// This opening of the store; each has another number.
    pub incarnation: Incarnation,
    /// Timeout of a call to another replica, after which it is repeated.
    pub call_timeout_ms: u64,
    /// First pause before a failed call is repeated; doubles up to `retry_wait_ms_max`.
    pub retry_wait_ms: u64,
    /// Maximum pause before a failed call is repeated.
    pub retry_wait_ms_max: u64,
    /// A store operation that takes longer makes the target report itself OFFLINE: a hung disk is
    /// worse than a dead one.
    pub store_stall_ms: u64,
    /// How long a SYNCING target without space stays OFFLINE.
    pub full_wait_ms: u64,
    /// How long a removed chunk of an existing file is remembered: longer than a client retries an
    /// update.
    pub purge_after_ms: u64,
    /// Maximum number of requests that wait for one chunk.
    pub chunk_queue_max: usize,
    /// Maximum number of operations in progress.
    pub ops_max: usize,
    /// Chunks that a sync sends concurrently. Each holds one chunk in memory.
    pub sync_window: usize,
    /// Chunk metas per page of a sync.
    pub sync_page: usize,
    /// The disabled check.
    #[cfg(feature = "simulator")]
    pub without: Option<Check>,
}

impl Config {
    /// Defaults for one target of one chain.
    #[must_use]
    pub fn new(target: TargetId, chain: ChainId, incarnation: Incarnation) -> Self {
        Self {
            target,
            chain,
            incarnation,
            call_timeout_ms: 2_000,
            retry_wait_ms: 20,
            retry_wait_ms_max: 500,
            store_stall_ms: 10_000,
            full_wait_ms: 5_000,
            purge_after_ms: 60_000,
            chunk_queue_max: 64,
            ops_max: 4_096,
            sync_window: 8,
            sync_page: 256,
            #[cfg(feature = "simulator")]
            without: None,
        }
    }
}

/// State of this replica's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DataState {
    /// May lack updates.
    Online,
    /// Has everything that its chain has.
    UpToDate,
    /// The store failed: a new replica must start from the reopened store.
    Broken,
}

/// What this replica may do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Serving,
    Syncing,
    Idle(PublicState),
}

/// The state machine of one target.
pub struct Replica {
    config: Config,
    chain: Option<Chain>,
    data_state: DataState,
    // The service is shutting down: the replica never serves again.
    leaving: bool,
    serve_until: Option<Millis>,
    // While set, this target had no space for a sync and stays OFFLINE.
    full_until: Option<Millis>,
    // While set, the successor is full: updates that need space are refused early.
    successor_full_until: Option<Millis>,
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
    sending: Option<Sending>,
    rounds: u64,
    sequence: u64,
    receiving: Option<Receiving>,
    sessions: u64,
}

/// What waits for the reply to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caller {
    Op(OpId),
    Forget(OpId),
    Sync,
}

/// What is due at an instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Op(OpId),
    Forget(OpId),
    Sync,
    Purge,
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
        // Before the event, which may end the stall: a report may have said OFFLINE by now, so the
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
            Event::Applied { op, result } => self.on_applied(ctx, op, result),
            Event::Committed { op, result } => self.on_committed(ctx, op, result),
            Event::Forgotten { op, result } => self.on_forgotten(ctx, op, result),
            Event::InodesForgotten { op, result } => self.on_inodes_forgotten(ctx, op, result),
            Event::Content { op, result } => self.on_content(ctx, op, result),
            Event::DamageFound { chunk } => self.repair(ctx, chunk),
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
    }

    /// Latest time of the next [`Event::Tick`].
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Millis> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// This target's report for the next heartbeat.
    #[must_use]
    pub fn report(&self, now: Millis) -> LocalReport {
        let state = match self.data_state {
            DataState::Broken => LocalState::Offline,
            _ if self.leaving => LocalState::Offline,
            _ if self.is_full(now) || self.is_stalled(now) => LocalState::Offline,
            DataState::UpToDate => LocalState::UpToDate,
            DataState::Online => LocalState::Online,
        };
        LocalReport { state, chain_version: self.chain_version() }
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

    /// Whether this replica serves reads and updates now.
    #[must_use]
    pub fn serves(&self, now: Millis) -> bool {
        let stalled = self.is_stalled(now) && self.config.makes(Check::Stall);
        self.role() == Role::Serving && self.has_lease(now) && !stalled
    }

    fn is_full(&self, now: Millis) -> bool {
        self.full_until.is_some_and(|until| now < until)
    }

    fn is_stalled(&self, now: Millis) -> bool {
        self.store_since.values().any(|since| now.since(*since) > self.config.store_stall_ms)
    }

    fn chain_version(&self) -> ChainVersion {
        self.chain.as_ref().map_or(ChainVersion(0), |chain| chain.version)
    }

    fn role(&self) -> Role {
        let state = self.public_state();
        if self.leaving {
            return Role::Idle(state);
        }
        match (state, self.data_state) {
            (PublicState::Serving, DataState::UpToDate) => Role::Serving,
            (PublicState::Syncing, DataState::UpToDate | DataState::Online) => Role::Syncing,
            _ => Role::Idle(state),
        }
    }

    fn public_state(&self) -> PublicState {
        self.chain
            .as_ref()
            .and_then(|chain| chain.state_of(self.config.target))
            .unwrap_or(PublicState::Offline)
    }

    fn has_lease(&self, now: Millis) -> bool {
        !self.config.makes(Check::Lease) || self.serve_until.is_some_and(|until| now < until)
    }

    fn successor(&self) -> Option<ChainTarget> {
        self.chain.as_ref().and_then(|chain| chain.successor(self.config.target)).copied()
    }

    fn predecessor(&self) -> Option<ChainTarget> {
        self.chain.as_ref().and_then(|chain| chain.predecessor(self.config.target)).copied()
    }

    fn address_of(&self, target: TargetId) -> Address {
        Address { chain: self.config.chain, chain_version: self.chain_version(), target }
    }

    /// Handles a newer chain: the role may change, and with it all operations in progress.
    fn on_routing(&mut self, ctx: &mut Context<'_>, chain: Chain) {
        if chain.id != self.config.chain || chain.version <= self.chain_version() {
            return;
        }
        self.chain = Some(chain);
        self.receiving = None;
        self.successor_full_until = None;
        if self.data_state != DataState::Broken {
            match self.public_state() {
                // Only mgmtd can make a restarted target up to date: it was one of the last to
                // serve.
                PublicState::LastSrv => self.data_state = DataState::UpToDate,
                PublicState::Serving => {}
                PublicState::Syncing | PublicState::Waiting | PublicState::Offline => {
                    if self.config.makes(Check::Demotion) {
                        self.data_state = DataState::Online;
                    }
                }
            }
        }
        self.stop_sending(ctx);
        self.abort_forgets(ctx);
        self.restart_purges(ctx);
        match self.role() {
            Role::Serving => {
                self.release_received(ctx);
                self.start_sending(ctx);
                self.proceed_all(ctx);
                self.resolve_orphans(ctx);
            }
            // Also if it served until now: it may have missed versions, and operations that it
            // started are no longer its own to complete. A new sync starts from scratch.
            Role::Syncing => self.abort_all(ctx, PublicState::Syncing),
            Role::Idle(state) => self.abort_all(ctx, state),
        }
    }

    /// Stops serving: the data of this replica may be out of date.
    fn demote(&mut self, ctx: &mut Context<'_>, alert: Alert) {
        ctx.out.push(Action::Alert(alert));
        if self.data_state == DataState::UpToDate {
            self.data_state = DataState::Online;
        }
        self.receiving = None;
        self.stop_sending(ctx);
        self.abort_forgets(ctx);
        self.abort_all(ctx, self.public_state());
    }

    /// The store failed: nothing is guaranteed until it is opened again.
    fn fail(&mut self, ctx: &mut Context<'_>, reason: String) {
        ctx.out.push(Action::Alert(Alert::StoreFailed { target: self.config.target, reason }));
        self.data_state = DataState::Broken;
        self.receiving = None;
        self.stop_sending(ctx);
        self.abort_forgets(ctx);
        self.abort_all(ctx, self.public_state());
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
        if let Err(PeerFailure::Refused(StorageError::ChainVersionMismatch { mine, .. })) = &result
            && *mine > self.chain_version()
        {
            ctx.out.push(Action::RefreshRouting);
        }
        match self.calls.remove(&call) {
            Some(Caller::Op(op)) => self.on_op_answer(ctx, op, call, result, payload),
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
