//! A whole group of cores over a simulated network: seeded order, delay, stall and death.

use std::collections::{BTreeMap, VecDeque};

use super::*;

/// A small generator: every schedule is identified by one number.
pub struct Seed(pub u64);

impl Seed {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % limit.max(1)
    }
}

const SLOT_BYTES: usize = 16 << 10;

enum Message {
    Data(DataHead, Vec<f32>),
    Credits([u8; CLASSES]),
    Abort(AbortReason),
}

pub struct Node {
    pub core: TreeCore,
    /// Operations started.
    started: usize,
    /// The next chunk to activate: (operation, chunk).
    next: (usize, u32),
    places: BTreeMap<Key, Vec<f32>>,
    pools: BTreeMap<(usize, usize, u32), Vec<f32>>,
    done: BTreeMap<Key, bool>,
    pub cause: Option<AbortReason>,
    pub dead: bool,
    stalled: usize,
}

pub struct Sim {
    pub plan: Plan,
    locals: usize,
    pub ops: Vec<Op>,
    pub output: Vec<Vec<Vec<f32>>>,
    pub nodes: Vec<Node>,
    /// Messages from one node to another.
    wires: BTreeMap<(usize, usize), VecDeque<Message>>,
    seed: Seed,
    window: usize,
    pub arrival_order: bool,
    /// A message may overtake at most this many others, minus one.
    pub streams: usize,
}

pub fn plan(nodes: usize, zone_a: usize) -> Plan {
    let places: Vec<NodePlace> = (0..nodes)
        .map(|node| NodePlace::new(format!("n{node}"), if node < zone_a { "A" } else { "B" }))
        .collect();
    Plan::new(&places).unwrap()
}

impl Sim {
    pub fn new(
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
            .map(|op| match op.fingerprint.kind {
                Kind::Allgather => vec![vec![0.0; op.fingerprint.count as usize * world]; world],
                Kind::ReduceScatter => vec![vec![0.0; op.fingerprint.count as usize]; world],
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
            streams: 1,
        }
    }

    fn world(&self) -> usize {
        self.nodes.len() * self.locals
    }

    fn chunk(&self, key: Key) -> Chunk {
        let fingerprint = &self.ops[key.0 as usize].fingerprint;
        Geometry::new(fingerprint, self.world(), SLOT_BYTES).chunk(key.1)
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
                        let is_root = flows.is_root(chunk.tree, chunk.rooted_at(root));
                        sum = self.ops[key.0 as usize].rounded(sum, is_root);
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
                        fingerprint: self.ops[key.0 as usize].fingerprint,
                    };
                    let data = self.nodes[me].places[&key].clone();
                    let credits = self.nodes[me].core.take_returns(link);
                    let wire = self.wires.entry((me, peer)).or_default();
                    wire.push_back(Message::Credits(credits));
                    wire.push_back(Message::Data(head, data));
                    self.nodes[me].core.sent(key);
                }
                Action::Publish { key } => self.publish(me, key),
                Action::Done { key } => {
                    self.nodes[me].done.insert(key, true);
                }
                Action::Abort { link, cause } => {
                    let peer = self.nodes[me].core.flows().peers()[link];
                    self.wires.entry((me, peer)).or_default().push_back(Message::Abort(cause));
                }
            }
        }
        for link in 0..self.nodes[me].core.flows().peers().len() {
            if self.nodes[me].core.should_return(link) {
                let peer = self.nodes[me].core.flows().peers()[link];
                let credits = self.nodes[me].core.take_returns(link);
                self.wires.entry((me, peer)).or_default().push_back(Message::Credits(credits));
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

    fn fail(&mut self, me: usize, cause: AbortReason, from: Option<usize>) {
        if self.nodes[me].core.fail(&cause, from) {
            self.nodes[me].cause = Some(cause);
        }
        self.drain(me);
    }

    fn violated(&mut self, me: usize, link: usize, why: Violation) {
        let peer = self.nodes[me].core.flows().peers()[link] as u32;
        let kind = match why {
            Violation::Mismatch { .. } => ErrorKind::Mismatch,
            Violation::Protocol(_) => ErrorKind::Protocol,
        };
        let cause = AbortReason::new(kind, me as u32, format!("{why:?}")).with_peer(peer, "");
        self.fail(me, cause, None);
    }

    /// One step of a node: start an operation, activate a chunk or ready its inputs.
    fn advance(&mut self, me: usize) -> bool {
        if self.nodes[me].core.is_broken() {
            return false;
        }
        let (op, index) = self.nodes[me].next;
        let in_flight = self.nodes[me].core.active();
        if op < self.ops.len() && in_flight < self.window {
            let fingerprint = self.ops[op].fingerprint;
            if self.nodes[me].started == op {
                self.nodes[me].started += 1;
                if let Err((link, why)) = self.nodes[me].core.start(op as u64, fingerprint) {
                    self.violated(me, link, why);
                    return true;
                }
            }
            let geometry = Geometry::new(&fingerprint, self.world(), SLOT_BYTES);
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
        let Some(wire) = self.wires.get_mut(&(from, to)) else { return };
        let ahead = self.streams.min(wire.len());
        let next = if ahead > 1 { self.seed.below(ahead) } else { 0 };
        let Some(message) = wire.remove(next) else { return };
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

    /// Runs until nothing can move and returns the steps taken; panics if it does not converge.
    pub fn run(&mut self, mut death: Option<(usize, usize)>) -> usize {
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
        panic!("no progress after 2,000,000 steps");
    }

    pub fn kill(&mut self, victim: usize) {
        self.nodes[victim].dead = true;
        let peers = self.nodes[victim].core.flows().peers().to_vec();
        for peer in peers {
            let cause =
                AbortReason::new(ErrorKind::PeerDied, peer as u32, "").with_peer(victim as u32, "");
            // Messages in flight still arrive; then the wire ends.
            let wire = self.wires.entry((victim, peer)).or_default();
            let length = self.seed.below(wire.len() + 1);
            wire.truncate(length);
            wire.push_back(Message::Abort(cause));
        }
    }

    pub fn assert_complete(&self) {
        for (at, node) in self.nodes.iter().enumerate() {
            assert_eq!(node.cause, None, "node {at}");
            assert_eq!(node.core.active(), 0, "node {at} waits: {:?}", node.core.waiting());
            assert!(node.pools.is_empty() && node.core.early.is_empty());
        }
        for (at, op) in self.ops.iter().enumerate() {
            assert_eq!(
                self.output[at],
                oracle(&self.plan, self.locals, op),
                "{:?}",
                op.fingerprint
            );
        }
    }
}
