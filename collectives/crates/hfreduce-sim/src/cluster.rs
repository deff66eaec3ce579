//! Allreduces of a whole cluster: the engine's core on every node, the node's resources and the network between
//! nodes on one simulated clock.
//!
//! The core decides what is reduced and sent, and when. The simulation models only how long each step takes
//! ([`Machine`]) and how many steps of a kind a node does at a time.

mod steps;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use hfreduce_core::credit::{CLASSES, Key};
use hfreduce_core::{
    Chunk, DataHead, Determinism, Fingerprint, Flows, Geometry, Kind, Stage, TreeCore,
};
use hfreduce_plan::Plan;
use serde::Serialize;

use crate::SimError;
use crate::event_queue::{EventQueue, Pipe, Time, seconds};
use crate::hardware::Hardware;
use crate::machine::Machine;

/// Settings of the engine, with its defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Settings {
    /// The largest chunk.
    pub slot_bytes: usize,
    /// Chunks that a node processes at a time.
    pub slots: usize,
    /// Chunks in flight between two nodes, for each tree and direction.
    pub window: u32,
    /// Steps of a kind (copies up, copies down, passes over the inputs, frames) in flight at a time on a node:
    /// while one step waits for a resource, another can proceed.
    pub depth: usize,
    /// Guarantees about bits. Wide sums assume a 16-bit type, others 32-bit numbers.
    #[serde(skip)]
    pub modes: Determinism,
}

impl Default for Settings {
    fn default() -> Self {
        Self { slot_bytes: 256 << 10, slots: 32, window: 16, depth: 2, modes: Determinism::DEFAULT }
    }
}

/// Result of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// Time from the first call to the last result on the last node, in seconds.
    pub seconds: f64,
    /// Payload bytes over each zone border: (from zone, to zone, bytes).
    pub zone_bytes: Vec<(String, String, f64)>,
    /// Share of the time for which each resource of the busiest node was busy, busiest first.
    pub busiest: Vec<(&'static str, f64)>,
    /// Number of simulated events.
    pub events: u64,
}

impl Outcome {
    /// Bytes per second: size over time.
    pub fn algorithm_rate(&self, bytes: u64) -> f64 {
        bytes as f64 / self.seconds
    }
}

/// Simulates allreduces of these sizes, all called together on every node of `plan`.
///
/// # Errors
/// [`SimError::Empty`] without operations, [`SimError::Stuck`] if the core stops before the end (a bug in the
/// core).
pub fn allreduce(
    plan: &Plan,
    hardware: &Hardware,
    settings: Settings,
    sizes_bytes: &[u64],
) -> Result<Outcome, SimError> {
    if sizes_bytes.is_empty() {
        return Err(SimError::Empty);
    }
    Cluster::new(plan, hardware, settings, sizes_bytes).run()
}

enum Event {
    Fetched(usize, u64),
    Reduced(usize, Key),
    Sent(usize, Key),
    Arrived { to: usize, link: usize, head: DataHead, credits: [u8; CLASSES] },
    Credits { to: usize, link: usize, credits: [u8; CLASSES] },
    Delivered(usize, u64),
}

/// A step that waits for a sum.
enum DeferredStep {
    Send { link: usize, stage: Stage },
    Deliver,
}

struct Node {
    core: TreeCore,
    machine: Machine,
    zone: usize,
    /// For each link: the node at its end, and the link's index there.
    ends: Vec<(usize, usize)>,
    /// Chunks in order: `freed..staged` have a slot.
    staged: u64,
    freed: u64,
    /// State of each of those: delivered (1), settled by the core (2).
    state: VecDeque<u8>,
    to_fetch: VecDeque<u64>,
    fetching: usize,
    to_reduce: VecDeque<(Key, usize)>,
    reducing: usize,
    deferred: BTreeMap<Key, Vec<DeferredStep>>,
    to_deliver: VecDeque<u64>,
    delivering: usize,
    outbox: BTreeSet<(Key, u8, usize)>,
    sending: usize,
}

struct Operation {
    fingerprint: Fingerprint,
    geometry: Geometry,
    first: u64,
}

struct Cluster {
    hardware: Hardware,
    settings: Settings,
    event_queue: EventQueue<Event>,
    nodes: Vec<Node>,
    zones: Vec<String>,
    zone_links: BTreeMap<(usize, usize), (Pipe, f64)>,
    operations: Vec<Operation>,
    chunks: u64,
    remaining_deliveries: u64,
    events: u64,
}

const DELIVERED: u8 = 1;
const SETTLED: u8 = 2;

impl Cluster {
    fn new(plan: &Plan, hardware: &Hardware, settings: Settings, sizes_bytes: &[u64]) -> Self {
        let mut zones: Vec<String> = Vec::new();
        let mut zone_of = Vec::new();
        for place in plan.nodes() {
            let index = zones.iter().position(|zone| *zone == place.zone);
            zone_of.push(index.unwrap_or(zones.len()));
            if index.is_none() {
                zones.push(place.zone.clone());
            }
        }
        let cores: Vec<TreeCore> = (0..plan.nodes().len())
            .map(|me| TreeCore::new(Flows::new(plan, me), (0, 1), settings.window))
            .collect();
        let end = |me: usize, peer: usize| {
            let back = cores[peer].flows().peers().binary_search(&me);
            (peer, back.unwrap_or_default())
        };
        let ends: Vec<Vec<(usize, usize)>> = (0..cores.len())
            .map(|me| cores[me].flows().peers().iter().map(|peer| end(me, *peer)).collect())
            .collect();
        let nodes: Vec<Node> = cores
            .into_iter()
            .zip(ends)
            .zip(zone_of)
            .map(|((core, ends), zone)| Node {
                core,
                machine: Machine::new(hardware),
                zone,
                ends,
                staged: 0,
                freed: 0,
                state: VecDeque::new(),
                to_fetch: VecDeque::new(),
                fetching: 0,
                to_reduce: VecDeque::new(),
                reducing: 0,
                deferred: BTreeMap::new(),
                to_deliver: VecDeque::new(),
                delivering: 0,
                outbox: BTreeSet::new(),
                sending: 0,
            })
            .collect();
        let mut chunks = 0;
        let operations = sizes_bytes
            .iter()
            .map(|bytes| {
                let fingerprint = promised(allreduce_print(*bytes), settings.modes);
                let geometry = Geometry::new(&fingerprint, nodes.len(), settings.slot_bytes);
                let first = chunks;
                chunks += u64::from(geometry.chunks());
                Operation { fingerprint, geometry, first }
            })
            .collect();
        Self {
            hardware: *hardware,
            settings,
            event_queue: EventQueue::default(),
            remaining_deliveries: chunks * nodes.len() as u64,
            nodes,
            zones,
            zone_links: BTreeMap::new(),
            operations,
            chunks,
            events: 0,
        }
    }

    fn run(mut self) -> Result<Outcome, SimError> {
        (0..self.nodes.len()).for_each(|node| self.stage(node));
        while let Some(event) = self.event_queue.take() {
            self.events += 1;
            self.handle(event);
            if self.remaining_deliveries == 0 {
                return Ok(self.outcome());
            }
        }
        let waiting = self.nodes.iter().enumerate().find_map(|(at, node)| {
            node.core.waiting().map(|waiting| format!("node {at} waits for {waiting:?}"))
        });
        Err(SimError::Stuck {
            at: seconds(self.event_queue.now()),
            waiting: waiting.unwrap_or_default(),
        })
    }

    fn outcome(self) -> Outcome {
        let end = self.event_queue.now();
        let share = |busy: Time| busy as f64 / end.max(1) as f64;
        let mut busiest: Vec<(&'static str, f64)> = Vec::new();
        for node in &self.nodes {
            for (at, (name, busy)) in node.machine.busy().into_iter().enumerate() {
                match busiest.get_mut(at) {
                    Some(entry) => entry.1 = entry.1.max(share(busy)),
                    None => busiest.push((name, share(busy))),
                }
            }
        }
        busiest.sort_by(|a, b| b.1.total_cmp(&a.1));
        Outcome {
            seconds: seconds(end),
            zone_bytes: self
                .zone_links
                .iter()
                .map(|((from, to), (_, bytes))| {
                    (self.zones[*from].clone(), self.zones[*to].clone(), *bytes)
                })
                .collect(),
            busiest,
            events: self.events,
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Fetched(me, number) => {
                self.nodes[me].fetching -= 1;
                let (sequence, chunk) = self.chunk(number);
                self.nodes[me].core.local_ready((sequence, chunk.index));
                self.drain(me);
                self.fetch(me);
            }
            Event::Reduced(me, key) => {
                self.nodes[me].reducing -= 1;
                for step in self.nodes[me].deferred.remove(&key).unwrap_or_default() {
                    match step {
                        DeferredStep::Send { link, stage } => {
                            self.nodes[me].outbox.insert((key, stage as u8, link));
                        }
                        DeferredStep::Deliver => self.publish(me, key),
                    }
                }
                self.send(me);
                self.reduce(me);
            }
            Event::Sent(me, key) => {
                self.nodes[me].sending -= 1;
                self.nodes[me].core.sent(key);
                self.drain(me);
                self.send(me);
            }
            Event::Arrived { to, link, head, credits } => {
                let core = &mut self.nodes[to].core;
                let arrived = core
                    .credits(link, credits)
                    .and_then(|()| core.place(link, &head))
                    .and_then(|place| core.arrived(link, &head, place));
                debug_assert_eq!(arrived, Ok(()), "nodes follow the protocol");
                self.drain(to);
            }
            Event::Credits { to, link, credits } => {
                let result = self.nodes[to].core.credits(link, credits);
                debug_assert_eq!(result, Ok(()), "nodes follow the protocol");
                self.drain(to);
            }
            Event::Delivered(me, number) => {
                self.nodes[me].delivering -= 1;
                self.remaining_deliveries -= 1;
                self.settle(me, number, DELIVERED);
                self.deliver(me);
            }
        }
    }

    fn chunk(&self, number: u64) -> (u64, Chunk) {
        let at = self.operations.partition_point(|operation| operation.first <= number) - 1;
        let operation = &self.operations[at];
        (at as u64, operation.geometry.chunk((number - operation.first) as u32))
    }

    fn number(&self, key: Key) -> u64 {
        self.operations[key.0 as usize].first + u64::from(key.1)
    }

    fn bytes(&self, key: Key) -> f64 {
        self.operations[key.0 as usize].geometry.chunk(key.1).bytes as f64
    }
}

/// An allreduce of `bytes` bytes of 32-bit numbers.
pub(crate) fn allreduce_print(bytes: u64) -> Fingerprint {
    Fingerprint {
        kind: Kind::Allreduce,
        dtype: 0,
        element_bytes: 4,
        op: 0,
        root: 0,
        count: bytes.div_ceil(4),
        shape: 0,
        modes: Determinism::DEFAULT,
    }
}

fn promised(fingerprint: Fingerprint, modes: Determinism) -> Fingerprint {
    match modes.wide {
        true => {
            Fingerprint { modes, element_bytes: 2, count: fingerprint.count * 2, ..fingerprint }
        }
        false => Fingerprint { modes, ..fingerprint },
    }
}
