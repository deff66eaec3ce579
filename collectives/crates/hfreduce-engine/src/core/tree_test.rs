//! Whole groups of cores over a simulated network: seeded order, delay, stall and death.

use std::collections::{BTreeMap, VecDeque};

use hfreduce_plan::{NodePlace, Plan};

use super::*;
use crate::cause::CauseKind;
use crate::core::{Geometry, Kind};

/// A small generator, so that every schedule is one number.
struct Seed(u64);

impl Seed {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % bound.max(1)
    }
}

const SLOT_BYTES: usize = 16 << 10;

#[derive(Clone)]
struct Op {
    print: Fingerprint,
    /// Per rank; the result replaces it (allgather and reduce_scatter use `output`).
    input: Vec<Vec<f32>>,
}

enum Message {
    Data(DataHead, Vec<f32>),
    Credits([u8; CLASSES]),
    Abort(Cause),
}

struct Node {
    core: TreeCore,
    /// Operations begun.
    started: usize,
    /// The next chunk to activate: (operation, chunk).
    next: (usize, u32),
    places: BTreeMap<Key, Vec<f32>>,
    pools: BTreeMap<(usize, usize, u32), Vec<f32>>,
    done: BTreeMap<Key, bool>,
    cause: Option<Cause>,
    dead: bool,
    stalled: usize,
}

struct Sim {
    plan: Plan,
    locals: usize,
    ops: Vec<Op>,
    output: Vec<Vec<Vec<f32>>>,
    nodes: Vec<Node>,
    /// FIFO from one node to another.
    wires: BTreeMap<(usize, usize), VecDeque<Message>>,
    seed: Seed,
    window: usize,
    arrival_order: bool,
}

fn plan(nodes: usize, zone_a: usize) -> Plan {
    let places: Vec<NodePlace> = (0..nodes)
        .map(|node| NodePlace::new(format!("n{node}"), if node < zone_a { "A" } else { "B" }))
        .collect();
    Plan::new(&places).unwrap()
}

impl Sim {
    fn new(
        plan: Plan,
        locals: usize,
        ops: Vec<Op>,
        seed: u64,
        credits: u32,
        window: usize,
    ) -> Self {
        let world = plan.nodes().len() * locals;
        let nodes = (0..plan.nodes().len())
            .map(|me| Node {
                core: TreeCore::new(Flows::new(&plan, me), (0, 1), credits),
                started: 0,
                next: (0, 0),
                places: BTreeMap::new(),
                pools: BTreeMap::new(),
                done: BTreeMap::new(),
                cause: None,
                dead: false,
                stalled: 0,
            })
            .collect();
        let output = ops
            .iter()
            .map(|op| match op.print.kind {
                Kind::Allgather => vec![vec![0.0; op.print.count as usize * world]; world],
                Kind::ReduceScatter => vec![vec![0.0; op.print.count as usize]; world],
                _ => op.input.clone(),
            })
            .collect();
        Self {
            plan,
            locals,
            ops,
            output,
            nodes,
            wires: BTreeMap::new(),
            seed: Seed(seed),
            window,
            arrival_order: false,
        }
    }

    fn world(&self) -> usize {
        self.nodes.len() * self.locals
    }

    fn chunk(&self, key: Key) -> Chunk {
        let print = &self.ops[key.0 as usize].print;
        Geometry::new(print, self.world(), SLOT_BYTES).chunk(key.1)
    }

    fn inputs(&self, node: usize, key: Key) -> Vec<Vec<f32>> {
        let chunk = self.chunk(key);
        (node * self.locals..(node + 1) * self.locals)
            .filter(|rank| chunk.source.includes(*rank as u32))
            .map(|rank| {
                let from = chunk.input_offset / 4;
                self.ops[key.0 as usize].input[rank][from..from + chunk.bytes / 4].to_vec()
            })
            .collect()
    }

    fn drain(&mut self, me: usize) {
        while let Some(action) = self.nodes[me].core.poll() {
            match action {
                Action::Reduce { key, mut partials } => {
                    if self.arrival_order && partials.len() > 1 && self.seed.below(2) == 1 {
                        partials.swap(0, 1);
                    }
                    let mut inputs = self.inputs(me, key).into_iter();
                    let mut sum = inputs.next().unwrap();
                    let partials = partials
                        .iter()
                        .map(|p| self.nodes[me].pools.remove(&(p.link, p.class, p.slot)).unwrap());
                    for other in inputs.chain(partials.collect::<Vec<_>>()) {
                        sum.iter_mut().zip(other).for_each(|(sum, value)| *sum += value);
                    }
                    self.nodes[me].places.insert(key, sum);
                }
                Action::Move { key, from } => {
                    let at = (from.link, from.class, from.slot);
                    let data = self.nodes[me].pools.remove(&at).unwrap();
                    self.nodes[me].places.insert(key, data);
                }
                Action::Send { link, key, tree, stage } => {
                    let peer = self.nodes[me].core.flows().peers()[link];
                    let head = DataHead {
                        sequence: key.0,
                        chunk: key.1,
                        tree,
                        stage,
                        bytes: self.chunk(key).bytes,
                        print: self.ops[key.0 as usize].print,
                    };
                    let data = self.nodes[me].places[&key].clone();
                    let owed = self.nodes[me].core.take_owed(link);
                    let wire = self.wires.entry((me, peer)).or_default();
                    wire.push_back(Message::Credits(owed));
                    wire.push_back(Message::Data(head, data));
                    self.nodes[me].core.sent(key);
                }
                Action::Publish { key } => self.publish(me, key),
                Action::Done { key } => {
                    self.nodes[me].done.insert(key, true);
                }
                Action::Flood { link, cause } => {
                    let peer = self.nodes[me].core.flows().peers()[link];
                    self.wires.entry((me, peer)).or_default().push_back(Message::Abort(cause));
                }
            }
        }
        for link in 0..self.nodes[me].core.flows().peers().len() {
            if self.nodes[me].core.owes_much(link) {
                let peer = self.nodes[me].core.flows().peers()[link];
                let owed = self.nodes[me].core.take_owed(link);
                self.wires.entry((me, peer)).or_default().push_back(Message::Credits(owed));
            }
        }
    }

    fn publish(&mut self, me: usize, key: Key) {
        let chunk = self.chunk(key);
        let at = chunk.output_offset / 4;
        let data = self.nodes[me].places[&key].clone();
        for rank in me * self.locals..(me + 1) * self.locals {
            if chunk.sink.includes(rank as u32) {
                self.output[key.0 as usize][rank][at..at + data.len()].copy_from_slice(&data);
            }
        }
    }

    fn fail(&mut self, me: usize, cause: Cause, from: Option<usize>) {
        if self.nodes[me].core.fail(&cause, from) {
            self.nodes[me].cause = Some(cause);
        }
        self.drain(me);
    }

    fn violated(&mut self, me: usize, link: usize, why: Violation) {
        let peer = self.nodes[me].core.flows().peers()[link] as u32;
        let kind = match why {
            Violation::Mismatch { .. } => CauseKind::Mismatch,
            Violation::Protocol(_) => CauseKind::Protocol,
        };
        let cause = Cause::new(kind, me as u32, format!("{why:?}")).blaming(peer, "");
        self.fail(me, cause, None);
    }

    /// One step of a node on its own: begin an operation, activate a chunk or ready its inputs.
    fn advance(&mut self, me: usize) -> bool {
        if self.nodes[me].core.is_broken() {
            return false;
        }
        let (op, index) = self.nodes[me].next;
        let in_flight = self.nodes[me].core.active();
        if op < self.ops.len() && in_flight < self.window {
            let print = self.ops[op].print;
            if self.nodes[me].started == op {
                self.nodes[me].started += 1;
                if let Err((link, why)) = self.nodes[me].core.start(op as u64, print) {
                    self.violated(me, link, why);
                    return true;
                }
            }
            let geometry = Geometry::new(&print, self.world(), SLOT_BYTES);
            let chunk = geometry.chunk(index);
            let root = chunk.root().map(|rank| rank as usize / self.locals);
            if let Err((link, why)) = self.nodes[me].core.activate(op as u64, chunk, root) {
                self.violated(me, link, why);
            }
            self.drain(me);
            let last = index + 1 == geometry.chunks();
            self.nodes[me].next = if last { (op + 1, 0) } else { (op, index + 1) };
            return true;
        }
        let waiting: Vec<Key> = self.nodes[me]
            .core
            .chunks
            .iter()
            .map(|state| state.key)
            .filter(|key| self.nodes[me].core.wants_local(*key))
            .collect();
        if waiting.is_empty() {
            return false;
        }
        let key = waiting[self.seed.below(waiting.len())];
        self.nodes[me].core.local_ready(key);
        self.drain(me);
        true
    }

    fn deliver(&mut self, from: usize, to: usize) {
        let message = self.wires.get_mut(&(from, to)).and_then(VecDeque::pop_front);
        let Some(message) = message else { return };
        if self.nodes[to].dead {
            return;
        }
        let link = self.nodes[to].core.flows().peers().binary_search(&from).unwrap();
        let result = match message {
            Message::Abort(cause) => {
                self.fail(to, cause, Some(link));
                Ok(())
            }
            _ if self.nodes[to].core.is_broken() => Ok(()),
            Message::Credits(counts) => self.nodes[to].core.credits(link, counts),
            Message::Data(head, data) => self.nodes[to].core.place(link, &head).and_then(|place| {
                let node = &mut self.nodes[to];
                match place {
                    Place::Direct => {
                        node.places.insert(head.key(), data);
                    }
                    Place::Slot(slot) => {
                        let old = node.pools.insert((link, head.class(), slot), data);
                        assert!(old.is_none(), "a slot was given out twice");
                    }
                }
                node.core.arrived(link, &head, place)
            }),
        };
        if let Err(why) = result {
            self.violated(to, link, why);
        }
        self.drain(to);
    }

    /// Runs until nothing can move. Returns the steps taken; panics if there is no end.
    fn run(&mut self, mut death: Option<(usize, usize)>) -> usize {
        for step in 0..2_000_000 {
            if let Some((_, victim)) = death.filter(|(when, _)| *when == step) {
                self.kill(victim);
                death = None;
            }
            let mut wires: Vec<(usize, usize)> =
                self.wires.iter().filter(|(_, w)| !w.is_empty()).map(|(at, _)| *at).collect();
            wires.retain(|(_, to)| self.nodes[*to].stalled == 0);
            let choice = self.seed.below(wires.len() + self.nodes.len());
            if choice < wires.len() {
                let (from, to) = wires[choice];
                self.deliver(from, to);
                continue;
            }
            if self.seed.below(50) == 0 {
                let node = self.seed.below(self.nodes.len());
                self.nodes[node].stalled = 30;
            }
            let mut moved = !wires.is_empty();
            let first = choice - wires.len();
            for offset in 0..self.nodes.len() {
                let me = (first + offset) % self.nodes.len();
                if self.nodes[me].stalled > 0 {
                    self.nodes[me].stalled -= 1;
                    moved = true;
                } else if !self.nodes[me].dead && self.advance(me) {
                    moved = true;
                    break;
                }
            }
            if !moved && self.wires.values().all(VecDeque::is_empty) {
                if let Some((_, victim)) = death.take() {
                    self.kill(victim);
                    continue;
                }
                return step;
            }
        }
        panic!("no end in sight");
    }

    fn kill(&mut self, victim: usize) {
        self.nodes[victim].dead = true;
        let peers = self.nodes[victim].core.flows().peers().to_vec();
        for peer in peers {
            let cause = Cause::new(CauseKind::PeerDied, peer as u32, "").blaming(victim as u32, "");
            // What was under way still arrives; then the wire ends.
            let wire = self.wires.entry((victim, peer)).or_default();
            let kept = self.seed.below(wire.len() + 1);
            wire.truncate(kept);
            wire.push_back(Message::Abort(cause));
        }
    }

    fn assert_complete(&self) {
        for (at, node) in self.nodes.iter().enumerate() {
            assert_eq!(node.cause, None, "node {at}");
            assert_eq!(node.core.active(), 0, "node {at} waits: {:?}", node.core.waiting());
            assert!(node.pools.is_empty() && node.core.early.is_empty());
        }
        for (at, op) in self.ops.iter().enumerate() {
            assert_eq!(self.output[at], oracle(&self.plan, self.locals, op), "{:?}", op.print);
        }
    }
}

/// The same sums, serially, in the order of the plan.
fn oracle(plan: &Plan, locals: usize, op: &Op) -> Vec<Vec<f32>> {
    let world = plan.nodes().len() * locals;
    let geometry = Geometry::new(&op.print, world, SLOT_BYTES);
    let mut output = match op.print.kind {
        Kind::Allgather => vec![vec![0.0; op.print.count as usize * world]; world],
        Kind::ReduceScatter => vec![vec![0.0; op.print.count as usize]; world],
        _ => op.input.clone(),
    };
    for index in 0..geometry.chunks() {
        let chunk = geometry.chunk(index);
        let from = chunk.input_offset / 4;
        let cut = |rank: usize| op.input[rank][from..from + chunk.bytes / 4].to_vec();
        let root = chunk.root().map(|rank| rank as usize / locals);
        let result = match chunk.source.one() {
            Some(rank) => cut(rank as usize),
            None => subtree(
                plan,
                &chunk,
                root,
                root.unwrap_or(plan.trees()[chunk.tree].root),
                locals,
                &cut,
            ),
        };
        let at = chunk.output_offset / 4;
        for (rank, output) in output.iter_mut().enumerate() {
            if chunk.sink.includes(rank as u32) {
                output[at..at + result.len()].copy_from_slice(&result);
            }
        }
    }
    output
}

fn subtree(
    plan: &Plan,
    chunk: &Chunk,
    root: Option<usize>,
    node: usize,
    locals: usize,
    cut: &dyn Fn(usize) -> Vec<f32>,
) -> Vec<f32> {
    let flows = Flows::new(plan, node);
    let mut sum = cut(node * locals);
    let others = (node * locals + 1..(node + 1) * locals).map(cut);
    let partials = flows
        .flow(chunk.tree, root)
        .away
        .iter()
        .map(|link| subtree(plan, chunk, root, flows.peers()[*link], locals, cut));
    for other in others.chain(partials) {
        sum.iter_mut().zip(other).for_each(|(sum, value)| *sum += value);
    }
    sum
}

fn operation(seed: &mut Seed, kind: Kind, count: usize, world: usize) -> Op {
    let root = seed.below(world) as u32;
    let length = if kind == Kind::ReduceScatter { count * world } else { count };
    // Magnitudes that round: a sum in another order has other bits.
    let input = (0..world)
        .map(|_| {
            (0..length)
                .map(|_| {
                    (seed.below(2_000_001) as f32 - 1e6) * 10f32.powi(seed.below(9) as i32 - 4)
                })
                .collect()
        })
        .collect();
    let print = Fingerprint {
        kind,
        dtype: 0,
        element_bytes: 4,
        op: 0,
        root,
        count: count as u64,
        shape: 0,
    };
    Op { print, input }
}

fn mixed(seed: &mut Seed, world: usize) -> Vec<Op> {
    const KINDS: [Kind; 6] = [
        Kind::Allreduce,
        Kind::Broadcast,
        Kind::Reduce,
        Kind::Allgather,
        Kind::ReduceScatter,
        Kind::Barrier,
    ];
    (0..3 + seed.below(4))
        .map(|_| {
            let kind = KINDS[seed.below(KINDS.len())];
            let count = match kind {
                Kind::Barrier => 0,
                Kind::Allgather | Kind::ReduceScatter => seed.below(9000),
                _ => seed.below(40_000),
            };
            operation(seed, kind, count, world)
        })
        .collect()
}

#[test]
fn every_mix_of_operations_ends_with_the_oracle_s_bits() {
    for seed in 0..150 {
        let mut choice = Seed(seed);
        let nodes = 1 + choice.below(9);
        let locals = 1 + choice.below(2);
        let zone_a = choice.below(nodes + 1);
        let ops = mixed(&mut choice, nodes * locals);
        let (credits, window) = (1 + choice.below(4) as u32, 1 + choice.below(6));
        let mut sim = Sim::new(plan(nodes, zone_a), locals, ops, seed, credits, window);
        sim.run(None);
        sim.assert_complete();
    }
}

#[test]
fn the_order_of_arrival_does_not_reach_the_bits() {
    let mut choice = Seed(7);
    let op = operation(&mut choice, Kind::Allreduce, 20_000, 9);
    for seed in 0..20 {
        let mut sim = Sim::new(plan(9, 4), 1, vec![op.clone()], seed, 4, 8);
        sim.run(None);
        sim.assert_complete();
    }
}

#[test]
fn summing_in_the_order_of_arrival_would_be_caught() {
    let mut choice = Seed(7);
    let op = operation(&mut choice, Kind::Allreduce, 20_000, 9);
    let caught = (0..20).any(|seed| {
        let mut sim = Sim::new(plan(9, 4), 1, vec![op.clone()], seed, 4, 8);
        sim.arrival_order = true;
        sim.run(None);
        sim.output[0] != oracle(&sim.plan, 1, &op)
    });
    assert!(caught);
}

#[test]
fn every_survivor_learns_who_died() {
    for seed in 0..300 {
        let mut choice = Seed(seed);
        let nodes = 2 + choice.below(9);
        let ops = mixed(&mut choice, nodes);
        let zone_a = choice.below(nodes + 1);
        let mut sim = Sim::new(plan(nodes, zone_a), 1, ops, seed, 2, 4);
        let victim = choice.below(nodes);
        let when = choice.below(400);
        sim.run(Some((when, victim)));
        for (at, node) in sim.nodes.iter().enumerate().filter(|(at, _)| *at != victim) {
            let cause = node.cause.as_ref().unwrap_or_else(|| panic!("seed {seed}, node {at}"));
            assert_eq!((cause.kind, cause.peer), (CauseKind::PeerDied, Some(victim as u32)));
        }
    }
}

#[test]
fn two_deaths_leave_nobody_waiting() {
    for seed in 0..100 {
        let mut choice = Seed(seed);
        let nodes = 4 + choice.below(9);
        let ops = mixed(&mut choice, nodes);
        let mut sim = Sim::new(plan(nodes, nodes / 2), 1, ops, seed, 2, 4);
        let (one, other) = (choice.below(nodes), choice.below(nodes));
        sim.kill(other);
        sim.run(Some((choice.below(200), one)));
        for (at, node) in sim.nodes.iter().enumerate().filter(|(_, node)| !node.dead) {
            assert!(node.cause.is_some(), "seed {seed}, node {at}");
        }
    }
}

#[test]
fn a_rank_that_calls_something_else_is_named_by_its_neighbours() {
    let plan = plan(2, 1);
    let mut choice = Seed(3);
    let ours = operation(&mut choice, Kind::Allreduce, 100, 2).print;
    let theirs = Fingerprint { op: 3, ..ours };
    let mut core = TreeCore::new(Flows::new(&plan, 0), (0, 1), 4);
    let head =
        DataHead { sequence: 0, chunk: 0, tree: 0, stage: Stage::Up, bytes: 400, print: theirs };
    // It comes before we have begun: it is found out when we begin.
    let place = core.place(0, &head).unwrap();
    core.arrived(0, &head, place).unwrap();
    let (link, why) = core.start(0, ours).unwrap_err();
    assert_eq!((link, why), (0, Violation::Mismatch { sequence: 0, ours, theirs }));
    assert!(core.compare(0, theirs).is_err() && core.compare(0, ours).is_ok());
}

#[test]
fn frames_that_nobody_may_send_are_violations() {
    let plan = plan(2, 1);
    let print = operation(&mut Seed(3), Kind::Allreduce, 100, 2).print;
    let mut core = TreeCore::new(Flows::new(&plan, 0), (0, 1), 2);
    core.start(0, print).unwrap();
    let chunk = Geometry::new(&print, 2, SLOT_BYTES).chunk(0);
    core.activate(0, chunk, None).unwrap();
    let good = DataHead { sequence: 0, chunk: 0, tree: 0, stage: Stage::Up, bytes: 400, print };
    assert!(core.place(0, &DataHead { bytes: 404, ..good }).is_err());
    assert!(core.place(0, &DataHead { tree: 1, ..good }).is_err());
    let mut core = TreeCore::new(Flows::new(&plan, 0), (0, 1), 1);
    core.start(0, print).unwrap();
    assert!(core.place(0, &good).is_ok());
    assert!(core.place(0, &DataHead { sequence: 1, ..good }).is_err(), "no credit");
    assert!(core.credits(0, [1; CLASSES]).is_err(), "nothing was sent");
}
