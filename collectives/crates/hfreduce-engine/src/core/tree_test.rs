//! Whole groups of cores over a simulated network: seeded order, delay, stall and death.

use std::collections::{BTreeMap, VecDeque};

use hfreduce_plan::{NodePlace, Plan};

use super::*;
use crate::cause::CauseKind;
use crate::core::{Determinism, Geometry, Kind};

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

impl Op {
    fn element_bytes(&self) -> usize {
        usize::from(self.print.element_bytes)
    }

    /// As a node writes a sum: elements of two bytes are bf16, rounded wherever they are not wide.
    fn written(&self, mut sum: Vec<f32>, is_root: bool) -> Vec<f32> {
        if self.element_bytes() == 2 && (is_root || !self.print.modes.wide) {
            sum.iter_mut().for_each(|value| *value = bf16(*value));
        }
        sum
    }
}

/// The nearest bf16, ties to even.
fn bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
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
        let op = &self.ops[key.0 as usize];
        let (from, count) =
            (chunk.input_offset / op.element_bytes(), chunk.bytes / op.element_bytes());
        (node * self.locals..(node + 1) * self.locals)
            .filter(|rank| chunk.source.includes(*rank as u32))
            .map(|rank| op.input[rank][from..from + count].to_vec())
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
                    let chunk = self.chunk(key);
                    if chunk.reduces() {
                        let root = chunk.root().map(|rank| rank as usize / self.locals);
                        let flows = self.nodes[me].core.flows();
                        let is_root = flows.is_root(chunk.tree, chunk.hung_at(root));
                        sum = self.ops[key.0 as usize].written(sum, is_root);
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
                        bytes: self.chunk(key).bytes_in(stage),
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
        let at = chunk.output_offset / self.ops[key.0 as usize].element_bytes();
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
        let from = chunk.input_offset / op.element_bytes();
        let count = chunk.bytes / op.element_bytes();
        let cut = |rank: usize| op.input[rank][from..from + count].to_vec();
        let root = chunk.hung_at(chunk.root().map(|rank| rank as usize / locals));
        let result = match chunk.source.one() {
            Some(rank) => cut(rank as usize),
            None => {
                let top = root.unwrap_or(plan.trees()[chunk.tree].root);
                subtree(plan, (chunk.tree, root), top, locals, op, &cut)
            }
        };
        let at = chunk.output_offset / op.element_bytes();
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
    (tree, root): (usize, Option<usize>),
    node: usize,
    locals: usize,
    op: &Op,
    cut: &dyn Fn(usize) -> Vec<f32>,
) -> Vec<f32> {
    let flows = Flows::new(plan, node);
    let mut sum = cut(node * locals);
    let others = (node * locals + 1..(node + 1) * locals).map(cut);
    let partials = flows
        .flow(tree, root)
        .away
        .iter()
        .map(|link| subtree(plan, (tree, root), flows.peers()[*link], locals, op, cut));
    for other in others.chain(partials) {
        sum.iter_mut().zip(other).for_each(|(sum, value)| *sum += value);
    }
    op.written(sum, flows.is_root(tree, root))
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
        modes: Determinism::DEFAULT,
    };
    Op { print, input }
}

/// The same of bf16, or of fp32, under these modes.
fn under(modes: Determinism, short: bool, mut op: Op) -> Op {
    let modes = Determinism { wide: modes.wide && short, ..modes };
    let modes = if op.print.kind.reduces() { modes } else { Determinism::DEFAULT };
    let element_bytes = if short { 2 } else { 4 };
    op.print = Fingerprint { modes, element_bytes, ..op.print };
    if short {
        op.input.iter_mut().flatten().for_each(|value| *value = bf16(*value));
    }
    op
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
        let (modes, short) = (Determinism::from_code(choice.below(4) as u8), choice.below(2) == 1);
        let ops = mixed(&mut choice, nodes * locals);
        let ops = ops.into_iter().map(|op| under(modes, short, op)).collect();
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

/// Nothing travels back on which credits could ride.
#[test]
fn sums_for_one_rank_alone_do_not_starve_each_other() {
    for seed in 0..60 {
        let mut choice = Seed(seed);
        let nodes = 3 + choice.below(6);
        let root = choice.below(nodes) as u32;
        let one = |choice: &mut Seed| {
            let count = 1 + choice.below(30_000);
            let mut op = operation(choice, Kind::Reduce, count, nodes);
            op.print.root = root;
            op
        };
        let ops = (0..6).map(|_| one(&mut choice)).collect();
        let mut sim = Sim::new(plan(nodes, nodes), 1, ops, seed, 2 + seed as u32 % 3, 6);
        sim.run(None);
        sim.assert_complete();
    }
}

/// A tensor in one operation, and in pieces of several kinds: what each element became.
fn in_pieces(seed: u64, modes: Determinism, short: bool) -> (Vec<f32>, Vec<f32>) {
    let mut choice = Seed(seed);
    let (nodes, locals) = (2 + choice.below(8), 1 + choice.below(2));
    let (world, zone_a) = (nodes * locals, choice.below(nodes + 1));
    let plan = plan(nodes, zone_a);
    let length = 3000 * world;
    let whole = under(modes, short, operation(&mut choice, Kind::Allreduce, length, world));
    let (mut at, mut ops, mut cuts) = (0, Vec::new(), Vec::new());
    while at < length {
        let kind = [Kind::Allreduce, Kind::Reduce, Kind::ReduceScatter][choice.below(3)];
        let blocks = if kind == Kind::ReduceScatter { world } else { 1 };
        let count = (1 + choice.below(20_000)).min(length - at).div_ceil(blocks);
        let end = (at + count * blocks).min(length);
        let kind = if at + count * blocks > length { Kind::Allreduce } else { kind };
        let count = if kind == Kind::ReduceScatter { count } else { end - at };
        let print = Fingerprint {
            kind,
            count: count as u64,
            root: choice.below(world) as u32,
            ..whole.print
        };
        let input = whole.input.iter().map(|input| input[at..end].to_vec()).collect();
        ops.push(Op { print, input });
        cuts.push((at, count));
        at = end;
    }
    let mut sim = Sim::new(plan.clone(), locals, ops, seed, 3, 6);
    sim.run(None);
    sim.assert_complete();
    let mut pieces = vec![0.0; length];
    for ((op, output), (at, count)) in sim.ops.iter().zip(&sim.output).zip(cuts) {
        for (rank, output) in output.iter().enumerate() {
            match op.print.kind {
                Kind::ReduceScatter => {
                    pieces[at + rank * count..at + (rank + 1) * count].copy_from_slice(output);
                }
                Kind::Reduce if rank as u32 != op.print.root => {}
                _ => pieces[at..at + count].copy_from_slice(output),
            }
        }
    }
    let mut sim = Sim::new(plan, locals, vec![whole], seed, 3, 6);
    sim.run(None);
    (std::mem::take(&mut sim.output[0][0]), pieces)
}

#[test]
fn stable_sums_have_the_same_bits_in_whatever_pieces_they_come() {
    for seed in 0..30 {
        let modes = Determinism { stable: true, wide: seed % 3 == 0 };
        let (whole, pieces) = in_pieces(seed, modes, seed % 2 == 0);
        assert!(whole == pieces, "seed {seed}");
    }
    let other = |seed| {
        let (whole, pieces) = in_pieces(seed, Determinism::DEFAULT, false);
        whole != pieces
    };
    assert!((0..5).any(other), "without the mode they differ, so this test sees something");
}

#[test]
fn a_wide_sum_is_the_exact_tree_of_binary32_rounded_once() {
    let mut differs = false;
    for seed in 0..20 {
        let mut choice = Seed(seed);
        let nodes = 2 + choice.below(8);
        let modes = Determinism { stable: true, wide: true };
        let op = under(modes, true, operation(&mut choice, Kind::Allreduce, 20_000, nodes));
        let mut exact = op.clone();
        exact.print = Fingerprint { element_bytes: 4, ..op.print };
        let mut narrow = op.clone();
        narrow.print.modes.wide = false;
        let outputs = [op, exact, narrow].map(|op| {
            let mut sim = Sim::new(plan(nodes, nodes / 2), 1, vec![op], seed, 2, 4);
            sim.run(None);
            std::mem::take(&mut sim.output[0][0])
        });
        let rounded: Vec<f32> = outputs[1].iter().map(|value| bf16(*value)).collect();
        assert!(outputs[0] == rounded, "seed {seed}");
        differs |= outputs[2] != rounded;
    }
    assert!(differs, "rounded at every node it is something else");
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
