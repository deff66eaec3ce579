//! One storage node: a replica, its store, its lease, its clock. This is the driver that the
//! storage service has its own version of.

use std::collections::BTreeMap;

use bytes::Bytes;
use rand::Rng;
use threefs_core::chunk::Which;
use threefs_core::error::StorageError;
use threefs_core::heartbeat::{DataFolder, Heartbeat, LocalState, ServingLease, TargetReport};
use threefs_core::ids::{
    ChainVersion, ChunkId, Incarnation, NodeId, RequestTag, StoreId, TargetId,
};
use threefs_core::message::{StorageReply, StorageRequest, Updated, verify_payload};
use threefs_core::replica::{Action, CallId, Config, Event, PeerFailure, Replica, Token};
use threefs_core::routing::{PublicState, RoutingInfo};
use threefs_core::time::Millis;

use crate::mutant::Mutant;
use crate::store::{Store, Version};
use crate::world::{CHAIN, Happening, Packet, Violation, World};

mod disk;

pub(crate) use disk::Job;
use disk::read_reply;

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
    /// It is asked to end.
    pub leaving: bool,
    /// The version of the chain in which it reported OFFLINE last, in this life.
    reported_offline: Option<ChainVersion>,
    clock_offset: u64,
    clock_rate: f64,
    /// When its clock went ahead, and by how many milliseconds.
    jumps: Vec<(u64, u64)>,
    /// How often it asks for routing.
    poll_us: u64,
    // For mutants: who asked for which update.
    update_tokens: BTreeMap<RequestTag, Token>,
}

impl Node {
    pub(crate) fn new(
        target: TargetId,
        clock_offset: u64,
        clock_rate: f64,
        poll_us: u64,
        mutant: Mutant,
    ) -> Self {
        Self {
            target,
            life: 1,
            alive: true,
            paused: false,
            backlog: Vec::new(),
            store: Store::new(StoreId(target.0.into())),
            replica: replica(target, 1, mutant),
            reported_offline: None,
            lease: ServingLease::default(),
            routing_version: threefs_core::ids::RoutingVersion(0),
            sequence: 0,
            tokens: BTreeMap::new(),
            next_token: 0,
            wake_at: None,
            disk_hangs_until: 0,
            full: false,
            leaving: false,
            clock_offset,
            clock_rate,
            jumps: Vec::new(),
            poll_us,
            update_tokens: BTreeMap::new(),
        }
    }

    /// This node's monotonic clock.
    #[must_use]
    pub fn clock(&self, now_us: u64) -> Millis {
        let jumps = self.jumps.iter().filter(|(at, _)| *at <= now_us);
        let ahead = self.clock_offset + jumps.map(|(_, by_ms)| by_ms).sum::<u64>();
        Millis(ahead + (now_us as f64 * self.clock_rate / 1_000.0) as u64)
    }

    fn moment_of(&self, local: Millis) -> u64 {
        let ahead = self.clock_offset + self.jumps.iter().map(|(_, by_ms)| by_ms).sum::<u64>();
        let since = local.0.saturating_sub(ahead) as f64;
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

    /// The process is gone.
    pub(crate) fn end(&mut self) {
        self.alive = false;
        self.paused = false;
        self.backlog.clear();
        self.life += 1;
    }

    /// Its clock goes ahead.
    pub(crate) fn jump(&mut self, now_us: u64, by_ms: u64) {
        self.jumps.push((now_us, by_ms));
    }

    /// A new process over the same disk, which makes durable what it finds.
    pub(crate) fn restart(&mut self, mutant: Mutant) {
        self.alive = true;
        self.leaving = false;
        if mutant != Mutant::SkipFlushAtOpen {
            self.store.flush();
        }
        self.replica = replica(self.target, self.life, mutant);
        self.reported_offline = None;
        self.lease = ServingLease::default();
        self.routing_version = threefs_core::ids::RoutingVersion(0);
        self.sequence = 0;
        self.tokens.clear();
        self.update_tokens.clear();
        self.wake_at = None;
    }
}

fn replica(target: TargetId, life: u64, mutant: Mutant) -> Replica {
    let mut config = Config::new(target, CHAIN, Incarnation(life));
    config.call_timeout_ms = 15;
    config.retry_wait_ms = 2;
    config.retry_wait_ms_max = 20;
    config.store_stall_ms = 60;
    config.full_wait_ms = 30;
    config.sync_window = 2;
    config.sync_page = 2;
    if let Mutant::Without(check) = mutant {
        config.without = Some(check);
    }
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

    pub(crate) fn beat(&mut self, node: usize, life: u64) -> Result<(), Violation> {
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
        if self.mutant == Mutant::ReportLeaveAtOnce && state.leaving {
            report.state = LocalState::Offline;
        }
        if report.state == LocalState::Offline {
            state.reported_offline = Some(report.chain_version);
        }
        self.check_serving(node)?;
        let state = &mut self.nodes[node];
        let store = match self.mutant {
            Mutant::TrustAnyStore => StoreId(state.target.0.into()),
            _ => state.store.id,
        };
        let heartbeat = Heartbeat {
            node: NodeId(node as u32),
            address: String::new(),
            incarnation: Incarnation(life),
            sequence: state.sequence,
            capacity_bytes: 0,
            data: DataFolder::Empty,
            targets: vec![TargetReport {
                target: state.target,
                chain: CHAIN,
                report,
                used_bytes: 0,
                store: Some(store),
                chunks: state.store.slots().len() as u64,
            }],
        };
        let packet = Packet::Heartbeat { heartbeat: Box::new(heartbeat), sent_at: now, life };
        self.send(node, self.manager_endpoint(), packet);
        self.push(HEARTBEAT_US, Happening::Beat { node, life });
        Ok(())
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
            Packet::Replaced { life } if life == self.nodes[node].life => {
                self.end(node);
                Ok(())
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
                Action::Apply { op, update, payload, .. } => {
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
                Action::ForgetInodes { op, inodes } => {
                    self.nodes[node].store.forget_inodes(inodes);
                    self.disk(node, 100..2_500, Job::InodesForgotten { op });
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

    /// A replica that serves has not told mgmtd that it does not, about this version of the chain,
    /// and mgmtd has written down the store with which it serves.
    pub(crate) fn check_serving(&self, node: usize) -> Result<(), Violation> {
        let state = &self.nodes[node];
        if !state.replica.serves(state.clock(self.now)) {
            return Ok(());
        }
        let version = state.replica.chain().map(|chain| chain.version);
        if version == state.reported_offline {
            return Err(self.violation(format!("node {node} reports OFFLINE while it serves")));
        }
        let (known, store) = (self.store_of(state.target), state.store.id);
        if known != Some(store) {
            let what = format!("node {node} serves with {store}, and mgmtd knows {known:?}");
            return Err(self.violation(what));
        }
        Ok(())
    }

    /// What a serving replica commits is the truth.
    fn observe_commit(&mut self, node: usize, chunk: ChunkId) -> Result<(), Violation> {
        let state = &self.nodes[node];
        if !state.replica.serves(state.clock(self.now)) {
            return Ok(());
        }
        self.check_serving(node)?;
        let state = &self.nodes[node];
        let Some(slot) = state.store.slots().get(&chunk) else { return Ok(()) };
        let Version { state: committed, bytes } = slot.committed.clone();
        let Some(newest) = committed.tags.newest() else { return Ok(()) };
        self.history
            .committed(chunk, committed.version, newest.tag, &bytes)
            .map_err(|what| self.violation(format!("node {node}: {what}")))
    }
}
