//! Virtual time, the network between all endpoints, and the course of a schedule.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use threefs_core::ids::{ChainVersion, InodeId, StoreId, TargetId};
use threefs_core::routing::RoutingInfo;
use threefs_core::time::Millis;
use threefs_mgmtd::MgmtdError;

use crate::client::Task;
use crate::faults::{self, CALM_AT_US};
use crate::history::History;
use crate::manager::{Manager, SCAN_MS};
use crate::mutant::Mutant;
use crate::node::Node;
use crate::shape::{At, Shape, chain_id};

mod collect;
mod events;
mod misfortune;
mod moves;
mod operator;
mod rights;
mod settle;

use collect::Removal;
pub(crate) use collect::is_removed;
use events::Due;
pub(crate) use events::{Caller, Happening, Packet};
pub(crate) use rights::Expiry;
use rights::Rights;

/// The one file.
pub const INODE: InodeId = InodeId(7);
/// Bytes of a chunk: few, so that partial updates meet.
pub const CHUNK_BYTES: u32 = 12;
/// Tells the generator of moves from that of everything else.
const MOVES: u64 = 0x6d6f_7665;
/// Ids of stores that took another's place come after this.
const NEW_STORES: u64 = 1_000;
/// Clients begin nothing new so long after the faults have ended.
const LAST_REQUEST_US: u64 = CALM_AT_US + 60_000;
/// By then everything must be well again.
const SETTLED_BY_US: u64 = CALM_AT_US + 3_000_000;
const SETTLE_CHECK_US: u64 = 10_000;

/// What a schedule went through.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Steps of the simulator.
    pub events: u64,
    /// Requests of clients that were answered.
    pub answers: u64,
    /// Versions of all chains.
    pub chain_versions: u32,
    /// Targets that an operator had to promote.
    pub promotions: u64,
    /// Requests that ports refused.
    pub overloads: u64,
    /// Virtual microseconds from the end of the faults until all was well.
    pub settled_after_us: u64,
}

/// An invariant is broken.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The schedule.
    pub seed: u64,
    /// Virtual time.
    pub at_us: u64,
    /// What.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "seed {}, at {} us: {}\nto see it again: THREEFS_SIM_SEED={} cargo test -p threefs-sim \
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

/// See the module.
pub struct World {
    seed: u64,
    pub(crate) mutant: Mutant,
    pub(crate) shape: Shape,
    pub(crate) now: u64,
    sequence: u64,
    queue: BinaryHeap<Reverse<Due>>,
    pub(crate) rng: ChaCha8Rng,
    pub(crate) nodes: Vec<Node>,
    pub(crate) tasks: Vec<Task>,
    manager: Manager,
    manager_away: bool,
    network: Network,
    pub(crate) history: History,
    pub(crate) chunks: u32,
    pub(crate) updates: u64,
    pub(crate) rpcs: u64,
    pub(crate) rpc_task: BTreeMap<u64, usize>,
    pub(crate) retry_us: u64,
    pub(crate) calm: bool,
    pub(crate) ends_at: Option<u64>,
    // Of moves and of rights alone: the other schedules stay what they are.
    moves: ChaCha8Rng,
    pub(crate) rights: Rights,
    pub(crate) removal: Removal,
    damaged: Vec<u32>,
    /// A disk, or a store, is lost for good: one in a schedule.
    lost: bool,
    new_stores: u64,
    promotions: u64,
    /// The version in which a target of a chain was promoted last.
    pub(crate) promoted: BTreeMap<usize, ChainVersion>,
    pub(crate) overloads: u64,
    scrubbed: bool,
    events: u64,
    trace: bool,
}

impl World {
    /// The world of a seed, before its first event.
    #[must_use]
    pub fn new(seed: u64, mutant: Mutant) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let count = [2, 3, 3, 3, 3, 4][rng.random_range(0..6)];
        let clients = rng.random_range(1..4);
        let mut shape = Shape::new(seed, mutant);
        // Each chain has one at least.
        let chunks = rng.random_range(1..4).max(shape.chains as u32);
        let skewed = rng.random_bool(0.5);
        let nodes: Vec<Node> = (0..count)
            .map(|index| {
                let rate = if skewed { rng.random_range(0.8..1.25) } else { 1.0 };
                // Who asks rarely hears of several changes at once.
                let poll_us = [4_000, 25_000, 150_000][rng.random_range(0..3)];
                Node::new(index, shape.chains, rng.random_range(0..1_000_000), rate, poll_us)
            })
            .collect();
        let mut tasks = Vec::new();
        for client in 0..clients {
            for channel in 0..rng.random_range(1..3) {
                tasks.push(Task::new(count + 1 + client, client as u128 + 1, channel));
            }
        }
        let plan = faults::plan(&mut rng, count, count + 1 + clients, chunks);
        let rights = Rights::new(seed, mutant);
        let mut moves = ChaCha8Rng::seed_from_u64(seed ^ MOVES);
        let moving = matches!(mutant, Mutant::LeaveOutAtOnce | Mutant::AbandonServing);
        let wanted = moves.random_bool(0.4) || moving;
        let spare = count > 2 && wanted;
        let members = if spare { count - 1 } else { count };
        let mut manager = Manager::new(shape.make_chains(members));
        manager.hasty = mutant == Mutant::LeaveOutAtOnce;
        manager.careless = mutant == Mutant::AbandonServing;
        manager.rash = mutant == Mutant::PromoteEmpty;
        let mut world = Self {
            seed,
            mutant,
            removal: Removal::new(seed, mutant, shape.chains),
            shape,
            now: 0,
            sequence: 0,
            queue: BinaryHeap::new(),
            rng,
            nodes,
            tasks,
            manager,
            manager_away: false,
            network: Network::default(),
            history: History::default(),
            chunks,
            updates: 0,
            rpcs: 0,
            rpc_task: BTreeMap::new(),
            retry_us: 4_000,
            calm: false,
            ends_at: None,
            moves,
            rights,
            damaged: Vec::new(),
            lost: false,
            new_stores: 0,
            promotions: 0,
            promoted: BTreeMap::new(),
            overloads: 0,
            scrubbed: false,
            events: 0,
            trace: std::env::var_os("THREEFS_SIM_TRACE").is_some(),
        };
        for (at, fault) in plan {
            world.push(at, Happening::Fault(fault));
        }
        for (at, fault) in faults::more(seed, mutant, count, world.shape.chains) {
            world.push(at, Happening::Fault(fault));
        }
        if let Some(at) = world.removal.at() {
            world.push(at + 1, Happening::Collect);
        }
        if spare {
            let at = world.moves.random_range(20_000..CALM_AT_US);
            world.push(at, Happening::Move);
            if world.moves.random_bool(0.4) || mutant == Mutant::AbandonServing {
                let after = world.moves.random_range(1_000..200_000);
                world.push(at + after, Happening::GiveUpMove);
            }
        }
        for task in 0..world.tasks.len() {
            world.push(0, Happening::Task { task, generation: 0 });
        }
        world.push(0, Happening::Scan);
        world.push(0, Happening::Operator);
        world
    }

    /// Runs the schedule to its end.
    ///
    /// # Errors
    /// The first violation.
    pub fn run(mut self) -> Result<Outcome, Violation> {
        for node in 0..self.nodes.len() {
            self.node_starts(node)?;
        }
        while let Some(Reverse(due)) = self.queue.pop() {
            self.now = due.at;
            self.events += 1;
            if self.now > SETTLED_BY_US {
                return Err(self.violation(self.what_is_not_well()));
            }
            if matches!(due.happening, Happening::CheckSettled) {
                if self.check_settled()? {
                    return Ok(self.outcome());
                }
                self.push(SETTLE_CHECK_US, Happening::CheckSettled);
                continue;
            }
            self.happen(due.happening)?;
        }
        Err(self.violation("nothing happens any more".to_owned()))
    }

    fn outcome(&self) -> Outcome {
        Outcome {
            events: self.events,
            answers: self.history.answers,
            chain_versions: (self.manager.routing().chains.values())
                .map(|chain| chain.version.0)
                .sum(),
            promotions: self.promotions,
            overloads: self.overloads,
            settled_after_us: self.now - CALM_AT_US,
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

    pub(crate) fn push(&mut self, after_us: u64, happening: Happening) {
        self.sequence += 1;
        let (at, sequence) = (self.now + after_us, self.sequence);
        self.queue.push(Reverse(Due { at, sequence, happening }));
    }

    /// The store with which mgmtd knows that a target has served.
    pub(crate) fn store_of(&self, target: TargetId) -> Option<StoreId> {
        self.manager.store_of(target)
    }

    /// The id of a store that is made now.
    pub(crate) fn new_store_id(&mut self) -> StoreId {
        self.new_stores += 1;
        StoreId(u128::from(NEW_STORES + self.new_stores))
    }

    pub(crate) fn manager_endpoint(&self) -> usize {
        self.nodes.len()
    }

    /// Sends a packet, as well as the network can now.
    pub(crate) fn send(&mut self, from: usize, to: usize, packet: Packet) {
        let blocked = |key| self.network.blocked.get(&key).is_some_and(|until| self.now < *until);
        if blocked((from, to)) {
            return;
        }
        let bad = !self.calm && self.network.loss + self.network.repeat + self.network.delay > 0.0;
        if bad && self.rng.random_bool(self.network.loss) {
            return;
        }
        if bad && self.rng.random_bool(self.network.repeat) {
            let late = self.rng.random_range(100..80_000);
            self.push(late, Happening::Deliver { from, to, packet: packet.clone() });
        }
        let mut after = self.rng.random_range(50..1_000);
        if bad && self.rng.random_bool(self.network.delay) {
            after += self.rng.random_range(0..40_000);
        }
        self.push(after, Happening::Deliver { from, to, packet });
    }

    fn happen(&mut self, happening: Happening) -> Result<(), Violation> {
        let node = match &happening {
            Happening::Deliver { to, .. } if *to < self.nodes.len() => Some((*to, true)),
            Happening::Disk { at, opening, .. } | Happening::Wake { at, opening } => {
                Some((at.node, self.hosted(*at).opening == *opening))
            }
            Happening::Open { at: At { node, .. }, life }
            | Happening::Enter { node, life, .. }
            | Happening::Beat { node, life }
            | Happening::Poll { node, life } => Some((*node, self.nodes[*node].life == *life)),
            _ => None,
        };
        if let Some((node, current)) = node {
            let state = &mut self.nodes[node];
            if !state.alive || !current {
                return Ok(());
            }
            if state.paused {
                state.backlog.push(happening);
                return Ok(());
            }
        }
        self.trace_happening(&happening);
        match happening {
            Happening::Deliver { from, to, packet } => self.deliver(from, to, packet),
            Happening::Disk { at, job, .. } => self.disk_done(at, *job),
            Happening::Wake { at, .. } => self.target_wakes(at),
            Happening::Open { at, .. } => self.open(at),
            Happening::Enter { node, id, .. } => self.enter(node, id),
            Happening::Operator => self.operate(),
            Happening::Beat { node, life } => self.beat(node, life),
            Happening::Poll { node, life } => {
                self.poll(node, life);
                Ok(())
            }
            Happening::Scan => {
                self.scan();
                Ok(())
            }
            Happening::Task { task, generation } => {
                self.task_wakes(task, generation);
                Ok(())
            }
            Happening::Fault(fault) => self.fault(fault),
            Happening::Move => {
                self.begin_move();
                Ok(())
            }
            Happening::Collect => {
                self.collect();
                Ok(())
            }
            Happening::GiveUpMove => {
                self.give_up_move();
                Ok(())
            }
            Happening::CheckSettled => Ok(()),
        }
    }

    fn trace_happening(&self, happening: &Happening) {
        match happening {
            Happening::Deliver {
                packet:
                    Packet::Heartbeat { .. } | Packet::HeartbeatReply { .. } | Packet::AskRouting { .. },
                ..
            } => {}
            Happening::Deliver { packet: Packet::Routing { .. }, .. } => {}
            Happening::Deliver { from, to, packet } => {
                self.note(|| format!("{from} -> {to}: {packet:?}"));
            }
            Happening::Disk { at, job, .. } => {
                self.note(|| format!("disk {}: {job:?}", self.name(*at)));
            }
            Happening::Fault(fault) => self.note(|| format!("FAULT {fault:?}")),
            _ => {}
        }
    }

    fn deliver(&mut self, from: usize, to: usize, packet: Packet) -> Result<(), Violation> {
        if to < self.nodes.len() {
            return self.node_receives(to, packet);
        }
        if to > self.nodes.len() {
            return self.client_receives(to, packet);
        }
        if self.manager_away {
            return Ok(());
        }
        match packet {
            Packet::Heartbeat { heartbeat, sent_at, life } => {
                let (now, before) = (Millis(self.now / 1_000), self.manager.routing());
                let reply = self.manager.heartbeat(now, &heartbeat);
                self.decided(&before);
                match reply {
                    Ok(reply) => {
                        self.send(to, from, Packet::HeartbeatReply { reply, sent_at, life });
                    }
                    Err(MgmtdError::Replaced { .. }) => {
                        self.send(to, from, Packet::Replaced { life });
                    }
                    Err(_) => {}
                }
            }
            Packet::AskRouting { life } => {
                let routing = self.manager.routing();
                self.send(to, from, Packet::Routing { routing, life });
            }
            _ => {}
        }
        Ok(())
    }

    fn scan(&mut self) {
        if !self.manager_away {
            let before = self.manager.routing();
            self.manager.scan(Millis(self.now / 1_000));
            self.decided(&before);
        }
        self.push(SCAN_MS * 1_000, Happening::Scan);
    }

    /// The manager may have changed chains.
    fn decided(&mut self, before: &RoutingInfo) {
        for id in (0..self.shape.chains).map(chain_id) {
            if self.manager.chain(id) == before.chain(id) {
                continue;
            }
            self.note(|| format!("CHAIN {:?}", self.manager.chain(id)));
            if let Some(this) = before.moves.get(&id) {
                self.delay_news(this);
            }
        }
    }
}
