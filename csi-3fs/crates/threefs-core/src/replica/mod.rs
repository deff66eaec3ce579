//! One replica of one chain as a state machine: events in, actions out.
//!
//! The driver (the storage service, the simulator) owns time, sockets and the chunk store. For
//! each event it calls [`Replica::handle`] and carries out the actions *in their order*; the
//! outcome of each comes back as a later event. Between two calls it asks
//! [`Replica::next_wakeup`] when to send the next [`Event::Tick`].
//!
//! Invariants, each of which the simulator tries to break:
//! - One update of a chunk at a time (its *lane*); all checks are made, or made again, when the
//!   lane is taken: above all the chain version.
//! - An update is durable here before it is forwarded, and is committed here only when it is
//!   committed on every later replica. So every replica has all that its successors have.
//! - A replica with a pending update of a chunk does not answer reads of that chunk.
//! - Nothing pending is ever dropped by a replica that serves: it is rolled forward.
//! - Whoever finds that it disagrees with its predecessor stops serving, says so in its next
//!   heartbeat and is synced. Data never parks a target for good.
//!
//! What is absent: threads, clocks, sockets, files, randomness; roll-back; any message from a
//! successor to its predecessor that is not an answer.

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

/// Bounds and times of a replica.
#[derive(Clone, Debug)]
pub struct Config {
    /// This target.
    pub target: TargetId,
    /// Its chain.
    pub chain: ChainId,
    /// This opening of the store: another number each time.
    pub incarnation: Incarnation,
    /// How long a call to another replica may take before it is made again.
    pub call_timeout_ms: u64,
    /// First wait before a failed call is repeated; doubles up to `retry_wait_ms_max`.
    pub retry_wait_ms: u64,
    /// Longest wait before a failed call is repeated.
    pub retry_wait_ms_max: u64,
    /// A store operation that takes longer makes the target report itself OFFLINE: a hung disk is
    /// worse than a dead one.
    pub store_stall_ms: u64,
    /// How long a SYNCING target that ran full stays away.
    pub full_wait_ms: u64,
    /// How long a removed chunk of a file that lives is remembered: longer than a client tries to
    /// update a chunk.
    pub purge_after_ms: u64,
    /// Requests that may wait for one chunk.
    pub chunk_queue_max: usize,
    /// Operations that may be under way at once.
    pub ops_max: usize,
    /// Chunks that a sync sends at once. Each holds one chunk in memory.
    pub sync_window: usize,
    /// Chunk metas per page of a sync.
    pub sync_page: usize,
    /// The check that is not made.
    #[cfg(feature = "simulator")]
    pub without: Option<Check>,
}

impl Config {
    /// The defaults, for one target of one chain.
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

/// What this replica thinks of its own data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DataState {
    /// May have missed something.
    Online,
    /// Has everything that its chain has.
    UpToDate,
    /// Its store failed: a new replica has to begin with the store opened again.
    Broken,
}

/// What this replica may do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Serving,
    Syncing,
    Idle(PublicState),
}

/// The state machine. One per target.
pub struct Replica {
    config: Config,
    chain: Option<Chain>,
    data_state: DataState,
    // The service ends on purpose; nothing makes it serve again.
    leaving: bool,
    serve_until: Option<Millis>,
    // While set, this target ran full during a sync and stays away.
    full_until: Option<Millis>,
    // While set, the successor is full: updates that need room are refused at the door.
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

/// Who waits for the answer to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caller {
    Op(OpId),
    Forget(OpId),
    Sync,
}

/// What is due when a moment comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Op(OpId),
    Forget(OpId),
    Sync,
    Purge,
}

/// What every step needs: the moment, the view of the store, the place for actions.
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
    /// A replica that has just started: it trusts nothing until mgmtd has told it its place.
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

    /// Takes one event; what has to be done about it is appended to `out`.
    pub fn handle(
        &mut self,
        now: Millis,
        event: Event,
        metas: &dyn ChunkMetas,
        out: &mut Vec<Action>,
    ) {
        let ctx = &mut Context { now, metas, out };
        // Before the event, which may end the stall: what a report may have said by now must be
        // true before anything else is done. Who says "do not use me" must not serve any more.
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

    /// When the next [`Event::Tick`] is due at the latest.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Millis> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// This target's line of the next heartbeat.
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

    /// The chain as this replica knows it.
    #[must_use]
    pub fn chain(&self) -> Option<&Chain> {
        self.chain.as_ref()
    }

    /// Nothing under way and nothing waiting.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.ops.is_empty() && self.queues.is_empty() && self.forgets.is_empty()
    }

    /// Has its store failed? Then it serves no more, whatever comes.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.data_state == DataState::Broken
    }

    /// Does this replica answer reads and take writes now?
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

    /// A newer chain: what this replica is may have changed, and with it every open operation.
    fn on_routing(&mut self, ctx: &mut Context<'_>, chain: Chain) {
        if chain.id != self.config.chain || chain.version <= self.chain_version() {
            return;
        }
        self.chain = Some(chain);
        self.receiving = None;
        self.successor_full_until = None;
        if self.data_state != DataState::Broken {
            match self.public_state() {
                // Only mgmtd's word makes a restarted target whole: it was the last to serve.
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
            // Also where it served a moment ago: the versions between may have been missed, and
            // what it began then is no longer its to end. A new sync starts from nothing.
            Role::Syncing => self.abort_all(ctx, PublicState::Syncing),
            Role::Idle(state) => self.abort_all(ctx, state),
        }
    }

    /// This replica has found that it cannot vouch for its data any more.
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

    /// The store failed: nothing can be promised until it was opened again, from the disk.
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

    /// How long to wait before attempt number `attempt` (from 1) is followed by another.
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
