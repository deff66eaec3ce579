//! Simulation of one schedule: virtual time, the network and the event loop.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::fmt;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, Epoch, InodeId, StoreId, TargetId};
use threefs_core::replica::Check;
use threefs_core::routing::RoutingInfo;

use crate::fault_plan::{self, FAULTS_END_US, Fault};
use crate::history::History;
use crate::manager::{Manager, SCAN_MS};
use crate::mutations::Mutation;
use crate::topology::{At, Topology, chain_id};

mod client;
mod convergence;
mod epochs;
mod events;
mod failover;
mod faults;
mod fencing;
mod gc;
mod job;
mod moves;
mod node;
mod operator;
mod transit;

use client::Task;
use epochs::Epochs;
use events::ScheduledEvent;
pub(crate) use events::{CallerId, Packet, SimEvent};
use failover::{Failovers, SECOND};
pub(crate) use fencing::Expiry;
use fencing::Fencing;
use gc::Removal;
pub(crate) use gc::is_removed;
use node::Node;
use transit::Transit;

/// The file.
pub const INODE: InodeId = InodeId(7);
/// Chunk size: small, so that partial updates overlap.
pub const CHUNK_BYTES: u32 = 12;
/// Seed of the generator of moves.
const MOVES_SEED: u64 = 0x6d6f_7665;
const FILLS_SEED: u64 = 0x6669_6c6c;
/// Ids of replacement stores are above this.
const NEW_STORES: u64 = 1_000;
/// Clients start no new requests after this time.
const LAST_REQUEST_US: u64 = FAULTS_END_US + 60_000;
/// Everything must have converged by this time.
const CONVERGED_BY_US: u64 = FAULTS_END_US + 3_000_000;
const CONVERGENCE_CHECK_US: u64 = 10_000;

/// Statistics of a schedule.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Simulated events.
    pub events: u64,
    /// Answered requests of clients.
    pub answers: u64,
    /// Sum of the versions of all chains.
    pub chain_versions: u32,
    /// Targets promoted by the operator.
    pub promotions: u64,
    /// Requests refused by ports.
    pub overloads: u64,
    /// Takeovers of an mgmtd from another one.
    pub takeovers: u64,
    /// Virtual microseconds from the end of the faults to convergence.
    pub converged_after_us: u64,
}

/// A violated invariant.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The seed of the schedule.
    pub seed: u64,
    /// Virtual time.
    pub at_us: u64,
    /// The violation.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "seed {}, at {} us: {}\nto reproduce: THREEFS_SIM_SEED={} cargo test -p threefs-sim \
             --test schedules one_seed -- --nocapture",
            self.seed, self.at_us, self.what, self.seed
        )
    }
}

#[derive(Default)]
struct Network {
    loss: f64,
    repeat: f64,
    delay: f64,
    // (from, to) -> blocked until.
    blocked: BTreeMap<(usize, usize), u64>,
}

/// One simulated schedule.
pub struct Simulation {
    seed: u64,
    pub(crate) mutation: Mutation,
    pub(crate) topology: Topology,
    pub(crate) now: u64,
    sequence: u64,
    queue: BinaryHeap<Reverse<ScheduledEvent>>,
    pub(crate) rng: ChaCha8Rng,
    pub(crate) nodes: Vec<Node>,
    pub(crate) tasks: Vec<Task>,
    manager: Manager,
    manager_away: bool,
    failovers: Failovers,
    network: Network,
    pub(crate) history: History,
    pub(crate) chunks: u32,
    pub(crate) updates: u64,
    pub(crate) rpcs: u64,
    pub(crate) rpc_task: BTreeMap<u64, usize>,
    pub(crate) retry_us: u64,
    pub(crate) faults_ended: bool,
    pub(crate) ends_at: Option<u64>,
    // Separate generators for moves and fencing, so that other schedules are unaffected.
    moves: ChaCha8Rng,
    pub(crate) fencing: Fencing,
    pub(crate) removal: Removal,
    pub(crate) epochs: Epochs,
    /// In schedules in which other programs use the disks.
    fills: Option<ChaCha8Rng>,
    /// Of each chain, the epoch before which no version may be made any more.
    epochs_ended: BTreeMap<usize, Epoch>,
    /// Versions that a replica has committed, by the first version of their chunk.
    committed: BTreeSet<(ChunkId, ChunkVersion)>,
    transit: Transit,
    damaged: Vec<u32>,
    /// A disk or a store is permanently lost: at most one per schedule.
    data_is_lost: bool,
    new_stores: u64,
    promotions: u64,
    /// The chain version of the last promotion in each chain.
    pub(crate) promoted: BTreeMap<usize, ChainVersion>,
    pub(crate) overloads: u64,
    scrubbed: bool,
    events: u64,
    trace: bool,
}

impl Simulation {
    /// The simulation of a seed, before its first event.
    #[must_use]
    pub fn new(seed: u64, mutation: Mutation) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let count = [2, 3, 3, 3, 3, 4][rng.random_range(0..6)];
        let clients = rng.random_range(1..4);
        let mut topology = Topology::new(seed, mutation);
        // At least one per chain.
        let chunks = rng.random_range(1..4).max(topology.chains as u32);
        let skewed = rng.random_bool(0.5);
        let mut nodes: Vec<Node> = (0..count)
            .map(|index| {
                let rate = if skewed { rng.random_range(0.8..1.25) } else { 1.0 };
                // With rare requests a node receives several changes together.
                let poll_us = [4_000, 25_000, 150_000][rng.random_range(0..3)];
                Node::new(index, topology.chains, rng.random_range(0..1_000_000), rate, poll_us)
            })
            .collect();
        let mut tasks = Vec::new();
        for client in 0..clients {
            for channel in 0..rng.random_range(1..3) {
                tasks.push(Task::new(count + 1 + client, client as u128 + 1, channel));
            }
        }
        let mut plan = fault_plan::plan(&mut rng, count, count + 1 + clients, chunks);
        let failovers = Failovers::new(seed, mutation, (count, clients));
        if failovers.alone {
            plan.retain(|(_, fault)| matches!(fault, Fault::EndAll));
            nodes.iter_mut().for_each(Node::keep_time);
        }
        let fencing = Fencing::new(seed, mutation);
        let mut fills = ChaCha8Rng::seed_from_u64(seed ^ FILLS_SEED);
        let has_fills = fills.random_bool(0.2) || mutation == Mutation::Without(Check::Announced);
        let mut moves = ChaCha8Rng::seed_from_u64(seed ^ MOVES_SEED);
        let moving = matches!(mutation, Mutation::LeaveOutAtOnce | Mutation::AbandonServing);
        let has_move = moves.random_bool(0.4) || moving;
        let spare = count > 2 && has_move;
        let members = if spare { count - 1 } else { count };
        let mut manager = Manager::new(topology.make_chains(members));
        manager.leaves_out_at_once = mutation == Mutation::LeaveOutAtOnce;
        manager.abandons_serving = mutation == Mutation::AbandonServing;
        manager.promotes_empty = mutation == Mutation::PromoteEmpty;
        manager.trusts_backup = mutation == Mutation::TrustBackup;
        manager.trusts_fences = mutation == Mutation::TrustFences;
        let mut simulation = Self {
            seed,
            mutation,
            removal: Removal::new(seed, mutation, topology.chains),
            epochs: Epochs::new(seed, mutation),
            fills: has_fills.then_some(fills),
            epochs_ended: BTreeMap::new(),
            committed: BTreeSet::new(),
            topology,
            now: 0,
            sequence: 0,
            queue: BinaryHeap::new(),
            rng,
            nodes,
            tasks,
            manager,
            manager_away: false,
            failovers,
            network: Network::default(),
            history: History::default(),
            chunks,
            updates: 0,
            rpcs: 0,
            rpc_task: BTreeMap::new(),
            retry_us: 4_000,
            faults_ended: false,
            ends_at: None,
            moves,
            fencing,
            transit: Transit::new(seed, mutation),
            damaged: Vec::new(),
            data_is_lost: false,
            new_stores: 0,
            promotions: 0,
            promoted: BTreeMap::new(),
            overloads: 0,
            scrubbed: false,
            events: 0,
            trace: std::env::var_os("THREEFS_SIM_TRACE").is_some(),
        };
        for (at, fault) in plan {
            simulation.push(at, SimEvent::Fault(fault));
        }
        let mut more = fault_plan::more(seed, mutation, count, simulation.topology.chains);
        more.extend(fault_plan::restore(seed, mutation, count));
        if simulation.failovers.are_some() {
            let is_of_manager = |fault: &Fault| matches!(fault, Fault::BackUp | Fault::Restore);
            more.retain(|(_, fault)| !simulation.failovers.alone && !is_of_manager(fault));
        }
        for (at, fault) in more {
            simulation.push(at, SimEvent::Fault(fault));
        }
        simulation.plan_failovers();
        if let Some(at) = simulation.epochs.first_at() {
            simulation.push(at, SimEvent::Create);
        }
        if let Some(at) = simulation.removal.at() {
            simulation.push(at + 1, SimEvent::Collect);
        }
        if spare {
            let at = simulation.moves.random_range(20_000..FAULTS_END_US);
            simulation.push(at, SimEvent::Move);
            if simulation.moves.random_bool(0.4) || mutation == Mutation::AbandonServing {
                let after = simulation.moves.random_range(1_000..200_000);
                simulation.push(at + after, SimEvent::AbandonMove);
            }
        }
        for task in 0..simulation.tasks.len() {
            simulation.push(0, SimEvent::Task { task, generation: 0 });
        }
        simulation.push(0, SimEvent::Scan);
        simulation.push(0, SimEvent::Operator);
        simulation
    }

    /// Runs the schedule to its end.
    ///
    /// # Errors
    /// The first violation.
    pub fn run(mut self) -> Result<Outcome, Violation> {
        for node in 0..self.nodes.len() {
            self.start_node(node)?;
        }
        while let Some(Reverse(next)) = self.queue.pop() {
            self.now = next.at;
            self.events += 1;
            if self.now > CONVERGED_BY_US {
                return Err(self.violation(self.convergence_report()));
            }
            if matches!(next.event, SimEvent::CheckConverged) {
                if self.check_converged()? {
                    return Ok(self.outcome());
                }
                self.push(CONVERGENCE_CHECK_US, SimEvent::CheckConverged);
                continue;
            }
            self.dispatch(next.event)?;
        }
        Err(self.violation("no events are left".to_owned()))
    }

    fn outcome(&self) -> Outcome {
        Outcome {
            events: self.events,
            answers: self.history.answers,
            chain_versions: (self.manager.routing().chains.values())
                .map(|chain| chain.version.0 % ChainVersion::first_of(1).0)
                .sum(),
            promotions: self.promotions,
            overloads: self.overloads,
            takeovers: self.failovers.takeovers,
            converged_after_us: self.now - FAULTS_END_US,
        }
    }

    pub(crate) fn violation(&self, what: String) -> Violation {
        Violation { seed: self.seed, at_us: self.now, what }
    }

    pub(crate) fn note(&self, text: impl FnOnce() -> String) {
        if self.trace {
            println!("{:>9} {}", self.now, text());
        }
    }

    pub(crate) fn push(&mut self, after_us: u64, event: SimEvent) {
        self.sequence += 1;
        let (at, sequence) = (self.now + after_us, self.sequence);
        self.queue.push(Reverse(ScheduledEvent { at, sequence, event }));
    }

    /// The store that a target has served with, according to mgmtd.
    pub(crate) fn store_of(&self, target: TargetId) -> Option<StoreId> {
        self.manager.store_of(target)
    }

    /// Number of restores of the manager's store.
    pub(crate) fn manager_era(&self) -> u32 {
        self.manager.routing().version.era()
    }

    /// The id of a new store.
    pub(crate) fn new_store_id(&mut self) -> StoreId {
        self.new_stores += 1;
        StoreId(u128::from(NEW_STORES + self.new_stores))
    }

    pub(crate) fn manager_endpoint(&self) -> usize {
        self.nodes.len()
    }

    /// Sends a packet through the network in its current state.
    pub(crate) fn send(&mut self, from: usize, to: usize, packet: Packet) {
        let blocked = |key| self.network.blocked.get(&key).is_some_and(|until| self.now < *until);
        if blocked((from, to)) {
            return;
        }
        let bad = !self.faults_ended
            && self.network.loss + self.network.repeat + self.network.delay > 0.0;
        if bad && self.rng.random_bool(self.network.loss) {
            return;
        }
        if bad && self.rng.random_bool(self.network.repeat) {
            let late = self.rng.random_range(100..80_000);
            self.push(late, SimEvent::Deliver { from, to, packet: packet.clone() });
        }
        let mut after = self.rng.random_range(50..1_000);
        if bad && self.rng.random_bool(self.network.delay) {
            after += self.rng.random_range(0..40_000);
        }
        // The clients of the simulator do not verify what they read.
        let damages = to < self.nodes.len() && !self.faults_ended;
        let packet = if damages { self.transit.pass(packet) } else { packet };
        self.push(after, SimEvent::Deliver { from, to, packet });
    }

    fn dispatch(&mut self, event: SimEvent) -> Result<(), Violation> {
        let node = match &event {
            SimEvent::Deliver { to, .. } if *to < self.nodes.len() => Some((*to, true)),
            SimEvent::Disk { at, opening, .. } | SimEvent::Wake { at, opening } => {
                Some((at.node, self.hosted(*at).opening == *opening))
            }
            SimEvent::Open { at: At { node, .. }, incarnation }
            | SimEvent::Enter { node, incarnation, .. }
            | SimEvent::Heartbeat { node, incarnation }
            | SimEvent::Poll { node, incarnation } => {
                Some((*node, self.nodes[*node].incarnation == *incarnation))
            }
            _ => None,
        };
        if let Some((node, current)) = node {
            let state = &mut self.nodes[node];
            if !state.alive || !current {
                return Ok(());
            }
            if state.paused {
                state.backlog.push(event);
                return Ok(());
            }
        }
        self.trace_event(&event);
        match event {
            SimEvent::Deliver { from, to, packet } => self.deliver(from, to, packet),
            SimEvent::Disk { at, job, .. } => self.disk_done(at, *job),
            SimEvent::Wake { at, .. } => self.wake_target(at),
            SimEvent::Open { at, .. } => self.open(at),
            SimEvent::Enter { node, id, .. } => self.enter(node, id),
            SimEvent::Operator => self.run_operator(),
            SimEvent::Heartbeat { node, incarnation } => self.heartbeat_due(node, incarnation),
            SimEvent::Poll { node, incarnation } => {
                self.poll(node, incarnation);
                Ok(())
            }
            SimEvent::Scan => {
                self.scan();
                Ok(())
            }
            SimEvent::Mgmtd { mgmtd } => self.mgmtd_ticks(mgmtd),
            SimEvent::Failover { number } => {
                self.failover(number);
                Ok(())
            }
            SimEvent::Task { task, generation } => {
                self.wake_task_now(task, generation);
                Ok(())
            }
            SimEvent::Fault(fault) => self.fault(fault),
            SimEvent::Move => {
                self.start_move();
                Ok(())
            }
            SimEvent::Collect => {
                self.run_gc();
                Ok(())
            }
            SimEvent::AbandonMove => {
                self.abandon_move();
                Ok(())
            }
            SimEvent::Create => self.run_creations(),
            SimEvent::CheckConverged => Ok(()),
        }
    }

    fn trace_event(&self, event: &SimEvent) {
        match event {
            SimEvent::Deliver {
                packet:
                    Packet::Heartbeat { .. } | Packet::HeartbeatReply { .. } | Packet::AskRouting { .. },
                ..
            } => {}
            SimEvent::Deliver { packet: Packet::Routing { .. }, .. } => {}
            SimEvent::Deliver { from, to, packet } => {
                self.note(|| format!("{from} -> {to}: {packet:?}"));
            }
            SimEvent::Disk { at, job, .. } => {
                self.note(|| format!("disk {}: {job:?}", self.name(*at)));
            }
            SimEvent::Fault(fault) => self.note(|| format!("FAULT {fault:?}")),
            _ => {}
        }
    }

    fn deliver(&mut self, from: usize, to: usize, packet: Packet) -> Result<(), Violation> {
        if to < self.nodes.len() {
            return self.node_receives(to, packet);
        }
        if to == self.manager_endpoint() || to == SECOND {
            self.manager_receives(to, from, packet);
            return Ok(());
        }
        self.client_receives(to, packet)
    }

    fn scan(&mut self) {
        if !self.manager_is_away() {
            let before = self.manager.routing();
            self.manager.scan(self.manager_now());
            self.decided(&before);
        }
        self.push(SCAN_MS * 1_000, SimEvent::Scan);
    }

    /// Handles changes of chains by the manager.
    fn decided(&mut self, before: &RoutingInfo) {
        for id in (0..self.topology.chains).map(chain_id) {
            if self.manager.chain(id) == before.chain(id) {
                continue;
            }
            self.note(|| format!("CHAIN {:?}", self.manager.chain(id)));
            if let Some(this) = before.moves.get(&id) {
                self.delay_routing(this);
            }
        }
    }
}
