//! A group of ranks with faults, on a simulated clock. The core, its failure detector, its abort reasons and
//! its frames are the engine's; the simulation replaces the driver and the sockets. No payload is transferred:
//! the subject is which rank learns of which failure, and when.

mod failure;
mod frames;

use std::collections::BTreeSet;

use hfreduce_core::error::{AbortReason, ErrorKind};
use hfreduce_core::liveness::Liveness;
use hfreduce_core::{Action, DataHead, Fingerprint, Flows, Geometry, TreeCore};
use hfreduce_transport::wire::{Frame, HEAD_BYTES, Head};

use crate::cluster::allreduce_print;
use crate::event_queue::{EventQueue, MICROSECOND, MILLISECOND, Pipe, Time};
use crate::scenario::{Fault, Scenario};
use crate::seed::Seed;

/// Interval of heartbeats and of their checks, as in the driver.
pub const TICK: Time = 100 * MILLISECOND;
const SLOT_BYTES: usize = 32 << 10;
const SLOTS: usize = 8;
const WINDOW: u32 = 4;
/// One GB/s and 20 µs between any two nodes.
const LINK_RATE: f64 = 1e9;
const LINK_LATENCY: Time = 20 * MICROSECOND;
/// Delay of a flag in shared memory, or of a process exit, until another rank of the node sees it.
const LOCAL_LATENCY: Time = 20 * MICROSECOND;
/// Maximum time from a rank's failure to its exit, which closes its connections.
const EXIT_WITHIN: Time = 50 * MILLISECOND;

/// Final state of a rank.
#[derive(Debug, Clone, Default)]
pub struct Ending {
    /// Time and reason of its failure, if any.
    pub failed: Option<(Time, AbortReason)>,
    /// Number of completed operations.
    pub completed: usize,
}

/// Result of a run.
#[derive(Debug, Clone)]
pub struct Report {
    /// Final states by rank.
    pub endings: Vec<Ending>,
    /// True if the slow rank had a call to delay.
    pub was_late: bool,
    /// Number of simulated events.
    pub events: u64,
}

#[derive(Debug, Clone)]
enum Message {
    Frame(Head),
    Abort(Vec<u8>),
    Raw([u8; HEAD_BYTES]),
    End,
}

#[derive(Debug, Clone)]
enum Event {
    Call(usize),
    Tick(usize),
    Arrived { node: usize, link: usize, message: Message },
    HangUp { rank: usize, of: usize },
    SeeAbort(usize),
    Exit(usize),
    Accident,
    Wake,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Running,
    Stopped,
    Gone,
}

struct Rank {
    life: Life,
    /// Events that arrived while the rank was suspended.
    missed: Vec<Event>,
    beats: u64,
    seen_beats: Vec<u64>,
    live: Liveness,
    /// Number of operations called, and the time of the last call.
    calls: usize,
    called_at: Time,
    ending: Ending,
}

struct Node {
    core: TreeCore,
    ends: Vec<(usize, usize)>,
    pipes: Vec<Pipe>,
    received: Vec<bool>,
    reported: Vec<Option<(u64, Option<u32>)>>,
    /// Chunks of the current operation that were activated and completed.
    activated: u32,
    done: u32,
    abort: Option<AbortReason>,
}

/// See the module's documentation.
pub struct Group<'a> {
    scenario: &'a Scenario,
    fingerprints: Vec<Fingerprint>,
    event_queue: EventQueue<Event>,
    nodes: Vec<Node>,
    ranks: Vec<Rank>,
    /// Pairs of nodes between which no traffic passes.
    severed: BTreeSet<(usize, usize)>,
    late: bool,
    seed: Seed,
    events: u64,
}

impl<'a> Group<'a> {
    /// A group in which every rank is running and has not called any operation.
    pub fn new(scenario: &'a Scenario) -> Self {
        let (plan, locals) = (&scenario.plan, scenario.locals);
        let cores: Vec<TreeCore> = (0..plan.nodes().len())
            .map(|me| TreeCore::new(Flows::new(plan, me), (0, 1), WINDOW))
            .collect();
        let ends: Vec<Vec<(usize, usize)>> = (0..cores.len())
            .map(|me| {
                let back = |peer: usize| cores[peer].flows().peers().binary_search(&me);
                let peers = cores[me].flows().peers().iter();
                peers.map(|peer| (*peer, back(*peer).unwrap_or_default())).collect()
            })
            .collect();
        let nodes: Vec<Node> = cores
            .into_iter()
            .zip(ends)
            .map(|(core, ends)| Node {
                core,
                pipes: vec![Pipe::new(LINK_RATE); ends.len()],
                received: vec![false; ends.len()],
                reported: vec![None; ends.len()],
                ends,
                activated: 0,
                done: 0,
                abort: None,
            })
            .collect();
        let liveness_ms = scenario.liveness / MILLISECOND;
        let ranks = (0..nodes.len() * locals)
            .map(|rank| {
                let links =
                    if rank.is_multiple_of(locals) { nodes[rank / locals].ends.len() } else { 0 };
                Rank {
                    life: Life::Running,
                    missed: Vec::new(),
                    beats: 0,
                    seen_beats: vec![0; locals],
                    live: Liveness::new(locals + links, liveness_ms, 0),
                    calls: 0,
                    called_at: 0,
                    ending: Ending::default(),
                }
            })
            .collect();
        Self {
            scenario,
            fingerprints: scenario
                .sizes_bytes
                .iter()
                .map(|bytes| allreduce_print(*bytes))
                .collect(),
            event_queue: EventQueue::default(),
            nodes,
            ranks,
            severed: BTreeSet::new(),
            late: false,
            seed: Seed(!scenario.seed),
            events: 0,
        }
    }

    /// Runs until every rank has failed or exited, or until `horizon`.
    pub fn run(mut self, horizon: Time) -> Report {
        for rank in 0..self.ranks.len() {
            let (call, tick) = (self.seed.below(MILLISECOND), self.seed.below(TICK));
            self.event_queue.plan(call, Event::Call(rank));
            self.event_queue.plan(tick, Event::Tick(rank));
        }
        self.event_queue.plan(self.scenario.at, Event::Accident);
        while self.event_queue.next_at().is_some_and(|at| at <= horizon)
            && let Some(event) = self.event_queue.take()
        {
            self.events += 1;
            self.handle(event);
        }
        Report {
            endings: self.ranks.into_iter().map(|rank| rank.ending).collect(),
            was_late: self.late,
            events: self.events,
        }
    }

    fn owner(&self, node: usize) -> usize {
        node * self.scenario.locals
    }

    fn locals(&self, node: usize) -> std::ops::Range<usize> {
        self.owner(node)..self.owner(node + 1)
    }

    fn is_owner(&self, rank: usize) -> bool {
        rank.is_multiple_of(self.scenario.locals)
    }

    fn node_of(&self, rank: usize) -> usize {
        rank / self.scenario.locals
    }

    fn handle(&mut self, event: Event) {
        let of = match &event {
            Event::Call(rank) | Event::Tick(rank) | Event::SeeAbort(rank) | Event::Exit(rank) => {
                *rank
            }
            Event::HangUp { rank, .. } => *rank,
            Event::Arrived { node, link, .. } => {
                let peer = self.nodes[*node].ends[*link].0;
                if self.severed.contains(&(peer.min(*node), peer.max(*node))) {
                    return;
                }
                self.owner(*node)
            }
            Event::Accident => return self.accident(),
            Event::Wake => return self.wake(),
        };
        match self.ranks[of].life {
            Life::Gone => return,
            Life::Stopped => return self.ranks[of].missed.push(event),
            Life::Running => {}
        }
        match event {
            Event::Call(rank) => self.call(rank),
            Event::Tick(rank) => self.tick(rank),
            Event::SeeAbort(rank) => self.see_abort(rank),
            Event::Exit(rank) => self.end_process(rank),
            Event::HangUp { rank, of } => {
                self.see_abort(rank);
                self.fail(
                    rank,
                    self.blame(ErrorKind::PeerDied, rank, of, "its process ended"),
                    None,
                );
            }
            Event::Arrived { node, link, message } => self.arrived(node, link, message),
            Event::Accident | Event::Wake => {}
        }
    }

    fn blame(&self, kind: ErrorKind, by: usize, peer: usize, detail: &str) -> AbortReason {
        let node = &self.scenario.plan.nodes()[self.node_of(peer)].name;
        AbortReason::new(kind, by as u32, detail).with_peer(peer as u32, node)
    }

    fn call(&mut self, rank: usize) {
        if self.ranks[rank].ending.failed.is_some()
            || self.ranks[rank].calls == self.fingerprints.len()
        {
            return;
        }
        if let Fault::Slow(by) = self.scenario.fault
            && rank == self.scenario.victim
            && !self.late
            && self.event_queue.now() >= self.scenario.at
        {
            self.late = true;
            return self.event_queue.plan(self.event_queue.now() + by, Event::Call(rank));
        }
        let operation = self.ranks[rank].calls;
        self.ranks[rank].calls += 1;
        self.ranks[rank].called_at = self.event_queue.now();
        let node = self.node_of(rank);
        if self.is_owner(rank) {
            (self.nodes[node].activated, self.nodes[node].done) = (0, 0);
            if let Err((link, why)) =
                self.nodes[node].core.start(operation as u64, self.fingerprints[operation])
            {
                return self.violated(node, link, why);
            }
        }
        self.advance(node);
    }

    /// Activates chunks as slots allow, and marks them ready once all ranks of the node have called.
    fn advance(&mut self, node: usize) {
        let owner = self.owner(node);
        let Some(operation) = self.ranks[owner].calls.checked_sub(1) else { return };
        if self.ranks[owner].ending.completed > operation {
            return;
        }
        let geometry = self.geometry(operation);
        let all_there = self.locals(node).all(|rank| self.ranks[rank].calls > operation);
        while self.nodes[node].activated < geometry.chunks()
            && self.nodes[node].core.active() < SLOTS
            && !self.nodes[node].core.is_broken()
        {
            let chunk = geometry.chunk(self.nodes[node].activated);
            self.nodes[node].activated += 1;
            if let Err((link, why)) = self.nodes[node].core.activate(operation as u64, chunk, None)
            {
                return self.violated(node, link, why);
            }
            self.drain(node);
        }
        if all_there {
            for index in 0..self.nodes[node].activated {
                self.nodes[node].core.local_ready((operation as u64, index));
            }
            self.drain(node);
        }
    }

    fn geometry(&self, operation: usize) -> Geometry {
        Geometry::new(&self.fingerprints[operation], self.ranks.len(), SLOT_BYTES)
    }

    fn drain(&mut self, node: usize) {
        let mut freed = false;
        while let Some(action) = self.nodes[node].core.poll() {
            match action {
                Action::Send { link, key, tree, stage } => {
                    let bytes = self.geometry(key.0 as usize).chunk(key.1).bytes;
                    let fingerprint = self.fingerprints[key.0 as usize];
                    let head =
                        DataHead { sequence: key.0, chunk: key.1, tree, stage, bytes, fingerprint };
                    let credits = self.nodes[node].core.take_returns(link);
                    let head =
                        Head { credits, payload_bytes: bytes, ..Head::bare(Frame::Data(head)) };
                    self.post(node, link, Message::Frame(head), bytes);
                    self.nodes[node].core.sent(key);
                }
                Action::Done { .. } => {
                    self.nodes[node].done += 1;
                    freed = true;
                }
                Action::Abort { link, cause } => {
                    let bytes = cause.encode();
                    let length = bytes.len();
                    self.post(node, link, Message::Abort(bytes), length);
                }
                Action::Reduce { .. } | Action::Move { .. } | Action::Publish { .. } => {}
            }
        }
        for link in 0..self.nodes[node].ends.len() {
            if self.nodes[node].core.should_return(link) {
                let credits = self.nodes[node].core.take_returns(link);
                let head = Head { credits, ..Head::bare(Frame::Credit) };
                self.post(node, link, Message::Frame(head), 0);
            }
        }
        if freed {
            self.complete(node);
            self.advance(node);
        }
    }

    fn complete(&mut self, node: usize) {
        let owner = self.owner(node);
        let operation = self.ranks[owner].calls.saturating_sub(1);
        if self.ranks[owner].ending.completed > operation
            || self.nodes[node].done < self.geometry(operation).chunks()
        {
            return;
        }
        for rank in self.locals(node) {
            self.ranks[rank].ending.completed = operation + 1;
            let pause = self.scenario.pause + self.seed.below(MILLISECOND);
            self.event_queue.plan(self.event_queue.now() + pause, Event::Call(rank));
        }
    }
}
