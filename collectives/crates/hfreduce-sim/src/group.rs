//! A group of ranks that may fail, on a simulated clock: the core, its watch for signs of life, its causes and its
//! frames are the engine's own; what a driver does around them is done here as the real one does it, without
//! sockets. No payload travels: what is looked at is who learns what, and when.

mod failure;
mod frames;

use std::collections::BTreeSet;

use hfreduce_core::error::{AbortReason, ErrorKind};
use hfreduce_core::liveness::Liveness;
use hfreduce_core::{Action, DataHead, Fingerprint, Flows, Geometry, TreeCore};
use hfreduce_transport::wire::{Frame, HEAD_BYTES, Head};

use crate::agenda::{Agenda, MICROSECOND, MILLISECOND, Pipe, Time};
use crate::cluster::allreduce_print;
use crate::faults::{Fault, Scenario, Seed};

/// How often signs of life are given and looked for: as the driver does.
pub const TICK: Time = 100 * MILLISECOND;
const SLOT_BYTES: usize = 32 << 10;
const SLOTS: usize = 8;
const WINDOW: u32 = 4;
/// A gigabyte a second and 20 µs between any two machines.
const LINK_RATE: f64 = 1e9;
const LINK_LATENCY: Time = 20 * MICROSECOND;
/// A word in shared memory or the end of a process, until a neighbour in the machine has seen it.
const LOCAL_LATENCY: Time = 20 * MICROSECOND;
/// A rank that failed ends, and closes its connections, within this.
const EXIT_WITHIN: Time = 50 * MILLISECOND;

/// How a rank's story ended.
#[derive(Debug, Clone, Default)]
pub struct Ending {
    /// When it failed and why, if it did.
    pub failed: Option<(Time, AbortReason)>,
    /// Operations that it completed.
    pub completed: usize,
}

/// What a run showed.
#[derive(Debug, Clone)]
pub struct Report {
    /// By rank.
    pub endings: Vec<Ending>,
    /// A slow rank had a call left to be late with.
    pub was_late: bool,
    /// Events that were simulated.
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
    Heed(usize),
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
    /// What happened to it while it was stopped.
    missed: Vec<Event>,
    beats: u64,
    seen_beats: Vec<u64>,
    live: Liveness,
    /// Operations called, and when the last one was.
    called: usize,
    called_at: Time,
    ending: Ending,
}

struct Node {
    core: TreeCore,
    ends: Vec<(usize, usize)>,
    pipes: Vec<Pipe>,
    heard: Vec<bool>,
    told: Vec<Option<(u64, Option<u32>)>>,
    /// Of the operation under way: chunks activated and done.
    activated: u32,
    done: u32,
    abort: Option<AbortReason>,
}

/// See the module's text.
pub struct Group<'a> {
    scenario: &'a Scenario,
    fingerprints: Vec<Fingerprint>,
    agenda: Agenda<Event>,
    nodes: Vec<Node>,
    ranks: Vec<Rank>,
    /// Pairs of machines between which nothing passes.
    severed: BTreeSet<(usize, usize)>,
    late: bool,
    seed: Seed,
    events: u64,
}

impl<'a> Group<'a> {
    /// Everybody there, nothing called yet.
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
                heard: vec![false; ends.len()],
                told: vec![None; ends.len()],
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
                    called: 0,
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
            agenda: Agenda::default(),
            nodes,
            ranks,
            severed: BTreeSet::new(),
            late: false,
            seed: Seed(!scenario.seed),
            events: 0,
        }
    }

    /// Runs until everybody has failed or is gone, or until `horizon`.
    pub fn run(mut self, horizon: Time) -> Report {
        for rank in 0..self.ranks.len() {
            let (call, tick) = (self.seed.below(MILLISECOND), self.seed.below(TICK));
            self.agenda.plan(call, Event::Call(rank));
            self.agenda.plan(tick, Event::Tick(rank));
        }
        self.agenda.plan(self.scenario.at, Event::Accident);
        while self.agenda.next_at().is_some_and(|at| at <= horizon)
            && let Some(event) = self.agenda.take()
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
            Event::Call(rank) | Event::Tick(rank) | Event::Heed(rank) | Event::Exit(rank) => *rank,
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
            Event::Heed(rank) => self.heed(rank),
            Event::Exit(rank) => self.end_process(rank),
            Event::HangUp { rank, of } => {
                self.heed(rank);
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

    fn blame(&self, kind: ErrorKind, by: usize, whom: usize, detail: &str) -> AbortReason {
        let node = &self.scenario.plan.nodes()[self.node_of(whom)].name;
        AbortReason::new(kind, by as u32, detail).with_peer(whom as u32, node)
    }

    fn call(&mut self, rank: usize) {
        if self.ranks[rank].ending.failed.is_some()
            || self.ranks[rank].called == self.fingerprints.len()
        {
            return;
        }
        if let Fault::Slow(by) = self.scenario.fault
            && rank == self.scenario.victim
            && !self.late
            && self.agenda.now() >= self.scenario.at
        {
            self.late = true;
            return self.agenda.plan(self.agenda.now() + by, Event::Call(rank));
        }
        let operation = self.ranks[rank].called;
        self.ranks[rank].called += 1;
        self.ranks[rank].called_at = self.agenda.now();
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

    /// Activates chunks as slots allow, and readies them once all ranks of the machine have called.
    fn advance(&mut self, node: usize) {
        let owner = self.owner(node);
        let Some(operation) = self.ranks[owner].called.checked_sub(1) else { return };
        if self.ranks[owner].ending.completed > operation {
            return;
        }
        let geometry = self.geometry(operation);
        let all_there = self.locals(node).all(|rank| self.ranks[rank].called > operation);
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
                    let credits = self.nodes[node].core.take_owed(link);
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
            if self.nodes[node].core.owes_much(link) {
                let credits = self.nodes[node].core.take_owed(link);
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
        let operation = self.ranks[owner].called.saturating_sub(1);
        if self.ranks[owner].ending.completed > operation
            || self.nodes[node].done < self.geometry(operation).chunks()
        {
            return;
        }
        for rank in self.locals(node) {
            self.ranks[rank].ending.completed = operation + 1;
            let pause = self.scenario.pause + self.seed.below(MILLISECOND);
            self.agenda.plan(self.agenda.now() + pause, Event::Call(rank));
        }
    }
}
