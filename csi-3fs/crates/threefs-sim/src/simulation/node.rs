//! A storage node: a process with its clock, lease and port, and one target of each chain. The
//! storage service has its own version of this driver.

use std::rc::Rc;
use std::sync::Arc;

use fabric::rpc::Budget;
use rand::Rng;
use threefs_core::error::StorageError;
use threefs_core::fence::FenceTable;
use threefs_core::heartbeat::{DataFolder, Heartbeat, LocalState, SeenRouting, ServingLease};
use threefs_core::ids::{FencesVersion, Incarnation, NodeId, RoutingVersion, StoreId};
use threefs_core::message::StorageRequest;
use threefs_core::replica::{CallId, Event, PeerFailure};
use threefs_core::routing::{PublicState, RoutingInfo};
use threefs_core::time::Millis;

use crate::mutations::Mutation;
use crate::simulation::{CallerId, Packet, SimEvent, Simulation, Violation};
use crate::topology::At;

mod disk;
mod hosting;
mod port;
mod target;

use port::{Admission, Incoming, Port, class_of};
pub(crate) use target::Hosted;
use target::Origin;

const HEARTBEAT_US: u64 = 12_000;

/// A simulated storage node.
pub struct Node {
    /// Its incarnation; increases with each restart.
    pub incarnation: u64,
    /// Running (possibly stopped), or dead.
    pub alive: bool,
    /// Stopped: events are queued in `backlog`.
    pub paused: bool,
    pub(crate) backlog: Vec<SimEvent>,
    /// One target of each chain, including chains without this node.
    pub(crate) targets: Vec<Hosted>,
    /// Without a port, all requests are admitted.
    port: Option<Port>,
    pub(crate) lease: ServingLease,
    routing: Rc<RoutingInfo>,
    pub(crate) fences: Arc<FenceTable>,
    /// The version that the last reply to a heartbeat has named.
    pub(crate) fences_named: FencesVersion,
    sequence: u64,
    /// The disk does not respond before this time.
    pub disk_hangs_until: u64,
    /// The disk is full.
    pub full: bool,
    /// It is shutting down.
    pub leaving: bool,
    clock_offset: u64,
    clock_rate: f64,
    /// Jumps of its clock: time and milliseconds.
    jumps: Vec<(u64, u64)>,
    /// Interval between routing requests.
    poll_us: u64,
}

impl Node {
    pub(crate) fn new(
        node: usize,
        chains: usize,
        clock_offset: u64,
        clock_rate: f64,
        poll_us: u64,
    ) -> Self {
        Self {
            incarnation: 1,
            alive: true,
            paused: false,
            backlog: Vec::new(),
            targets: (0..chains).map(|chain| Hosted::new(At { node, chain })).collect(),
            port: None,
            lease: ServingLease::default(),
            routing: Rc::default(),
            fences: Arc::default(),
            fences_named: FencesVersion(0),
            sequence: 0,
            disk_hangs_until: 0,
            full: false,
            leaving: false,
            clock_offset,
            clock_rate,
            jumps: Vec::new(),
            poll_us,
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

    /// The process dies.
    pub(crate) fn end(&mut self) {
        self.alive = false;
        self.paused = false;
        self.backlog.clear();
        self.incarnation += 1;
        self.port = None;
        self.targets.iter_mut().for_each(|target| drop(target.close()));
    }

    /// Its clock is exact.
    pub(crate) fn keep_time(&mut self) {
        self.clock_rate = 1.0;
    }

    /// Its clock jumps ahead.
    pub(crate) fn jump(&mut self, now_us: u64, by_ms: u64) {
        self.jumps.push((now_us, by_ms));
    }

    /// A new process on the same disk.
    fn start_process(&mut self, budgets: Option<&[Budget]>) {
        self.alive = true;
        self.leaving = false;
        self.port = budgets.map(Port::new);
        self.lease = ServingLease::default();
        self.routing = Rc::default();
        (self.fences, self.fences_named) = (Arc::default(), FencesVersion(0));
        self.sequence = 0;
    }

    /// Whether its port holds nothing.
    pub(crate) fn is_idle(&self) -> bool {
        self.port.as_ref().is_none_or(Port::is_idle)
    }
}

impl Simulation {
    /// Starts a process: it opens its stores and sends heartbeats.
    pub(crate) fn start_node(&mut self, node: usize) -> Result<(), Violation> {
        self.nodes[node].start_process(self.topology.budgets.as_deref());
        for chain in 0..self.topology.chains {
            self.nodes[node].targets[chain].start();
            self.open(At { node, chain })?;
        }
        let incarnation = self.nodes[node].incarnation;
        let spread = self.rng.random_range(0..3_000);
        self.push(spread, SimEvent::Heartbeat { node, incarnation });
        self.push(spread, SimEvent::Poll { node, incarnation });
        Ok(())
    }

    pub(crate) fn heartbeat_due(&mut self, node: usize, incarnation: u64) -> Result<(), Violation> {
        let (mutation, state) = (self.mutation, &mut self.nodes[node]);
        let now = state.clock(self.now);
        state.sequence += 1;
        let mut lines = Vec::new();
        for target in &mut state.targets {
            let mut line = target.line(now);
            let public = target.public_state();
            let lies = match mutation {
                Mutation::ClaimSynced => public == Some(PublicState::Syncing),
                Mutation::TrustRestart => public == Some(PublicState::Serving),
                _ => false,
            };
            if lies && line.report.state == LocalState::Online {
                line.report.state = LocalState::UpToDate;
            }
            if mutation == Mutation::ReportLeaveAtOnce && state.leaving {
                line.report.state = LocalState::Offline;
            }
            if mutation == Mutation::TrustAnyStore && line.store.is_some() {
                line.store = Some(StoreId(line.target.0.into()));
            }
            if line.report.state == LocalState::Offline {
                target.reported_offline = Some(line.report.chain_version);
            }
            lines.push(line);
        }
        for chain in 0..self.topology.chains {
            self.check_serving(At { node, chain })?;
        }
        let heartbeat = Heartbeat {
            node: NodeId(node as u32),
            address: String::new(),
            incarnation: Incarnation(incarnation),
            sequence: self.nodes[node].sequence,
            capacity_bytes: 0,
            data: DataFolder::Empty,
            targets: lines,
        };
        let records = self.nodes[node].targets.iter().filter_map(|it| it.store.record.clone());
        let version = self.known_routing(node);
        let seen = Box::new(SeenRouting { version, records: records.collect() });
        let heartbeat = Box::new(heartbeat);
        let fences = Box::new(self.fence_report(node));
        let packet = Packet::Heartbeat { heartbeat, seen, fences, sent_at: now, incarnation };
        self.send_to_managers(node, packet);
        self.push(HEARTBEAT_US, SimEvent::Heartbeat { node, incarnation });
        Ok(())
    }

    pub(crate) fn poll(&mut self, node: usize, incarnation: u64) {
        self.send_to_managers(node, Packet::AskRouting { incarnation });
        if self.epochs.are_some() {
            self.ask_fences(node);
        }
        self.push(self.nodes[node].poll_us, SimEvent::Poll { node, incarnation });
    }

    pub(crate) fn node_receives(&mut self, node: usize, packet: Packet) -> Result<(), Violation> {
        match packet {
            Packet::Request { caller, request, payload, expires, deadline } => {
                let expires = self.received_expiry(node, expires);
                let class = class_of(&request, self.mutation);
                let incoming =
                    Incoming { caller, request: *request, payload, expires, deadline, class };
                self.on_request(node, incoming)
            }
            Packet::Response { caller, result, payload } => {
                let result = (*result).map_err(PeerFailure::Refused);
                let event = Event::Answer { call: CallId(caller.rpc), result, payload };
                self.give_caller(node, caller, event)
            }
            Packet::Overloaded { caller } => {
                let (result, payload) = (Err(PeerFailure::Unreachable), bytes::Bytes::new());
                let event = Event::Answer { call: CallId(caller.rpc), result, payload };
                self.give_caller(node, caller, event)
            }
            Packet::HeartbeatReply { reply, fences, sent_at, incarnation } => {
                if incarnation != self.nodes[node].incarnation {
                    return Ok(());
                }
                let needed = match self.mutation {
                    Mutation::LeaseWithoutFences => FencesVersion(0),
                    _ => fences,
                };
                self.nodes[node].fences_named = fences;
                self.nodes[node].lease.heartbeat_answered(sent_at, reply, needed);
                if self.nodes[node].lease.fences_needed().is_some() {
                    self.ask_fences(node);
                }
                if self.nodes[node].lease.routing_needed().is_some() {
                    self.send_to_managers(node, Packet::AskRouting { incarnation });
                }
                self.give_lease(node)
            }
            Packet::Replaced { incarnation } if incarnation == self.nodes[node].incarnation => {
                self.end(node);
                Ok(())
            }
            Packet::Routing { routing, incarnation }
                if incarnation == self.nodes[node].incarnation =>
            {
                self.give_routing(node, routing)
            }
            Packet::Fences { fences, incarnation }
                if incarnation == self.nodes[node].incarnation =>
            {
                self.give_fences(node, &fences)?;
                self.give_lease(node)
            }
            _ => Ok(()),
        }
    }

    /// Delivers the reply to a call of a target, unless its store was reopened since.
    fn give_caller(
        &mut self,
        node: usize,
        caller: CallerId,
        event: Event,
    ) -> Result<(), Violation> {
        let at = At { node, chain: caller.chain };
        if caller.opening != self.hosted(at).opening {
            return Ok(());
        }
        self.deliver_event(at, event)
    }

    fn on_request(&mut self, node: usize, incoming: Incoming) -> Result<(), Violation> {
        let Some(port) = &mut self.nodes[node].port else {
            return self.admitted(node, incoming, None);
        };
        let id = port.offer(incoming);
        if port.is_granted(id) {
            return self.enter(node, id);
        }
        self.grant(node);
        Ok(())
    }

    /// Admits the requests that the port has room for. Offered payloads arrive after a round trip.
    pub(crate) fn grant(&mut self, node: usize) {
        let (now, incarnation) = (self.now, self.nodes[node].incarnation);
        let Some(port) = &mut self.nodes[node].port else { return };
        let (granted_ids, reserved_ids) = port.grant(now);
        for id in granted_ids {
            let round_trip = self.rng.random_range(100..2_000);
            self.push(round_trip, SimEvent::Enter { node, incarnation, id });
        }
        for id in reserved_ids {
            self.push(0, SimEvent::Enter { node, incarnation, id });
        }
    }

    pub(crate) fn enter(&mut self, node: usize, id: u64) -> Result<(), Violation> {
        let now = self.now;
        let Some(port) = &mut self.nodes[node].port else { return Ok(()) };
        match port.enter(id, now) {
            Admission::Admitted(incoming, budget) => {
                return self.admitted(node, *incoming, Some(budget));
            }
            Admission::Overloaded(caller) => {
                self.overloads += 1;
                self.send(node, caller.endpoint, Packet::Overloaded { caller });
            }
            Admission::Nothing => {}
        }
        self.grant(node);
        Ok(())
    }

    fn admitted(
        &mut self,
        node: usize,
        incoming: Incoming,
        budget: Option<port::HeldBudget>,
    ) -> Result<(), Violation> {
        let Incoming { caller, request, payload, expires, .. } = incoming;
        let origin = Origin { caller, budget };
        let at = At::of(request.to().target);
        if at.node != node || self.hosted(at).replica.is_none() {
            let error = StorageError::WrongTarget { target: request.to().target };
            self.answer(node, origin, Err(error), bytes::Bytes::new());
            return Ok(());
        }
        self.request(at, origin, request, payload, expires)
    }

    /// Sends a reply and releases the budget of its request.
    pub(crate) fn answer(
        &mut self,
        node: usize,
        origin: Origin,
        result: threefs_core::message::StorageResult,
        payload: bytes::Bytes,
    ) {
        let Origin { caller, budget } = origin;
        self.send(node, caller.endpoint, Packet::response(caller, result, payload));
        if let (Some(budget), Some(port)) = (budget, &mut self.nodes[node].port) {
            port.give_back(budget);
            self.grant(node);
        }
    }

    fn give_routing(&mut self, node: usize, routing: Rc<RoutingInfo>) -> Result<(), Violation> {
        if routing.version <= self.nodes[node].routing.version {
            return Ok(());
        }
        self.nodes[node].routing = routing;
        for chain in 0..self.topology.chains {
            self.deliver_routing(At { node, chain })?;
        }
        let version = self.known_routing(node);
        self.nodes[node].lease.routing_known(version);
        self.give_lease(node)
    }

    pub(super) fn known_routing(&self, node: usize) -> RoutingVersion {
        self.nodes[node].routing.version
    }

    fn give_lease(&mut self, node: usize) -> Result<(), Violation> {
        for chain in 0..self.topology.chains {
            self.deliver_lease(At { node, chain })?;
        }
        Ok(())
    }

    /// Delivers the node's lease to one of its targets.
    fn deliver_lease(&mut self, at: At) -> Result<(), Violation> {
        let valid_until = match self.mutation {
            Mutation::IgnoreLease => Some(Millis(u64::MAX)),
            _ => self.nodes[at.node].lease.valid_until(),
        };
        match valid_until {
            Some(valid_until) => self.deliver_event(at, Event::Lease { valid_until }),
            None => Ok(()),
        }
    }

    /// Sends a request of a target to another node.
    fn call(
        &mut self,
        from: At,
        rpc: u64,
        to: usize,
        request: StorageRequest,
        payload: bytes::Bytes,
        timeout_ms: u64,
    ) {
        let opening = self.hosted(from).opening;
        let caller =
            CallerId { endpoint: from.node, rpc, chain: from.chain, opening, volume: None };
        let deadline = self.now + timeout_ms * 1_000;
        self.send(from.node, to, Packet::request(caller, request, payload, deadline));
    }
}
