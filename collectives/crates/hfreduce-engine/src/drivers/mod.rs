//! The driver of one rank: it sleeps in one place, looks at everything, and asks the core.
//!
//! Whoever holds the driver moves the data: a thread that waits for its operation, or the
//! background thread while nobody waits. Split by subject:
//! - `node`: this rank's part inside its node (contribute, deliver, release);
//! - `combine`: the chunks that this rank owns, from contributions to results; `reduce`: one of them;
//! - `relay`: sums to which the ranks of a node add in turn, where they share processors;
//! - `registered`: memory that the ranks of a node use in place;
//! - `trunk`: the connections along the trees, on ranks that own a channel; `pools`: where what comes
//!   over them waits;
//! - `farewell`: how those end;
//! - `lending`: chunks that a neighbour on this machine copies out of our board;
//! - `mesh`: direct connections between two ranks;
//! - `failure`: who is to blame, and telling everybody;
//! - `flight`: what goes into the flight recorder;
//! - `mover`: this driver, or the one that leaves it all to a daemon;
//! - `shared`: what callers leave for the driver without taking it.

mod combine;
pub mod connection;
mod failure;
mod farewell;
mod flight;
pub mod lending;
pub mod mesh;
mod mover;
mod node;
pub mod poller;
mod pools;
mod reduce;
pub mod registered;
mod relay;
mod shared;
pub mod trunk;
pub mod wire;

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fd::{AsFd, OwnedFd};

use crate::board::{
    Board, FOR_ABORT, FOR_END, FOR_INPUT, FOR_RESULT, FOR_SLOT, FOR_TURN, Registered,
};
use crate::cause::Cause;
use crate::core::Geometry;
use crate::core::liveness::Liveness;
use crate::operation::Operation;
use crate::work::WorkState;
pub use mover::Mover;
pub use shared::{Counters, Identity, Shared, Submission, lock};

use mesh::Mesh;
use poller::{Poller, Ready};
use reduce::Scratch;
use registered::Arenas;
use relay::Relayed;
use trunk::Trunk;

/// How often signs of life are given and looked for.
pub const TICK: Duration = Duration::from_millis(100);

const TOKEN_BELL: u64 = 0;
const TOKEN_TRUNK: u64 = 1 << 32;
const TOKEN_LOCAL: u64 = 2 << 32;
const TOKEN_PROCESS: u64 = 3 << 32;
const TOKEN_MESH_OUT: u64 = 4 << 32;
const TOKEN_MESH_IN: u64 = 5 << 32;
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
    /// Whether the ranks add to it in turn.
    pub(crate) relayed: Relayed,
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
pub struct Neighbourhood {
    /// The bells of all local ranks, by local index.
    pub bells: Vec<OwnedFd>,
    /// (local index, socket, process) of those whose end we watch.
    pub watched: Vec<(usize, UnixStream, Option<OwnedFd>)>,
}

/// See the module's text.
pub struct Driver {
    shared: Arc<Shared>,
    board: Board,
    neighbourhood: Neighbourhood,
    poller: Poller,
    ready: Vec<Ready>,
    active: VecDeque<Active>,
    arenas: Arenas,
    scratch: Scratch,
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
    to_ring: u32,
    /// When the last allreduce ended.
    reduced_until: Option<Instant>,
    wants_slot: bool,
    wants_turn: bool,
    trunk: Option<Trunk>,
    mesh: Mesh,
    live: Liveness,
    beats: Vec<u64>,
    started: Instant,
    ticked: Instant,
    /// Liveness is judged only after everybody has connected.
    pub judging: bool,
    spin: Duration,
    /// Bytes of failure messages that still have to go out.
    farewell_until: Option<Instant>,
}

/// What a driver is made of.
pub struct Parts {
    /// Shared with callers.
    pub shared: Arc<Shared>,
    /// The node's memory.
    pub board: Board,
    /// The node's ranks.
    pub neighbourhood: Neighbourhood,
    /// The tree connections, on owners.
    pub trunk: Option<Trunk>,
    /// Direct connections.
    pub mesh: Mesh,
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
        let Parts { shared, board, neighbourhood, trunk, mesh, arenas, spin } = parts;
        let poller = Poller::new()?;
        poller.watch_edges(&shared.bell, TOKEN_BELL)?;
        for (local, socket, process) in &neighbourhood.watched {
            poller.watch(socket, TOKEN_LOCAL | *local as u64)?;
            if let Some(process) = process {
                poller.watch(process, TOKEN_PROCESS | *local as u64)?;
            }
        }
        if let Some(trunk) = &trunk {
            trunk.watch(&poller)?;
        }
        let now = Instant::now();
        let links = trunk.as_ref().map_or(0, Trunk::len);
        let locals = shared.identity.locals().len();
        let liveness_ms = shared.identity.liveness.as_millis() as u64;
        Ok(Self {
            live: Liveness::new(locals + links, liveness_ms, 0),
            beats: vec![0; locals],
            shared,
            board,
            neighbourhood,
            poller,
            ready: Vec::new(),
            active: VecDeque::new(),
            arenas,
            scratch: Scratch::default(),
            begun: 0,
            next_chunk: 0,
            next_stage: 0,
            next_activate: 0,
            next_deliver: 0,
            released: 0,
            free_below: 0,
            unpublished: VecDeque::new(),
            to_ring: 0,
            reduced_until: None,
            wants_slot: false,
            wants_turn: false,
            trunk,
            mesh,
            started: now,
            ticked: now,
            judging: false,
            spin,
            farewell_until: None,
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
            || self.mesh.is_busy()
            || !lock(&self.shared.submissions).is_empty()
            || self.farewell_until.is_some()
    }

    /// Moves data until `done` holds or `until` has come. The only place where a rank blocks.
    pub fn drive(&mut self, until: Instant, done: impl Fn(&Self) -> bool) {
        let mut idle_since: Option<Instant> = None;
        loop {
            let moved = self.pump();
            if done(self) {
                break;
            }
            let now = Instant::now();
            if now >= until {
                break;
            }
            if moved {
                idle_since = None;
            } else if now.duration_since(*idle_since.get_or_insert(now)) >= self.spin {
                self.sleep(until);
                idle_since = None;
                continue;
            } else {
                std::hint::spin_loop();
            }
            // Inside a node alone, memory tells everything but an end of somebody, and who waits
            // for one of those falls asleep soon: no system call for a look.
            if self.listens() || now.duration_since(self.ticked) >= TICK {
                self.poll(Duration::ZERO);
            }
        }
    }

    /// True if data may come through sockets.
    fn listens(&self) -> bool {
        self.trunk.as_ref().is_some_and(|trunk| trunk.len() > 0) || self.mesh.is_connected()
    }

    /// One look at everything without sleeping.
    pub fn glance(&mut self) {
        self.poll(Duration::ZERO);
        self.pump();
    }

    /// Everything that can move without new events; true if anything did.
    fn pump(&mut self) -> bool {
        let mut moved = false;
        if self.shared.news.swap(false, Ordering::SeqCst) {
            moved |= self.take_news();
        }
        self.heed_abort();
        if self.shared.broken.get().is_some() {
            self.flush_farewell();
            return moved;
        }
        loop {
            let mut again = self.stage();
            again |= self.activate();
            again |= self.combine();
            again |= self.deliver();
            again |= self.flush_trunk();
            again |= self.move_mesh();
            if !again || self.shared.broken.get().is_some() {
                return moved;
            }
            moved = true;
        }
    }

    fn take_news(&mut self) -> bool {
        let asked = lock(&self.shared.abort_asked).take();
        if let Some((kind, reason)) = asked {
            let cause = Cause::new(kind, self.shared.identity.rank, reason)
                .blaming(self.shared.identity.rank, self.own_node_name());
            self.fail(cause, None);
        }
        self.take_connections();
        let calls = std::mem::take(&mut *lock(&self.shared.submissions));
        let any = !calls.is_empty();
        for call in calls {
            self.begin(call);
        }
        any
    }

    fn own_node_name(&self) -> &str {
        self.shared.identity.placement.node_name(self.shared.identity.rank)
    }

    /// Takes what has happened at the sockets, waiting up to `timeout` for it.
    fn poll(&mut self, timeout: Duration) {
        let mut ready = std::mem::take(&mut self.ready);
        if let Err(error) = self.poller.wait(timeout, &mut ready) {
            self.fail(self.own_trouble(format!("epoll_wait: {error}")), None);
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
            TOKEN_TRUNK => self.read_trunk(index, event),
            TOKEN_LOCAL | TOKEN_PROCESS => self.local_hang_up(index),
            TOKEN_MESH_OUT | TOKEN_MESH_IN => self.mesh_event(event),
            TOKEN_CLIENT => {
                self.shared.called.store(true, Ordering::SeqCst);
                self.shared.room.call();
            }
            _ => {}
        }
    }

    fn sleep(&mut self, until: Instant) {
        let local = self.shared.identity.local();
        let reasons = self.sleep_reasons();
        self.board.fall_asleep(local, reasons);
        // The last look, after having said that we sleep: what changed before it is seen here,
        // what changes after it wakes us.
        if self.pump()
            || self.shared.news.load(Ordering::SeqCst)
            || self.nothing_to_wait_for()
            || self.sleep_reasons() & !reasons != 0
        {
            self.board.wake_up(local);
            return;
        }
        let now = Instant::now();
        let next_tick = self.ticked + TICK;
        let timeout = until.min(next_tick).saturating_duration_since(now);
        self.shared.counters.sleeps.fetch_add(1, Ordering::Relaxed);
        self.poll(timeout.max(Duration::from_micros(50)));
        self.board.wake_up(local);
    }

    /// The last look may have ended what we were to wait for.
    fn nothing_to_wait_for(&self) -> bool {
        self.active.is_empty() && !self.mesh.is_busy() && self.farewell_until.is_none()
    }

    fn sleep_reasons(&self) -> u32 {
        let rank = self.shared.identity.rank;
        let whole = self.active.front().is_some_and(|active| active.is_made_in_place(rank));
        let mut reasons = FOR_ABORT;
        if !self.turn_comes() {
            reasons |= if whole { FOR_END } else { FOR_RESULT };
        }
        if self.trunk.is_some() {
            reasons |= FOR_INPUT;
        }
        if self.wants_slot {
            reasons |= FOR_SLOT;
        }
        if self.wants_turn {
            reasons |= FOR_TURN;
        }
        reasons
    }

    /// After a change and [`Board::announce`].
    fn wake(&self, local: usize, reasons: u32) {
        if local != self.shared.identity.local() && self.board.must_wake(local, reasons) {
            self.shared.counters.rings.fetch_add(1, Ordering::Relaxed);
            poller::ring(&self.neighbourhood.bells[local]);
        }
    }

    fn wake_all(&self, reasons: u32) {
        self.board.announce();
        for local in 0..self.board.shape().locals {
            self.wake(local, reasons);
        }
    }

    /// True where ranks share processors: who is woken for little keeps the others from working.
    fn is_crowded(&self) -> bool {
        self.spin.is_zero()
    }

    fn now_ms(&self, now: Instant) -> u64 {
        now.duration_since(self.started).as_millis() as u64
    }

    /// Takes leave of everybody: our end is not a death. Waits, until `until`, for what we sent to
    /// have left this machine, but for nobody's answer.
    pub fn leave(&mut self, next: u64, until: Instant) {
        self.board.leave(self.shared.identity.local(), next);
        self.leave_trunk(next);
        self.mesh.leave(next);
        while self.unsent_bytes() + self.mesh.unsent_bytes() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
            self.flush_last_words();
        }
    }
}
