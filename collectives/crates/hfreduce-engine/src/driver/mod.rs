//! Driver of one rank: it sleeps in one place, polls all events and executes the actions of the
//! core.
//!
//! The thread that holds the driver moves the data: a thread that waits for its operation, or the
//! background thread if none waits. The driver owns the parts and calls them in the order in which
//! a chunk moves, [`Driver::advance`]; a part owns its state, knows neither the driver nor the parts
//! above it, and returns a [`Fault`] where it cannot continue:
//!
//! ```text
//! start    local      an operation is split into chunks             operations (state of all of them)
//! stage    local      this rank contributes to a chunk              last_arriver, ring, slots, registered
//! activate channel    its owner has a slot for it
//! combine  channel    all have contributed: reduce, send, publish   reduce, core
//! deliver  local      the result is copied to the caller
//! flush    channel    frames to and from the neighbors              tree_links
//! progress p2p        messages between two ranks
//! ```
//! All parts stand on `node` (identity, segment, doorbells, poller), `fault` and `shared` (state
//! shared with callers, with `peer_bytes`). Around the parts: `waiting` (polls, sleeps), `failure` (aborts, closes),
//! `liveness` (heartbeats), `diagnosis` (what this rank waits for), `backend` (the interface, which a
//! remote driver also has).

mod backend;
mod channel;
mod diagnosis;
mod failure;
mod fault;
mod last_arriver;
mod liveness;
mod local;
mod node;
mod operations;
pub mod p2p;
mod peer_bytes;
mod reduce;
mod registered;
mod ring;
mod shared;
mod slots;
pub mod tree_links;
mod waiting;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::priority::PriorityGate;
use channel::Channel;
use fault::Fault;
use hfreduce_core::Kind;
use hfreduce_core::error::AbortReason;
use hfreduce_shm::arenas::Arenas;
pub use hfreduce_shm::lock;
use hfreduce_shm::segment::ShmSegment;
use hfreduce_transport::poller::{Poller, Ready};
use liveness::Heartbeats;
use local::Local;
use node::Node;
use operations::Operations;
use p2p::P2p;
use tree_links::TreeLinks;
use waiting::YieldBackoff;

pub use backend::Backend;
pub use node::NodePeers;
pub use peer_bytes::PeerBytes;
pub use shared::{Counters, Identity, Shared, Submission};

/// Interval of heartbeats and their checks.
pub const TICK: Duration = Duration::from_millis(100);

const TOKEN_DOORBELL: u64 = 0;
const TOKEN_TREE: u64 = 1 << 32;
const TOKEN_LOCAL: u64 = 2 << 32;
const TOKEN_PROCESS: u64 = 3 << 32;
const TOKEN_CLIENT: u64 = 6 << 32;

/// The driver of one rank: its parts, and the state of its loop.
pub struct Driver {
    node: Node,
    operations: Operations,
    local: Local,
    /// On ranks that own a channel.
    channel: Option<Channel>,
    p2p: P2p,
    heartbeats: Heartbeats,
    gate: PriorityGate,
    /// No chunk starts before: operations of another communicator have priority.
    held_until: Option<Instant>,
    ready: Vec<Ready>,
    ticked: Instant,
    spin: Duration,
    yield_backoff: YieldBackoff,
    /// Until when final frames are sent.
    drain_until: Option<Instant>,
}

/// What a driver is assembled from.
pub struct Parts {
    /// State shared with callers.
    pub shared: Arc<Shared>,
    /// The segment of the node.
    pub shm: ShmSegment,
    /// The ranks of the node.
    pub node_peers: NodePeers,
    /// The tree links, on owners.
    pub tree_links: Option<TreeLinks>,
    /// Point-to-point connections.
    pub p2p: P2p,
    /// Arenas of the node's ranks.
    pub arenas: Arenas,
    /// Time to poll before sleeping.
    pub spin: Duration,
}

impl Driver {
    /// Assembles a driver.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn new(parts: Parts) -> std::io::Result<Self> {
        let Parts { shared, shm, node_peers: peers, mut tree_links, p2p, arenas, spin } = parts;
        let poller = Poller::new()?;
        poller.watch_edges(&shared.doorbell, TOKEN_DOORBELL)?;
        for (local, socket, process) in &peers.watched {
            poller.watch(socket, TOKEN_LOCAL | *local as u64)?;
            if let Some(process) = process {
                poller.watch(process, TOKEN_PROCESS | *local as u64)?;
            }
        }
        if let Some(tree_links) = &mut tree_links {
            tree_links.watch(&poller, TOKEN_TREE)?;
            shared.counters.streams.store(tree_links.streams() as u64, Ordering::Relaxed);
        }
        let identity = &shared.identity;
        let links = tree_links.as_ref().map_or(0, TreeLinks::link_count);
        Ok(Self {
            heartbeats: Heartbeats::new(identity.locals().len(), links, identity.liveness),
            gate: PriorityGate::new(identity.priority, identity.held_back),
            node: Node { shared, shm, peers, arenas, poller, is_crowded: spin.is_zero() },
            operations: Operations::default(),
            local: Local::default(),
            channel: tree_links.map(Channel::new),
            p2p,
            held_until: None,
            ready: Vec::new(),
            ticked: Instant::now(),
            spin,
            yield_backoff: YieldBackoff::default(),
            drain_until: None,
        })
    }

    /// Makes progress without new events; true if anything changed.
    fn pump(&mut self) -> bool {
        let mut moved = false;
        if self.node.shared.pending.swap(false, Ordering::SeqCst) {
            moved |= self.take_pending();
        }
        self.check_abort_record();
        if self.node.is_broken() {
            self.flush_drain();
            return moved;
        }
        loop {
            let outcome = self.advance();
            let repeat = self.check(outcome);
            self.check_closed_links();
            if self.node.is_broken() {
                return true;
            }
            if !repeat {
                return moved;
            }
            moved = true;
        }
    }

    /// Moves every chunk one step further, in the order of its way; true if any was moved.
    fn advance(&mut self) -> Result<bool, Fault> {
        let mut moved = self.start_waiting()?;
        let held_back = self.is_held_back();
        let Self { node, operations, local, channel, p2p, .. } = self;
        if !held_back {
            moved |= local.stage(node, operations)?;
        }
        if let Some(channel) = channel {
            if !held_back {
                moved |= channel.activate(node, operations, local.staged, &mut local.slots)?;
            }
            moved |= channel.combine(node, operations, &mut local.slots)?;
        }
        operations.wake_waiting(node);
        let delivered = local.delivered;
        let mut finished =
            |number| channel.as_mut().is_some_and(|channel| channel.finished.remove(&number));
        while local.deliver(node, operations, &mut finished)? {
            operations.complete(node, p2p.oldest_collective());
        }
        moved |= local.delivered != delivered;
        if let Some(channel) = channel {
            moved |= channel.flush(node, operations)?;
        }
        moved |= p2p.progress(node, operations)?;
        Ok(moved)
    }

    /// True if there are chunks to start and those of another communicator have priority.
    fn is_held_back(&mut self) -> bool {
        let before = self.held_until.is_some();
        let shared = &self.node.shared;
        let next = self.channel.as_ref().map_or(0, |channel| channel.next);
        self.held_until = match next < self.operations.chunks {
            true => self.gate.held_until(&shared.identity.share.priority_levels, shared),
            false => None,
        };
        if self.held_until.is_some() && !before {
            shared.counters.held_back.fetch_add(1, Ordering::Relaxed);
        }
        self.held_until.is_some()
    }

    /// Takes calls and connections from other threads.
    fn take_pending(&mut self) -> bool {
        let shared = &self.node.shared;
        let request = lock(&shared.abort_request).take();
        if let Some((kind, reason)) = request {
            let rank = shared.identity.rank;
            let cause =
                AbortReason::new(kind, rank, reason).with_peer(rank, shared.own_node_name());
            self.abort(cause, None);
        }
        let (any, outcome) = self.p2p.take_connections(&self.node);
        self.check(outcome);
        if any && self.node.is_broken() {
            self.start_drain(); // They carry the reason.
        }
        let calls = std::mem::take(&mut *lock(&self.node.shared.submissions));
        let any = !calls.is_empty();
        for call in calls {
            self.take(call);
        }
        any
    }

    /// Starts a call, or holds it until the window has room for it.
    fn take(&mut self, call: Submission) {
        let collective = !matches!(call.operation.fingerprint.kind, Kind::Send | Kind::Recv);
        // After an abort, `start` only fails it.
        if collective
            && !self.node.is_broken()
            && self.operations.must_wait(&self.node, call.work.sequence)
        {
            self.operations.waiting.push_back(call);
            self.abort_if_peer_closed();
            return;
        }
        let outcome = self.start(call);
        self.check(outcome);
    }

    /// Starts held calls that the window has room for; true if there were any.
    fn start_waiting(&mut self) -> Result<bool, Fault> {
        let mut any = false;
        while let Some(call) = self.operations.next_waiting(&self.node) {
            self.start(call)?;
            any = true;
        }
        Ok(any)
    }

    /// Starts an operation: publishes it to the node, and assigns its chunks or messages.
    fn start(&mut self, call: Submission) -> Result<(), Fault> {
        let Submission { operation, work } = call;
        let Self { node, operations, channel, p2p, .. } = self;
        if let Some(error) = node.shared.error(Some(&work), "being called") {
            node.shared.record_unended(&work);
            work.fail(error);
            return Ok(());
        }
        let fingerprint = operation.fingerprint;
        let collective = !matches!(fingerprint.kind, Kind::Send | Kind::Recv);
        if collective {
            node.shm.enter(node.local(), work.sequence, &fingerprint);
            if let Some(channel) = channel
                && let Err((link, why)) = channel.tree.core.start(work.sequence, fingerprint)
            {
                p2p.adopt(operation, work);
                return Err(channel.tree.violation(node, link, why));
            }
        }
        if fingerprint.kind.uses_trees() {
            local::start(node, operations, operation, work);
        } else {
            p2p.start(node, operations, operation, work)?;
        }
        // A send or receive has no number among the collective operations.
        if collective {
            self.abort_if_peer_closed();
        }
        Ok(())
    }

    /// Handles socket events, waiting up to `timeout` for them.
    fn poll(&mut self, timeout: Duration) {
        let mut ready = std::mem::take(&mut self.ready);
        let waited = self.node.poller.wait(timeout, &mut ready);
        self.check(waited.map_err(|error| self.node.io_fault(format!("epoll_wait: {error}"))));
        for event in &ready {
            self.handle(*event);
        }
        self.ready = ready;
        let now = Instant::now();
        if now.duration_since(self.ticked) >= TICK {
            self.ticked = now;
            self.tick(now);
        }
    }

    fn handle(&mut self, event: Ready) {
        let index = (event.token & 0xffff_ffff) as usize;
        match event.token & !0xffff_ffff {
            TOKEN_TREE if !self.node.is_broken() => {
                let Some(channel) = &mut self.channel else { return };
                let outcome = channel.receive(&self.node, index, event, &mut self.operations);
                self.check(outcome);
                self.check_closed_links();
            }
            TOKEN_LOCAL | TOKEN_PROCESS => self.local_hang_up(index),
            p2p::TOKEN_OUT | p2p::TOKEN_IN if !self.node.is_broken() => {
                let outcome = self.p2p.handle(&self.node, &mut self.operations, event);
                self.check(outcome);
            }
            TOKEN_CLIENT => {
                self.node.shared.client_ready.store(true, Ordering::SeqCst);
                self.node.shared.waiters.wake_all();
            }
            _ => {}
        }
    }
}
