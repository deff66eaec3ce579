//! Driver of one rank: it sleeps in one place, polls all events and executes the actions of the
//! core.
//!
//! The thread that holds the driver moves the data: a thread that waits for its operation, or the
//! background thread if none waits. Modules:
//! - `node`: this rank's part inside its node (contribute, deliver, release);
//! - `combine`: the chunks that this rank owns, from contributions to results; `reduce`: one of
//!   them;
//! - `last_arriver`: small operations, which the last arriver reduces;
//! - `ring`: ring accumulation, where the ranks of a node share CPUs;
//! - `registered`: memory that the ranks of a node access in place;
//! - `tree_links`: the links along the trees, on ranks that own a channel; `pools`: partial sums
//!   received over them;
//! - `peer_memory`: segments of neighbors on this machine;
//! - `priority`: priority between the communicators of a process;
//! - `shutdown`: abort and close of the tree links;
//! - `p2p`: point-to-point connections between two ranks;
//! - `failure`: failure detection and reporting;
//! - `flight`: updates of the flight recorder;
//! - `backend`: this driver, or a remote one;
//! - `waiting`: sleeping and waking other ranks;
//! - `window`: the number of outstanding operations;
//! - `shared`: state shared with callers, outside the driver's lock.

mod backend;
mod combine;
mod failure;
mod flight;
mod last_arriver;
mod node;
pub mod p2p;
pub mod peer_memory;
mod pools;
pub mod priority;
mod reduce;
pub mod registered;
mod ring;
mod shared;
mod shutdown;
pub mod tree_links;
mod waiting;
mod window;

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fd::{AsFd, OwnedFd};

use crate::operation::Operation;
use crate::work::WorkState;
pub use backend::{Backend, RemoteDriver};
use hfreduce_core::Geometry;
use hfreduce_core::error::AbortReason;
use hfreduce_core::liveness::Liveness;
pub use hfreduce_shm::lock;
use hfreduce_shm::segment::{Registered, ShmSegment};
pub use shared::{Counters, Identity, Shared, Submission};

use hfreduce_shm::arenas::Arenas;
use hfreduce_transport::poller::{Poller, Ready};
use p2p::P2p;
use priority::{PriorityGate, UnderWay};
use reduce::Scratch;
use tree_links::TreeLinks;
use waiting::YieldBackoff;

/// Interval of heartbeats and their checks.
pub const TICK: Duration = Duration::from_millis(100);

const TOKEN_DOORBELL: u64 = 0;
const TOKEN_TREE: u64 = 1 << 32;
const TOKEN_LOCAL: u64 = 2 << 32;
const TOKEN_PROCESS: u64 = 3 << 32;
const TOKEN_P2P_OUT: u64 = 4 << 32;
const TOKEN_P2P_IN: u64 = 5 << 32;
const TOKEN_CLIENT: u64 = 6 << 32;

/// An operation along the trees that this rank has started.
pub struct Active {
    pub operation: Operation,
    pub work: Arc<WorkState>,
    pub geometry: Geometry,
    /// Number of its first chunk, over all operations.
    pub first: u64,
    /// Local ranks whose fingerprint is equal.
    pub verified: u128,
    /// Number of the operation along the trees.
    pub ordinal: u64,
    /// Buffers of this rank that other ranks access in place.
    pub registered: Registered,
    /// The same of every local rank, once an owner needs it.
    pub others: Vec<Registered>,
    /// The algorithm inside the node.
    pub algorithm: ReduceAlgorithm,
    /// Counts the operation for other communicators of the process.
    pub _under_way: UnderWay,
}

/// Algorithm of a reduction inside a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceAlgorithm {
    /// Each chunk's owner reduces it. Also for operations that do not reduce.
    Owner,
    /// The ranks add in turn.
    Ring,
    /// Owner or ring: rank 0 has not decided yet.
    Undecided,
    /// The last arriver reduces.
    LastArriver,
}

impl Active {
    fn end(&self) -> u64 {
        self.first + u64::from(self.geometry.chunks())
    }

    /// The last of its chunks that local rank `owner` owns, if any.
    fn last_of(&self, owner: usize, identity: &Identity) -> Option<u64> {
        let chunks = self.geometry.chunks();
        let last = (0..chunks).rev().find(|index| identity.owner_of(*index) == owner)?;
        Some(self.first + u64::from(last))
    }
}

/// The other ranks of the node, as seen by this rank.
pub struct NodePeers {
    /// Doorbells of all local ranks, by local index.
    pub doorbells: Vec<OwnedFd>,
    /// (local index, socket, process) of the ranks whose end is watched.
    pub watched: Vec<(usize, UnixStream, Option<OwnedFd>)>,
}

/// The driver of one rank.
pub struct Driver {
    shared: Arc<Shared>,
    shm: ShmSegment,
    node_peers: NodePeers,
    poller: Poller,
    ready: Vec<Ready>,
    active: VecDeque<Active>,
    /// Collective calls that wait for the window.
    held: VecDeque<Submission>,
    /// Every operation below this one has ended at this rank.
    ended: u64,
    ended_by_all: u64,
    arenas: Arenas,
    scratch: Scratch,
    /// Buffer in which a fragmented input is gathered if it uses no slot.
    pieces: Vec<u8>,
    /// Ordinal of the next operation along the trees.
    next_ordinal: u64,
    /// The next chunk to assign to an operation, to contribute to, to activate as its owner, to
    /// deliver.
    next_chunk: u64,
    next_stage: u64,
    next_activate: u64,
    next_deliver: u64,
    /// This rank has released the slots of all chunks below this one.
    released: u64,
    free_below: u64,
    /// Owned chunks that are active, in order, and whether their results are complete.
    unpublished: VecDeque<(u64, bool)>,
    /// Events since the last notification that other ranks may sleep on.
    pending_wakeups: u32,
    /// When the last allreduce ended.
    reduced_until: Option<Instant>,
    turn: PriorityGate,
    /// No chunk starts before: operations of another communicator have priority.
    held_until: Option<Instant>,
    wants_slot: bool,
    wants_turn: bool,
    tree_links: Option<TreeLinks>,
    p2p: P2p,
    live: Liveness,
    beats: Vec<u64>,
    started: Instant,
    ticked: Instant,
    /// Whether the silence of peers counts: all ranks have connected.
    pub liveness_active: bool,
    spin: Duration,
    yield_backoff: YieldBackoff,
    /// Until when final frames are sent.
    drain_until: Option<Instant>,
}

/// Parts of a driver.
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
        let Parts { shared, shm, node_peers, mut tree_links, p2p, arenas, spin } = parts;
        let poller = Poller::new()?;
        poller.watch_edges(&shared.doorbell, TOKEN_DOORBELL)?;
        for (local, socket, process) in &node_peers.watched {
            poller.watch(socket, TOKEN_LOCAL | *local as u64)?;
            if let Some(process) = process {
                poller.watch(process, TOKEN_PROCESS | *local as u64)?;
            }
        }
        if let Some(tree_links) = &mut tree_links {
            tree_links.watch(&poller)?;
            shared.counters.streams.store(tree_links.streams() as u64, Ordering::Relaxed);
        }
        let now = Instant::now();
        let links = tree_links.as_ref().map_or(0, TreeLinks::link_count);
        let locals = shared.identity.locals().len();
        let turn = PriorityGate::new(shared.identity.priority, shared.identity.held_back);
        let liveness_ms = shared.identity.liveness.as_millis() as u64;
        Ok(Self {
            live: Liveness::new(locals + links, liveness_ms, 0),
            beats: vec![0; locals],
            shared,
            shm,
            node_peers,
            poller,
            ready: Vec::new(),
            active: VecDeque::new(),
            held: VecDeque::new(),
            ended: 0,
            ended_by_all: 0,
            arenas,
            scratch: Scratch::default(),
            pieces: Vec::new(),
            next_ordinal: 0,
            next_chunk: 0,
            next_stage: 0,
            next_activate: 0,
            next_deliver: 0,
            released: 0,
            free_below: 0,
            unpublished: VecDeque::new(),
            pending_wakeups: 0,
            reduced_until: None,
            turn,
            held_until: None,
            wants_slot: false,
            wants_turn: false,
            tree_links,
            p2p,
            started: now,
            ticked: now,
            liveness_active: false,
            spin,
            yield_backoff: YieldBackoff::default(),
            drain_until: None,
        })
    }

    /// Watches the socket of a client process that this rank runs for, so that a waiting driver
    /// wakes up for its messages.
    ///
    /// # Errors
    /// A system call failed.
    pub fn watch_client(&self, client: impl AsFd) -> std::io::Result<()> {
        self.poller.watch_edges(client, TOKEN_CLIENT)
    }

    /// True while operations are in progress.
    pub fn is_busy(&self) -> bool {
        !self.active.is_empty()
            || !self.held.is_empty()
            || self.p2p.is_busy()
            || !lock(&self.shared.submissions).is_empty()
            || self.drain_until.is_some()
    }

    /// Makes progress without new events; true if anything changed.
    fn pump(&mut self) -> bool {
        let mut moved = false;
        if self.shared.pending.swap(false, Ordering::SeqCst) {
            moved |= self.take_pending();
        }
        self.check_abort_record();
        if self.shared.broken.get().is_some() {
            self.flush_drain();
            return moved;
        }
        loop {
            let mut again = self.start_held();
            let held = self.is_held();
            again |= !held && self.stage();
            again |= !held && self.activate();
            again |= self.combine();
            again |= self.deliver();
            again |= self.flush_tree_links();
            again |= self.progress_p2p();
            if !again || self.shared.broken.get().is_some() {
                return moved;
            }
            moved = true;
        }
    }

    /// True if there are chunks to start and those of another communicator have priority.
    fn is_held(&mut self) -> bool {
        let before = self.held_until.is_some();
        self.held_until = match self.next_activate < self.next_chunk {
            true => self.turn.held_until(&self.shared.identity.share.priority_levels, &self.shared),
            false => None,
        };
        if self.held_until.is_some() && !before {
            self.shared.counters.held_back.fetch_add(1, Ordering::Relaxed);
        }
        self.held_until.is_some()
    }

    fn take_pending(&mut self) -> bool {
        let asked = lock(&self.shared.abort_asked).take();
        if let Some((kind, reason)) = asked {
            let cause = AbortReason::new(kind, self.shared.identity.rank, reason)
                .with_peer(self.shared.identity.rank, self.own_node_name());
            self.fail(cause, None);
        }
        self.take_connections();
        let calls = std::mem::take(&mut *lock(&self.shared.submissions));
        let any = !calls.is_empty();
        for call in calls {
            self.take(call);
        }
        any
    }

    fn own_node_name(&self) -> &str {
        self.shared.own_node_name()
    }

    /// Handles socket events, waiting up to `timeout` for them.
    fn poll(&mut self, timeout: Duration) {
        let mut ready = std::mem::take(&mut self.ready);
        if let Err(error) = self.poller.wait(timeout, &mut ready) {
            self.fail(self.io_reason(format!("epoll_wait: {error}")), None);
        }
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
            TOKEN_TREE => self.read_tree_link(index, event),
            TOKEN_LOCAL | TOKEN_PROCESS => self.local_hang_up(index),
            TOKEN_P2P_OUT | TOKEN_P2P_IN => self.handle_p2p_event(event),
            TOKEN_CLIENT => {
                self.shared.client_ready.store(true, Ordering::SeqCst);
                self.shared.waiters.wake_all();
            }
            _ => {}
        }
    }

    fn now_ms(&self, now: Instant) -> u64 {
        now.duration_since(self.started).as_millis() as u64
    }

    /// Closes the communicator: the end of this rank is not a failure. Waits until `until` for sent
    /// frames to leave this machine, but not for an answer.
    pub fn close(&mut self, next: u64, until: Instant) {
        self.shm.mark_closed(self.shared.identity.local(), next);
        self.close_tree_links(next);
        self.p2p.close(next);
        while self.unsent_bytes() + self.p2p.unsent_bytes() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
            self.flush_final_frames();
        }
    }
}
