//! One storage node: a replica, its store, its lease, its clock. This is the driver that the
//! storage service has its own version of.

use std::collections::BTreeMap;

use bytes::Bytes;
use rand::Rng;
use threefs_core::checksum::Checksum;
use threefs_core::chunk::{ChunkState, StoreUpdate, TagWindow, Which};
use threefs_core::error::{StorageError, StoreError};
use threefs_core::heartbeat::{Heartbeat, LocalState, ServingLease, TargetReport};
use threefs_core::ids::{ChunkId, Incarnation, NodeId, RequestTag, TargetId};
use threefs_core::message::{
    Content, ReadDone, ReadRequest, RepairRequest, StorageReply, StorageRequest, Updated,
    verify_payload,
};
use threefs_core::replica::{Action, CallId, Config, Event, OpId, PeerFailure, Replica, Token};
use threefs_core::routing::{PublicState, RoutingInfo};
use threefs_core::time::Millis;

use crate::mutant::Mutant;
use crate::store::{Store, Version};
use crate::world::{CHAIN, Happening, Packet, Violation, World};

const HEARTBEAT_US: u64 = 12_000;

/// See the module.
pub struct Node {
    /// Its target.
    pub target: TargetId,
    /// Which life it is in; grows with each restart.
    pub life: u64,
    /// Running (possibly stopped), or dead.
    pub alive: bool,
    /// Stopped: what happens to it waits here.
    pub paused: bool,
    pub(crate) backlog: Vec<Happening>,
    /// What it has on disk.
    pub store: Store,
    /// The product's state machine.
    pub replica: Replica,
    lease: ServingLease,
    routing_version: threefs_core::ids::RoutingVersion,
    sequence: u64,
    tokens: BTreeMap<Token, (usize, u64, u64)>,
    next_token: u64,
    wake_at: Option<u64>,
    /// The disk answers nothing before this moment.
    pub disk_hangs_until: u64,
    /// The disk is full.
    pub full: bool,
    clock_offset: u64,
    clock_rate: f64,
    /// How often it asks for routing.
    poll_us: u64,
    // For mutants: who asked for which update.
    update_tokens: BTreeMap<RequestTag, Token>,
}

/// Work of a disk, done when its time comes.
#[derive(Clone, Debug)]
pub(crate) enum Job {
    Apply { op: OpId, update: StoreUpdate, payload: Bytes, begun: Option<ChunkState> },
    Commit { op: OpId, result: Result<ChunkState, StoreError> },
    Forgotten { op: OpId },
    Content { op: OpId, chunk: ChunkId, which: Which },
    Read { token: Token, request: ReadRequest, chain_version: threefs_core::ids::ChainVersion },
    Repair { token: Token, request: RepairRequest, which: Which },
}

impl Node {
    pub(crate) fn new(target: TargetId, clock_offset: u64, clock_rate: f64, poll_us: u64) -> Self {
        Self {
            target,
            life: 1,
            alive: true,
            paused: false,
            backlog: Vec::new(),
            store: Store::default(),
            replica: replica(target, 1),
            lease: ServingLease::default(),
            routing_version: threefs_core::ids::RoutingVersion(0),
            sequence: 0,
            tokens: BTreeMap::new(),
            next_token: 0,
            wake_at: None,
            disk_hangs_until: 0,
            full: false,
            clock_offset,
            clock_rate,
            poll_us,
            update_tokens: BTreeMap::new(),
        }
    }

    /// This node's monotonic clock.
    #[must_use]
    pub fn clock(&self, now_us: u64) -> Millis {
        Millis(self.clock_offset + (now_us as f64 * self.clock_rate / 1_000.0) as u64)
    }

    fn moment_of(&self, local: Millis) -> u64 {
        let since = local.0.saturating_sub(self.clock_offset) as f64;
        (since * 1_000.0 / self.clock_rate) as u64 + 1
    }

    /// What a replica without version checks makes of a request: it fits whatever it is.
    fn skip_version_check(&self, request: &mut StorageRequest) {
        let Some(chain) = self.replica.chain() else { return };
        match request {
            StorageRequest::Update(update) => update.to.chain_version = chain.version,
            StorageRequest::Forward(forward) => {
                forward.to.chain_version = chain.version;
                if let Some(predecessor) = chain.predecessor(self.target) {
                    forward.from = predecessor.target;
                }
                let known = self.store.slots().get(&forward.chunk);
                let version = known.map(|slot| slot.committed.state.version);
                forward.version = version.unwrap_or_default().next();
            }
            _ => {}
        }
    }

    /// The process is gone; what was not flushed survives in part.
    pub(crate) fn crash(&mut self, kept: impl FnOnce(usize) -> usize) {
        self.alive = false;
        self.paused = false;
        self.backlog.clear();
        self.life += 1;
        self.store.crash(kept);
    }

    /// A new process over the same disk.
    pub(crate) fn restart(&mut self) {
        self.alive = true;
        self.replica = replica(self.target, self.life);
        self.lease = ServingLease::default();
        self.routing_version = threefs_core::ids::RoutingVersion(0);
        self.sequence = 0;
        self.tokens.clear();
        self.update_tokens.clear();
        self.wake_at = None;
    }
}

fn replica(target: TargetId, life: u64) -> Replica {
    let mut config = Config::new(target, CHAIN, Incarnation(life));
    config.call_timeout_ms = 15;
    config.retry_wait_ms = 2;
    config.retry_wait_ms_max = 20;
    config.store_stall_ms = 60;
    config.full_wait_ms = 30;
    config.sync_window = 2;
    config.sync_page = 2;
    Replica::new(config)
}

impl World {
    /// First events of a node's life.
    pub(crate) fn node_starts(&mut self, node: usize) {
        let life = self.nodes[node].life;
        let spread = self.rng.random_range(0..3_000);
        self.push(spread, Happening::Beat { node, life });
        self.push(spread, Happening::Poll { node, life });
    }

    pub(crate) fn beat(&mut self, node: usize, life: u64) {
        let state = &mut self.nodes[node];
        let now = state.clock(self.now);
        state.sequence += 1;
        let mut report = state.replica.report(now);
        let public = state.replica.chain().and_then(|chain| chain.state_of(state.target));
        let lies = match self.mutant {
            Mutant::ClaimSynced => public == Some(PublicState::Syncing),
            Mutant::TrustRestart => public == Some(PublicState::Serving),
            _ => false,
        };
        if lies && report.state == LocalState::Online {
            report.state = LocalState::UpToDate;
        }
        let heartbeat = Heartbeat {
            node: NodeId(node as u32),
            address: String::new(),
            incarnation: Incarnation(life),
            sequence: state.sequence,
            targets: vec![TargetReport {
                target: state.target,
                chain: CHAIN,
                report,
                used_bytes: 0,
                capacity_bytes: 0,
            }],
        };
        let packet = Packet::Heartbeat { heartbeat: Box::new(heartbeat), sent_at: now, life };
        self.send(node, self.manager_endpoint(), packet);
        self.push(HEARTBEAT_US, Happening::Beat { node, life });
    }

    pub(crate) fn poll(&mut self, node: usize, life: u64) {
        self.send(node, self.manager_endpoint(), Packet::AskRouting { life });
        self.push(self.nodes[node].poll_us, Happening::Poll { node, life });
    }

    pub(crate) fn node_receives(
        &mut self,
        node: usize,
        from: usize,
        packet: Packet,
    ) -> Result<(), Violation> {
        match packet {
            Packet::Request { rpc, life, request, payload, expires } => {
                let expires = self.taken(node, expires);
                self.node_asked(node, (from, rpc, life), *request, payload, expires)
            }
            Packet::Response { rpc, life, result, payload } => {
                if life != self.nodes[node].life {
                    return Ok(());
                }
                let result = (*result).map_err(PeerFailure::Refused);
                self.give(node, Event::Answer { call: CallId(rpc), result, payload })
            }
            Packet::HeartbeatReply { reply, sent_at, life } => {
                if life != self.nodes[node].life {
                    return Ok(());
                }
                self.nodes[node].lease.heartbeat_answered(sent_at, reply);
                if self.nodes[node].lease.routing_needed().is_some() {
                    self.send(node, self.manager_endpoint(), Packet::AskRouting { life });
                }
                self.give_lease(node)
            }
            Packet::Routing { routing, life } if life == self.nodes[node].life => {
                self.give_routing(node, &routing)
            }
            _ => Ok(()),
        }
    }

    fn give_routing(&mut self, node: usize, routing: &RoutingInfo) -> Result<(), Violation> {
        if routing.version <= self.nodes[node].routing_version {
            return Ok(());
        }
        self.nodes[node].routing_version = routing.version;
        if let Some(chain) = routing.chain(CHAIN) {
            self.give(node, Event::Routing(chain.clone()))?;
            if routing.retires(chain, self.nodes[node].target) {
                self.give(node, Event::Retire)?;
            }
        }
        self.nodes[node].lease.routing_known(routing.version);
        self.give_lease(node)
    }

    fn give_lease(&mut self, node: usize) -> Result<(), Violation> {
        let valid_until = match self.mutant {
            Mutant::IgnoreLease => Some(Millis(u64::MAX)),
            _ => self.nodes[node].lease.valid_until(),
        };
        match valid_until {
            Some(valid_until) => self.give(node, Event::Lease { valid_until }),
            None => Ok(()),
        }
    }

    fn node_asked(
        &mut self,
        node: usize,
        origin: (usize, u64, u64),
        mut request: StorageRequest,
        payload: Bytes,
        expires: Option<Millis>,
    ) -> Result<(), Violation> {
        let state = &mut self.nodes[node];
        state.next_token += 1;
        let token = Token(state.next_token);
        state.tokens.insert(token, origin);
        if let Err(error) = verify_payload(&request, &payload) {
            return self.act(node, vec![Action::Reply { token, result: Err(error) }]);
        }
        match (&mut request, self.mutant) {
            (request, Mutant::SkipVersionCheck) => state.skip_version_check(request),
            (StorageRequest::Update(update), Mutant::AcknowledgeBeforeTail) => {
                state.update_tokens.insert(update.tag, token);
            }
            (StorageRequest::Read(read), Mutant::ReadPending) => {
                if state.replica.serves(state.clock(self.now))
                    && let Ok(version) = state.store.read(read.chunk, Which::Newest)
                    && version.state.exists()
                {
                    let chain_version = read.to.chain_version;
                    let (result, payload) = read_reply(read, version, chain_version);
                    self.reply(node, token, result, payload);
                    return Ok(());
                }
            }
            _ => {}
        }
        self.give(node, Event::Request { token, request, payload, expires })
    }

    /// Hands an event to the replica and carries out what it says.
    pub(crate) fn give(&mut self, node: usize, event: Event) -> Result<(), Violation> {
        let state = &mut self.nodes[node];
        let now = state.clock(self.now);
        let mut actions = Vec::new();
        state.replica.handle(now, event, &state.store, &mut actions);
        self.act(node, actions)?;
        let state = &mut self.nodes[node];
        if let Some(wake) = state.replica.next_wakeup() {
            let at = state.moment_of(wake).max(self.now + 1);
            if state.wake_at.is_none_or(|before| at < before || before <= self.now) {
                state.wake_at = Some(at);
                let life = state.life;
                self.push(at - self.now, Happening::Wake { node, life });
            }
        }
        Ok(())
    }

    pub(crate) fn node_wakes(&mut self, node: usize) -> Result<(), Violation> {
        self.nodes[node].wake_at = None;
        self.give(node, Event::Tick)
    }

    fn act(&mut self, node: usize, actions: Vec<Action>) -> Result<(), Violation> {
        for action in actions {
            match action {
                Action::Apply { op, update, payload } => {
                    self.check_right(node, &update)?;
                    self.begin_apply(node, op, update, payload)
                }
                Action::Commit { op, chunk, version, chain_version } => {
                    let result = self.nodes[node].store.commit(chunk, version, chain_version);
                    self.observe_commit(node, chunk)?;
                    self.disk(node, 0..300, Job::Commit { op, result });
                }
                Action::Forget { op, chunk } => {
                    self.nodes[node].store.forget(chunk);
                    self.disk(node, 0..300, Job::Forgotten { op });
                }
                Action::ReadContent { op, chunk, which } => {
                    self.disk(node, 50..1_000, Job::Content { op, chunk, which });
                }
                Action::ServeRead { token, request, chain_version } => {
                    self.disk(node, 50..1_000, Job::Read { token, request, chain_version });
                }
                Action::ServeRepair { token, request, which } => {
                    self.disk(node, 50..1_000, Job::Repair { token, request, which });
                }
                Action::Call { call, node: to, request, payload, .. } => {
                    self.call(node, call, to, request, payload);
                }
                Action::Reply { token, result } => self.reply(node, token, result, Bytes::new()),
                Action::RefreshRouting => {
                    let life = self.nodes[node].life;
                    self.send(node, self.manager_endpoint(), Packet::AskRouting { life });
                }
                Action::Alert(alert) => self.note(|| format!("node {node}: {alert}")),
            }
        }
        Ok(())
    }

    fn call(
        &mut self,
        node: usize,
        call: CallId,
        to: NodeId,
        request: StorageRequest,
        payload: Bytes,
    ) {
        let life = self.nodes[node].life;
        if let (Mutant::CommitBeforeReply, StorageRequest::Forward(forward)) =
            (self.mutant, &request)
        {
            let done = Updated {
                version: forward.version,
                length: 0,
                checksum: forward.chunk_checksum,
                chain_version: forward.to.chain_version,
            };
            let packet =
                Packet::response(call.0, life, Ok(StorageReply::Updated(done)), Bytes::new());
            self.push(1, Happening::Deliver { from: to.0 as usize, to: node, packet });
        }
        self.send(node, to.0 as usize, Packet::request(call.0, life, request, payload));
    }

    fn reply(
        &mut self,
        node: usize,
        token: Token,
        result: Result<StorageReply, StorageError>,
        payload: Bytes,
    ) {
        if let Some((to, rpc, life)) = self.nodes[node].tokens.remove(&token) {
            self.send(node, to, Packet::response(rpc, life, result, payload));
        }
    }

    fn begin_apply(&mut self, node: usize, op: OpId, mut update: StoreUpdate, payload: Bytes) {
        if self.mutant == Mutant::ForgetTags
            && let Some(newest) = update.tags.newest().copied()
        {
            // Only the newest is kept, to know who made the version.
            update.tags = TagWindow::default().with(newest.tag, newest.version);
        }
        // The real store shows a pending state at some moment between beginning and end.
        let early = !self.nodes[node].full && self.rng.random_bool(0.5);
        let begun = if early { self.nodes[node].store.apply(&update, &payload).ok() } else { None };
        self.disk(node, 100..2_500, Job::Apply { op, update, payload, begun });
    }

    fn disk(&mut self, node: usize, takes: std::ops::Range<u64>, job: Job) {
        let mut after = self.rng.random_range(takes);
        if !self.calm && self.rng.random_bool(0.02) {
            after *= 20;
        }
        let hangs = self.nodes[node].disk_hangs_until.saturating_sub(self.now);
        let life = self.nodes[node].life;
        self.push(hangs + after, Happening::Disk { node, life, job: Box::new(job) });
    }

    pub(crate) fn disk_done(&mut self, node: usize, life: u64, job: Job) -> Result<(), Violation> {
        let hangs = self.nodes[node].disk_hangs_until.saturating_sub(self.now);
        if hangs > 0 {
            self.push(hangs, Happening::Disk { node, life, job: Box::new(job) });
            return Ok(());
        }
        let event = match job {
            Job::Apply { op, update, payload, begun } => {
                let result = self.end_apply(node, &update, &payload, begun);
                self.acknowledge_early(node, &result);
                Event::Applied { op, result }
            }
            Job::Commit { op, result } => Event::Committed { op, result },
            Job::Forgotten { op } => Event::Forgotten { op, result: Ok(()) },
            Job::Content { op, chunk, which } => {
                let read = self.nodes[node].store.read(chunk, which);
                Event::Content { op, result: read.map(|found| (found.state, found.bytes)) }
            }
            Job::Read { token, request, chain_version } => {
                return self.end_read(node, token, &request, chain_version);
            }
            Job::Repair { token, request, which } => {
                let read = self.nodes[node].store.read(request.chunk, which);
                let (result, payload) = match read {
                    Ok(Version { state, bytes }) => {
                        let (version, checksum) = (state.version, state.checksum);
                        (Ok(StorageReply::Content(Content { version, checksum })), bytes)
                    }
                    Err(error) => (Err(error.at(self.nodes[node].target)), Bytes::new()),
                };
                self.reply(node, token, result, payload);
                return Ok(());
            }
        };
        self.give(node, event)
    }

    fn end_apply(
        &mut self,
        node: usize,
        update: &StoreUpdate,
        payload: &Bytes,
        begun: Option<ChunkState>,
    ) -> Result<ChunkState, StoreError> {
        let state = &mut self.nodes[node];
        let result = match begun {
            Some(pending) => Ok(pending),
            None if state.full && !payload.is_empty() => {
                Err(StoreError::NoSpace { needed_bytes: payload.len() as u64 })
            }
            None => state.store.apply(update, payload),
        };
        if result.is_ok() && self.mutant != Mutant::LoseFlush {
            state.store.flush();
        }
        result
    }

    fn acknowledge_early(&mut self, node: usize, result: &Result<ChunkState, StoreError>) {
        if self.mutant == Mutant::AcknowledgeBeforeTail
            && let Ok(pending) = result
            && let Some(newest) = pending.tags.newest()
            && let Some(token) = self.nodes[node].update_tokens.remove(&newest.tag)
        {
            let done = Updated {
                version: pending.version,
                length: pending.length,
                checksum: pending.checksum,
                chain_version: pending.chain_version,
            };
            self.reply(node, token, Ok(StorageReply::Updated(done)), Bytes::new());
        }
    }

    fn end_read(
        &mut self,
        node: usize,
        token: Token,
        request: &ReadRequest,
        chain_version: threefs_core::ids::ChainVersion,
    ) -> Result<(), Violation> {
        match self.nodes[node].store.read(request.chunk, Which::Committed) {
            Ok(version) => {
                let (result, payload) = read_reply(request, version, chain_version);
                self.reply(node, token, result, payload);
                Ok(())
            }
            Err(error) => {
                let damaged = matches!(error, StoreError::Corrupt { .. });
                let target = self.nodes[node].target;
                self.reply(node, token, Err(error.at(target)), Bytes::new());
                if damaged {
                    return self.give(node, Event::DamageFound { chunk: request.chunk });
                }
                Ok(())
            }
        }
    }

    /// What a serving replica commits is the truth.
    fn observe_commit(&mut self, node: usize, chunk: ChunkId) -> Result<(), Violation> {
        let state = &self.nodes[node];
        if !state.replica.serves(state.clock(self.now)) {
            return Ok(());
        }
        let Some(slot) = state.store.slots().get(&chunk) else { return Ok(()) };
        let Version { state: committed, bytes } = slot.committed.clone();
        let Some(newest) = committed.tags.newest() else { return Ok(()) };
        self.history
            .committed(chunk, committed.version, newest.tag, &bytes)
            .map_err(|what| self.violation(format!("node {node}: {what}")))
    }
}

fn read_reply(
    request: &ReadRequest,
    version: Version,
    chain_version: threefs_core::ids::ChainVersion,
) -> (Result<StorageReply, StorageError>, Bytes) {
    let total = version.bytes.len();
    let from = (request.offset as usize).min(total);
    let to = (from + request.length as usize).min(total);
    let payload = version.bytes.slice(from..to);
    let done = ReadDone {
        version: version.state.version,
        length: payload.len() as u32,
        chunk_length: total as u32,
        checksum: Checksum::of(&payload),
        chain_version,
    };
    (Ok(StorageReply::Read(done)), payload)
}
