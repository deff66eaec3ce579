//! The driver of one rank: it sleeps in one place, looks at everything, and asks the core.
//!
//! Whoever holds the driver moves the data: a thread that waits for its operation, or the
//! background thread while nobody waits. Split by subject:
//! - `node`: this rank's part inside its node (contribute, deliver, release);
//! - `combine`: the chunks that this rank owns, from contributions to results; `reduce`: one of them;
//! - `last`: small operations, which whoever contributes last adds up;
//! - `relay`: sums to which the ranks of a node add in turn, where they share processors;
//! - `registered`: memory that the ranks of a node use in place;
//! - `tree_links`: the links along the trees, on ranks that own a channel; `pools`: where what comes over
//!   them waits;
//! - `transport`: what carries their frames; `streams` and `in_process` do;
//! - `priority`: whose chunks go first, where a process has several communicators;
//! - `shutdown`: how those end;
//! - `peer_memory`: chunks that a neighbour on this machine copies out of our segment;
//! - `p2p`: direct connections between two ranks;
//! - `failure`: who is to blame, and telling everybody;
//! - `flight`: what goes into the flight recorder;
//! - `backend`: this driver, or the one that leaves it all to a daemon;
//! - `waiting`: how it sleeps and wakes others;
//! - `window`: how many operations are outstanding;
//! - `shared`: what callers leave for the driver without taking it.

mod backend;
mod combine;
pub mod connection;
mod failure;
mod flight;
mod in_process;
mod last_arriver;
mod node;
pub mod p2p;
pub mod peer_memory;
pub mod poller;
mod pools;
pub mod priority;
mod reduce;
pub mod registered;
mod ring;
mod shared;
mod shutdown;
mod streams;
pub mod transport;
pub mod tree_links;
mod waiting;
mod window;
pub mod wire;

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fd::{AsFd, OwnedFd};

use crate::core::Geometry;
use crate::core::liveness::Liveness;
use crate::error::AbortReason;
use crate::operation::Operation;
use crate::shm::{Registered, ShmSegment};
use crate::work::WorkState;
pub use backend::Backend;
pub use shared::{Counters, Identity, Shared, Submission, lock};

use p2p::P2p;
use poller::{Poller, Ready};
use priority::{PriorityGate, UnderWay};
use reduce::Scratch;
use registered::Arenas;
use tree_links::TreeLinks;
use waiting::YieldBackoff;

/// How often signs of life are given and looked for.
pub const TICK: Duration = Duration::from_millis(100);

const TOKEN_DOORBELL: u64 = 0;
const TOKEN_TREE: u64 = 1 << 32;
const TOKEN_LOCAL: u64 = 2 << 32;
const TOKEN_PROCESS: u64 = 3 << 32;
const TOKEN_P2P_OUT: u64 = 4 << 32;
const TOKEN_P2P_IN: u64 = 5 << 32;
const TOKEN_CLIENT: u64 = 6 << 32;

/// One operation along the trees that this rank has begun.
pub(crate) struct Active {
    pub(crate) operation: Operation,
    pub(crate) work: Arc<WorkState>,
    pub(crate) geometry: Geometry,
    /// The number of its first chunk, counted through all operations.
    pub(crate) first: u64,
    /// Local ranks whose fingerprint was found equal.
    pub(crate) verified: u128,
    /// Its number among the operations along the trees.
    pub(crate) ordinal: u64,
    /// What of our memory others use in place.
    pub(crate) registered: Registered,
    /// The same of every local rank, once an owner needs it.
    pub(crate) others: Vec<Registered>,
    /// Who adds.
    pub(crate) algorithm: ReduceAlgorithm,
    /// Others of this process see that it is.
    pub(crate) _under_way: UnderWay,
}

/// Who of a node adds up an operation that combines values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReduceAlgorithm {
    /// Each chunk's owner. Also for operations that combine nothing.
    Owner,
    /// The ranks in turn.
    Ring,
    /// One of these two: rank 0 has not said yet which.
    Undecided,
    /// Whoever contributes last.
    LastArriver,
}

impl Active {
    fn end(&self) -> u64 {
        self.first + u64::from(self.geometry.chunks())
    }

    /// The last of its chunks that local rank `owner` owns, if it owns any.
    fn last_of(&self, owner: usize, identity: &Identity) -> Option<u64> {
        let chunks = self.geometry.chunks();
        let last = (0..chunks).rev().find(|index| identity.owner_of(*index) == owner)?;
        Some(self.first + u64::from(last))
    }
}

/// Peers on the same node, as seen by this rank.
pub struct NodePeers {
    /// The doorbell of all local ranks, by local index.
    pub doorbells: Vec<OwnedFd>,
    /// (local index, socket, process) of those whose end we watch.
    pub watched: Vec<(usize, UnixStream, Option<OwnedFd>)>,
}

/// See the module's text.
pub struct Driver {
    shared: Arc<Shared>,
    shm: ShmSegment,
    node_peers: NodePeers,
    poller: Poller,
    ready: Vec<Ready>,
    active: VecDeque<Active>,
    /// Collective calls that wait for the window.
    held: VecDeque<Submission>,
    /// Every operation below has ended here, and at all ranks of the node when we last looked.
    ended: u64,
    ended_by_all: u64,
    arenas: Arenas,
    scratch: Scratch,
    /// Where a contribution in pieces is put together, if it goes into no slot.
    pieces: Vec<u8>,
    /// Operations along the trees that have begun.
    begun: u64,
    /// The next chunk number to give to an operation, to contribute to, to make active as its
    /// owner, to deliver.
    next_chunk: u64,
    next_stage: u64,
    next_activate: u64,
    next_deliver: u64,
    /// We use no slot of a chunk below this one, and nobody did when we last looked below that.
    released: u64,
    free_below: u64,
    /// Owned chunks that are active, in order, and whether their results are in their places.
    unpublished: VecDeque<(u64, bool)>,
    /// Reasons for which others may sleep and that have come since we last rang.
    pending_wakeups: u32,
    /// When the last allreduce ended.
    reduced_until: Option<Instant>,
    turn: PriorityGate,
    /// No chunk begins before: another communicator's go first.
    held_until: Option<Instant>,
    wants_slot: bool,
    wants_turn: bool,
    tree_links: Option<TreeLinks>,
    p2p: P2p,
    live: Liveness,
    beats: Vec<u64>,
    started: Instant,
    ticked: Instant,
    /// Liveness is judged only after everybody has connected.
    pub liveness_active: bool,
    spin: Duration,
    yield_backoff: YieldBackoff,
    /// Bytes of failure messages that still have to go out.
    drain_until: Option<Instant>,
}

/// What a driver is made of.
pub struct Parts {
    /// Shared with callers.
    pub shared: Arc<Shared>,
    /// The node's memory.
    pub shm: ShmSegment,
    /// The node's ranks.
    pub node_peers: NodePeers,
    /// The tree connections, on owners.
    pub tree_links: Option<TreeLinks>,
    /// Direct connections.
    pub p2p: P2p,
    /// Memory that the node's ranks use in place.
    pub arenas: Arenas,
    /// How long to look before sleeping.
    pub spin: Duration,
}

impl Driver {
    /// Puts a driver together.
    ///
    /// # Errors
    /// Out of descriptors.
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
        let links = tree_links.as_ref().map_or(0, TreeLinks::len);
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
            begun: 0,
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

    /// Watches the process that this rank is served for: whoever waits hears of its words at once.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn serve(&self, client: impl AsFd) -> std::io::Result<()> {
        self.poller.watch_edges(client, TOKEN_CLIENT)
    }

    /// True while something is under way.
    pub fn is_busy(&self) -> bool {
        !self.active.is_empty()
            || !self.held.is_empty()
            || self.p2p.is_busy()
            || !lock(&self.shared.submissions).is_empty()
            || self.drain_until.is_some()
    }

    /// Everything that can move without new events; true if anything did.
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
            let mut again = self.begin_held();
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

    /// True if there are chunks to begin and those of another communicator go first.
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

    /// Takes what has happened at the sockets, waiting up to `timeout` for it.
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

    /// Takes leave of everybody: our end is not a death. Waits, until `until`, for what we sent to
    /// have left this machine, but for nobody's answer.
    pub fn leave(&mut self, next: u64, until: Instant) {
        self.shm.mark_closed(self.shared.identity.local(), next);
        self.close_tree_links(next);
        self.p2p.leave(next);
        while self.unsent_bytes() + self.p2p.unsent_bytes() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
            self.flush_final_frames();
        }
    }
}
